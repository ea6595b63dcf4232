"""The endpoint as clients see it: three dialects, streams, retries, limits, a restart. Plain HTTP."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from roll_async.agents.gateway.server import PolicyGateway

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"name": "add", "description": "?", "parameters": {"type": "object", "properties": {}}}


def served(work, texts, sessions, **options):
    """Run `work(http, endpoint, gateway, session)`; returns (its result, session, policy)."""

    async def main():
        with ThreadPoolExecutor(1) as executor:
            session, policy, _ = sessions(texts, executor=executor, **options)
            gateway = PolicyGateway()
            await gateway.start()
            endpoint = gateway.open(session)
            try:
                async with aiohttp.ClientSession(headers={"authorization": f"Bearer {endpoint.api_key}"}) as http:
                    return await work(http, endpoint, gateway, session), session, policy
            finally:
                await gateway.close()

    return asyncio.run(main())


async def post(http, endpoint, path, body, **headers):
    async with http.post(endpoint.base_url + path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, (text if body.get("stream") else json.loads(text))


def chat(*messages, **more):
    return {"model": "policy", "messages": [{"role": r, "content": c} for r, c in messages], **more}


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


def test_a_tool_loop_in_chat_completions_is_one_exact_row(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body = chat(("user", "1+1"), tools=[{"type": "function", "function": ADD}])
        _, first = await post(http, endpoint, "/chat/completions", body)
        said = first["choices"][0]
        assert said["finish_reason"] == "tool_calls" and said["message"]["content"] is None
        call = said["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        body["messages"] += [said["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
        status, second = await post(http, endpoint, "/chat/completions", body)
        assert status == 200 and second["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
        assert second["usage"]["total_tokens"] == sum(
            second["usage"][key] for key in ("prompt_tokens", "completion_tokens")
        )

    _, session, policy = served(work, [CALL, "ab"], sessions)
    assert len(exact(session, policy)) == 1 and not session.tree.branches


def test_a_tool_loop_in_anthropic_messages_is_one_exact_row(sessions, exact):
    async def work(http, endpoint, gateway, session):
        tool = {"name": "add", "description": "?", "input_schema": ADD["parameters"]}
        body = {"model": "m", "max_tokens": 100, "system": "be brief", "tools": [tool]}
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
        headers = {"authorization": "", "x-api-key": endpoint.api_key}
        _, first = await post(http, endpoint, "/messages", body, **headers)
        assert first["stop_reason"] == "tool_use"
        use = first["content"][-1]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "2"}]}
        body["messages"] += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        _, second = await post(http, endpoint, "/messages", body, **headers)
        assert second["content"] == [{"type": "text", "text": "the"}] and second["stop_reason"] == "end_turn"

    _, session, policy = served(work, [f"ab {CALL}", "the"], sessions)
    assert len(exact(session, policy)) == 1 and not session.tree.branches


def test_a_tool_loop_in_responses_is_one_exact_row(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body = {"model": "m", "instructions": "be brief", "input": "1+1", "tools": [{"type": "function", **ADD}]}
        _, first = await post(http, endpoint, "/responses", body)
        kinds = [item["type"] for item in first["output"]]
        assert kinds == ["message", "function_call"]
        call = first["output"][1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        body["input"] = [{"role": "user", "content": "1+1"}, *first["output"], output]
        _, second = await post(http, endpoint, "/responses", body)
        assert second["output"][0]["content"][0]["text"] == "the"

    _, session, policy = served(work, [f"ab {CALL}", "the"], sessions)
    assert len(exact(session, policy)) == 1 and not session.tree.branches


def test_streams_carry_the_same_turn(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body = chat(("user", "1"), stream=True, stream_options={"include_usage": True})
        _, text = await post(http, endpoint, "/chat/completions", body)
        assert text.endswith("data: [DONE]\n\n")
        chunks = events(text)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == "ab the"
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        body = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "2"}], "stream": True}
        _, text = await post(http, endpoint, "/messages", body)
        found = events(text)
        assert [e["type"] for e in found][0] == "message_start" and found[-1]["type"] == "message_stop"
        block = next(e for e in found if e["type"] == "content_block_start")
        assert block["content_block"]["type"] == "tool_use"
        _, text = await post(http, endpoint, "/responses", {"model": "m", "input": "3", "stream": True})
        found = events(text)
        assert found[-1]["type"] == "response.completed"
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "the"

    _, session, policy = served(work, ["ab the", CALL, "the"], sessions)
    assert len(exact(session, policy)) == 3


def test_retries_with_an_id_or_a_count_get_the_first_reply_and_others_do_not(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body = chat(("user", "1"))
        found = await asyncio.gather(
            post(http, endpoint, "/chat/completions", body, **{"idempotency-key": "k"}),
            post(http, endpoint, "/chat/completions", body, **{"idempotency-key": "k"}),
        )
        assert found[0] == found[1]
        _, first = await post(http, endpoint, "/chat/completions", body, **{"x-stainless-retry-count": "0"})
        _, again = await post(http, endpoint, "/chat/completions", body, **{"x-stainless-retry-count": "1"})
        _, fresh = await post(http, endpoint, "/chat/completions", body, **{"x-stainless-retry-count": "0"})
        assert first["id"] == again["id"] != fresh["id"]

    _, session, policy = served(work, ["ab", "the", "a b"], sessions, delay_s=0.01)
    assert len(policy.sampled) == 3 and dict(session.tree.branches) == {"resampled": 2}
    exact(session, policy)


def test_a_restart_of_the_server_between_two_turns_loses_nothing(sessions, exact):
    async def work(http, endpoint, gateway, session):
        _, first = await post(http, endpoint, "/chat/completions", chat(("user", "1")))
        await gateway.close()
        with pytest.raises(aiohttp.ClientError):
            await post(http, endpoint, "/chat/completions", chat(("user", "1")))
        await gateway.start()
        text = first["choices"][0]["message"]["content"]
        status, _ = await post(
            http, endpoint, "/chat/completions", chat(("user", "1"), ("assistant", text), ("user", "2"))
        )
        assert status == 200

    _, session, policy = served(work, ["ab", "the"], sessions)
    assert len(exact(session, policy)) == 1


def test_a_client_that_leaves_finds_its_turn_when_it_comes_back(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body, key = chat(("user", "1")), {"idempotency-key": "k"}
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(post(http, endpoint, "/chat/completions", body, **key), 0.05)
        return await post(http, endpoint, "/chat/completions", body, **key)

    (status, reply), session, policy = served(work, ["ab"], sessions, delay_s=0.3)
    assert status == 200 and reply["choices"][0]["message"]["content"] == "ab" and len(policy.sampled) == 1
    exact(session, policy)


def test_limits_and_refusals_have_codes_that_no_client_tries_again(sessions):
    async def work(http, endpoint, gateway, session):
        statuses = {}
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        for name, path, body in (
            ("image", "/chat/completions", {"messages": [{"role": "user", "content": image}]}),
            ("empty", "/chat/completions", {"messages": []}),
            ("n", "/chat/completions", chat(("user", "1"), n=2)),
            ("role", "/chat/completions", chat(("king", "1"))),
            ("previous", "/responses", {"input": "x", "previous_response_id": "r"}),
        ):
            status, answer = await post(http, endpoint, path, body)
            statuses[name] = status
            assert answer["error"]["code"] == "invalid_request_error", name
        await post(http, endpoint, "/chat/completions", chat(("user", "1")))
        status, answer = await post(http, endpoint, "/chat/completions", chat(("user", "2")))
        assert (status, answer["error"]["code"]) == (400, "trajectory_ended")
        async with http.post(endpoint.base_url + "/chat/completions", data=b"{") as response:
            assert response.status == 400
        async with http.get(endpoint.base_url + "/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        wrong = {"authorization": "Bearer sk-guess"}
        assert (await post(http, endpoint, "/chat/completions", chat(("user", "1")), **wrong))[0] == 401
        gateway.shut(endpoint)
        assert (await post(http, endpoint, "/chat/completions", chat(("user", "1"))))[0] == 401
        return statuses

    statuses, session, _ = served(work, ["ab", "ab"], sessions, max_turns=1)
    assert set(statuses.values()) == {400}


def test_an_engine_that_fails_is_an_error_that_may_be_tried_again(sessions, exact):
    async def work(http, endpoint, gateway, session):
        body, key = chat(("user", "1")), {"idempotency-key": "k"}
        assert (await post(http, endpoint, "/chat/completions", body, **key))[0] == 503
        assert (await post(http, endpoint, "/chat/completions", body, **key))[0] == 200

    _, session, policy = served(work, [RuntimeError("lost"), "ab"], sessions)
    exact(session, policy)
