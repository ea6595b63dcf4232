"""Agents in processes of their own: started as a command for each trajectory, or asked over HTTP."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
from aiohttp import web

from roll_async.agents.external import HttpAgent
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.play import run_agent
from roll_async.agents.protocol import Task, is_agent
from roll_async.config.schema_rollout import ENV_TYPES
from roll_async.envs.registry import WORLDS, WorldSpec, build, check
from roll_async.schema import Outcome
from tests.patience import patient

ASK = """
import json, os, sys, urllib.request

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]
"""
OPENAI = """
import json, os
from openai import OpenAI

task = json.loads(os.environ["ROLL_ASYNC_TASK"])
client, messages = OpenAI(), [{"role": "user", "content": task["row"]["question"]}]
for number in range(3):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    said = reply.choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": f"and {number}?"}]
print("a line that is no result")
print(json.dumps({"reward": 0.5, "solved": True, "metrics": {"tag": len(task["tag"]), "seed": task["seed"]}}))
"""


def run_one(sessions, spec, texts=("the ab", "the", "a b"), *, seed=1, silence_s=60.0, **options):
    """(ending, session, policy) of one trajectory of this agent at a real gateway."""
    session, policy, _ = sessions(texts, **options)

    async def work():
        gateway = PolicyGateway(model="policy")
        await gateway.start()
        try:
            task = Task(tag="Mine", seed=seed)
            limits = {"max_seconds": float("inf"), "silence_s": silence_s}
            return await run_agent(build(spec), task, session, gateway.open(session), **limits)
        finally:
            await gateway.close()

    return asyncio.run(work()), session, policy


def command(program, **values):
    return WorldSpec(env_type="command", values={"command": [sys.executable, "-c", program], **values})


@pytest.mark.slow
def test_a_command_with_the_openai_client_is_trained_on_exactly_what_was_sampled(sessions, exact, tmp_path):
    pytest.importorskip("openai")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "first"}\n\n{"question": "second"}\n')
    ending, session, policy = run_one(sessions, command(OPENAI, file=str(rows)), seed=3)
    assert (ending.outcome, ending.reward) == (Outcome.SOLVED, 0.5), ending.reason
    assert ending.metrics == {"acc": 1.0, "turns": 3.0, "tag": 4.0, "seed": 3.0}
    (row,) = exact(session, policy)
    assert row.num_turns == 3 and not session.tree.branches
    assert "second" in session._renderer.decode(row.prompt_token_ids)
    roles = [role for role, _ in ending.story]
    assert roles == ["user", "assistant"] * 3 and ending.story[-2:] == (("user", "and 1?"), ("assistant", "a b"))


def test_a_command_that_ends_with_its_limit_keeps_its_turns(sessions):
    program = ASK + "while True:\n    ask([{'role': 'user', 'content': 'again'}])"
    ending, session, _ = run_one(sessions, command(program), ["the"] * 9, max_turns=2)
    assert ending.outcome is Outcome.TRUNCATED_TURNS and session.num_turns == 2


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('{\"reward\": 1}'); sys.exit('no such tool')", "code 1: no such tool"),
        ("print('done')", "got 'done'"),
        ('print(\'{"reward": "much"}\')', "the result must be JSON"),
        ("", "the result must be JSON"),
    ],
)
def test_a_command_that_fails_or_says_no_reward_gives_none(sessions, program, reason):
    ending, _, _ = run_one(sessions, command(program))
    assert ending.outcome is Outcome.AGENT_ERROR and reason in ending.reason


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_everything_it_started(sessions, tmp_path):
    child = tmp_path / "child"
    program = (
        "import subprocess, sys, time; from pathlib import Path; print('x' * 300_000)\n"
        f"p = subprocess.Popen(['sleep', '300']); Path({str(child)!r}).write_text(str(p.pid)); time.sleep(300)"
    )
    ending, _, _ = run_one(sessions, command(program), silence_s=5.0)
    assert ending.outcome is Outcome.INFRA_ERROR and "nothing for 5 s (fault.env_timeout)" in ending.reason
    deadline = time.monotonic() + patient(10)
    while runs(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_variables_and_folder_are_those_of_the_config(sessions, tmp_path):
    program = "import json, os; print(json.dumps({'reward': float(os.environ['MINE']) + (os.getcwd() == %r)}))"
    spec = command(program % os.path.realpath(tmp_path), env={"MINE": "2"}, folder=str(tmp_path))
    assert run_one(sessions, spec)[0].reward == 3.0


def test_a_server_gets_endpoint_and_task_and_answers_with_the_result(sessions, exact):
    openai = pytest.importorskip("openai")
    session, policy, _ = sessions(["the ab", "the"])
    told = []

    async def agent(request):
        body = await request.json()
        told.append(body)
        async with openai.AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"]) as client:
            messages = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                reply = await client.chat.completions.create(model=body["model"], messages=messages)
                said = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [said, {"role": "user", "content": "on"}]
        return web.json_response({"reward": 1})

    async def refuse(request):
        return web.Response(status=500, text="no such task")

    async def work():
        app = web.Application()
        app.router.add_post("/", agent)
        app.router.add_post("/refuse", refuse)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gateway = PolicyGateway(model="policy")
        await gateway.start()
        endings = []
        for at in (url, f"{url}/refuse", "http://127.0.0.1:9"):
            one = build(WorldSpec(env_type="http_agent", values={"url": at}))
            assert isinstance(one, HttpAgent)
            endpoint = gateway.open(session)
            endings.append(await run_agent(one, Task(tag="Mine", seed=5), session, endpoint, max_seconds=float("inf")))
        await gateway.close()
        await runner.cleanup()
        return endings

    solved, refused, gone = asyncio.run(work())
    assert solved.outcome is Outcome.SOLVED and told[0]["model"] == "policy"
    assert told[0]["task"] == {"tag": "Mine", "seed": 5, "validation": False, "row": None}
    exact(session, policy)
    assert refused.outcome is Outcome.AGENT_ERROR and "500: no such task" in refused.reason
    assert gone.outcome is Outcome.INFRA_ERROR


@pytest.mark.parametrize(
    ("env_type", "values", "message"),
    [
        ("command", {}, "command: required"),
        ("command", {"command": []}, "program that exists"),
        ("command", {"command": ["no-such-program"]}, "program that exists"),
        ("command", {"command": ["true"], "folder": "/nowhere"}, "folder /nowhere does not exist"),
        ("command", {"command": ["true"], "file": "/nowhere"}, "file /nowhere does not exist"),
        ("command", {"command": ["true"], "file": os.devnull}, "does not exist"),
        ("http_agent", {"url": "localhost:1"}, "must begin with http"),
    ],
)
def test_settings_are_refused_with_their_key(env_type, values, message):
    assert is_agent(env_type)
    with pytest.raises(ValueError, match=message):
        check(WorldSpec(env_type=env_type, values=values))


@pytest.mark.parametrize(
    ("text", "message"), [("[1]\n", "must be an object"), ("{\n", ":1: not JSON"), ("\n", "no row")]
)
def test_a_file_without_rows_is_refused(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        check(WorldSpec(env_type="command", values={"command": ["true"], "file": str(file)}))


def test_a_row_too_long_for_a_variable_is_said(sessions, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "x" * 130_000}))
    ending, _, _ = run_one(sessions, command("print()", file=str(file)))
    assert ending.outcome is Outcome.AGENT_ERROR and "use env_type http_agent" in ending.reason


def test_every_world_that_has_a_name_may_stand_in_a_config():
    assert set(WORLDS) == set(ENV_TYPES) - {"webshop", "code"}
