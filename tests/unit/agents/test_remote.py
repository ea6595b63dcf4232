"""`serve-policy` in front of a remote API: what is sent, what is recorded, and that the key stays where it belongs."""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest

from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.processes.remote import RemoteModel, RemoteOptions, RemoteTurns

sys.path.insert(0, str(Path(__file__).parent))
from remote_api import KEY, Remote, answer, chat, listening

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def with_tokens(message, ids, logprobs, finish="stop"):
    content = [{"token": f"t{i}", "logprob": x, "bytes": None} for i, x in enumerate(logprobs)]
    return {
        **answer(message, finish, token_ids=ids, logprobs={"content": content}),
        "prompt_token_ids": [1, 2, 3],
    }


def served(answers, work, **options):
    """(result of `work(post)`, the remote, the records); `post(path, body)` gives (status, body)."""
    remote, records = Remote(answers), []

    async def main():
        async with listening(remote) as address:
            model = RemoteModel(RemoteOptions(base_url=address, model="there", key=KEY, **options))
            turns = RemoteTurns("main", model, records.append)
            gateway = PolicyGateway(model="there", adopt=lambda key: turns if key == "token" else None)
            await gateway.start()
            try:
                async with aiohttp.ClientSession(headers={"authorization": "Bearer token"}) as http:

                    async def post(path, body):
                        async with http.post(gateway.base_url + path, json=body) as reply:
                            return reply.status, await reply.json()

                    return await work(post)
            finally:
                await gateway.close()
                await model.close()

    return asyncio.run(main()), remote, records


def test_a_tool_loop_passes_through_and_tokens_are_recorded_where_the_remote_gives_them():
    async def work(post):
        body = chat(("user", "1+1"), tools=[ADD], temperature=0.5, max_tokens=9000)
        _, first = await post("/chat/completions", body)
        said = first["choices"][0]
        assert said["finish_reason"] == "tool_calls" and said["message"]["tool_calls"] == [CALL]
        body["messages"] += [said["message"], {"role": "tool", "tool_call_id": "c7", "content": "2"}]
        status, second = await post("/chat/completions", body)
        assert status == 200 and second["choices"][0]["message"]["content"] == "two"
        assert second["usage"]["total_tokens"] == 7

    first = with_tokens({"content": None, "tool_calls": [CALL]}, [7, 8], [-0.5, -0.25], "tool_calls")
    _, remote, records = served([first, answer({"content": "two"})], work, max_new_tokens=64)
    assert remote.keys == [f"Bearer {KEY}"] * 2
    sent = remote.bodies[1]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("there", 0.5, 64)
    assert sent["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c7"},
    ]
    assert [record["turn"] for record in records] == [0, 1] and records[0]["message"]["tool_calls"] == [CALL]
    kept = [(r["prompt_token_ids"], r["token_ids"], r["logprobs"], r["tokens"]) for r in records]
    assert kept == [([1, 2, 3], [7, 8], [-0.5, -0.25], ["t0", "t1"]), (None, None, None, None)]
    assert records[1]["messages"] == sent["messages"] and KEY not in json.dumps(records)


def test_an_agent_of_the_other_dialect_reaches_the_same_remote():
    async def work(post):
        tool = {"name": "add", "description": "?", "input_schema": {"type": "object", "properties": {}}}
        body = {"model": "m", "max_tokens": 20, "system": "be brief", "tools": [tool]}
        body["messages"] = [{"role": "user", "content": "1+1"}]
        _, first = await post("/messages", body)
        assert first["stop_reason"] == "tool_use" and first["content"][-1]["input"] == {"a": 1}

    _, remote, _ = served([answer({"content": None, "tool_calls": [CALL]}, "tool_calls")], work)
    assert [m["role"] for m in remote.bodies[0]["messages"]] == ["system", "user"]
    assert remote.bodies[0]["max_tokens"] == 20 and "temperature" not in remote.bodies[0]


def test_a_field_that_the_remote_refuses_by_name_is_left_out_from_then_on():
    def picky(body):
        if "return_token_ids" in body:
            return 400, '{"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}'
        if "logprobs" in body:
            return 422, '{"detail": [{"loc": ["body", "logprobs"], "msg": "extra fields not permitted"}]}'
        if "max_tokens" in body:
            return 400, '{"error": {"message": "\'max_tokens\' is not supported, use \'max_completion_tokens\'"}}'
        return answer({"content": "fine"})

    async def work(post):
        return [await post("/chat/completions", chat(("user", "hello"))) for _ in range(2)]

    found, remote, records = served([picky] * 5, work)
    assert [status for status, _ in found] == [200, 200] and len(remote.bodies) == 5
    assert remote.bodies[-1]["max_completion_tokens"] == 512
    assert [(r["message"]["content"], r["token_ids"], r["logprobs"]) for r in records] == [("fine", None, None)] * 2


@pytest.mark.parametrize(
    ("told", "status", "said"),
    [
        ((401, f'{{"error": {{"message": "wrong key {KEY}"}}}}'), 400, "the remote answered 401: wrong key ***"),
        ((400, '{"error": {"message": "too long a prompt"}}'), 400, "400: too long a prompt"),
        ((307, "elsewhere"), 400, "307"),
        ((429, "slowly"), 503, "429: slowly"),
        ((500, "oh"), 503, "500: oh"),
        ({"object": "error"}, 503, "is no chat completion"),
        (answer({"content": [{"type": "image_url"}]}), 503, "only text"),
        ({**answer({"content": "fine"}), "usage": {"prompt_tokens": "many"}}, 503, "ValueError: invalid literal"),
        ({"choices": [{"message": {"content": "fine"}, "logprobs": {"content": [5]}}]}, 503, "AttributeError"),
    ],
)
def test_what_the_remote_refuses_is_told_without_the_key_and_retried_only_where_that_helps(told, status, said):
    async def work(post):
        return await post("/chat/completions", chat(("user", "hello")))

    (found, body), remote, records = served([told], work)
    assert found == status and said in body["error"]["message"] and len(remote.bodies) == 1
    assert KEY not in json.dumps(body) and not records


@pytest.mark.slow
def test_a_remote_that_is_away_or_slow_may_be_asked_again():
    async def late(body):
        await asyncio.sleep(1)
        return answer({"content": "late"})

    async def work(post):
        return await post("/chat/completions", chat(("user", "hello")))

    (status, body), _, _ = served([late], work, timeout_s=0.3)
    assert status == 503 and "TimeoutError" in body["error"]["message"]


def test_tokens_and_log_probs_that_do_not_fit_each_other_are_not_kept(caplog):
    async def work(post):
        return await post("/chat/completions", chat(("user", "hello")))

    _, _, (record,) = served([with_tokens({"content": "ab"}, [7, 8, 9], [-0.5, -0.25])], work)
    assert record["message"]["content"] == "ab" and record["token_ids"] is record["logprobs"] is None
    assert "3 tokens and 2 log-probs" in caplog.text
