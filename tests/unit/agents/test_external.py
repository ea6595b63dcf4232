"""Agents in processes of their own: started as a command for each trajectory, or asked over HTTP."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
from aiohttp import web

from roll_async.agents.episode import run_agent
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.processes.external import PASSED_ON, SUPERVISOR, CommandOptions, HttpAgent, result_of
from roll_async.agents.processes.supervisor import _KEPT_BYTES, Output
from roll_async.agents.protocol import Task, is_agent
from roll_async.cluster.reaper import MARKER_VARIABLE
from roll_async.envs.registry import WorldSpec, build, check
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


def run_one(
    sessions, spec, texts=("the ab", "the", "a b"), *, seed=1, silence_s=60.0, max_seconds=float("inf"), **options
):
    """(ending, session, policy) of one trajectory of this agent at a real gateway."""
    session, policy, _ = sessions(texts, **options)

    async def work():
        gateway = PolicyGateway(model="policy")
        await gateway.start()
        try:
            task = Task(tag="Mine", seed=seed)
            limits = {"max_seconds": max_seconds, "silence_s": silence_s}
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
        ("print('x' * 300_000)", "a line of more than 262144 bytes"),
        ("import os; os.kill(os.getpid(), 9)", "code 137"),
        ('print(\'{"reward": 1, "metrics": {"f1": NaN}}\')', "metrics.f1 is nan"),
        ("import json; print(json.dumps({'reward': 1, 'metrics': {f'k{i}': i for i in range(65)}}))", "at most 64"),
        ("", "the result must be JSON"),
    ],
)
def test_a_command_that_fails_or_says_no_reward_gives_none(sessions, program, reason):
    ending, _, _ = run_one(sessions, command(program))
    assert ending.outcome is Outcome.AGENT_ERROR and reason in ending.reason


@pytest.mark.parametrize(
    "text",
    ['{"reward": "1.0"}', '{"reward": 1, "solved": "no"}', '{"reward": 1, "metrics": [1]}', "null", "[" * 100_000,
     f'{{"reward": {"9" * 5000}}}', '{"solved": true}', "\x00"],
)  # fmt: skip
def test_a_text_that_is_no_result_is_refused(text):
    with pytest.raises(ValueError, match="the result must be JSON like"):
        result_of(text)


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


DAEMON = """
import os, sys, time
from pathlib import Path
{before}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        Path({file!r}).write_text(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
os.wait()
while not Path({file!r}).exists():
    time.sleep(0.01)
{after}
"""


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("", """print('{"reward": 1.0}')""", Outcome.SOLVED),  # the daemon holds stdout
        ("", "os.close(1); os.close(2); time.sleep(300)", Outcome.TRUNCATED_TIME),
        ("import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]", "time.sleep(300)", None),
        ("", "os.kill(os.getppid(), 9); time.sleep(300)", Outcome.AGENT_ERROR),  # whoever watched it is gone, too
    ],
)
@pytest.mark.slow
def test_a_result_is_read_when_its_process_has_ended_and_no_daemon_outlives_a_trajectory(
    sessions, tmp_path, before, after, outcome
):
    file = tmp_path / "daemon"
    program = DAEMON.format(file=str(file), before=before, after=after)
    started = time.monotonic()
    ending, _, _ = run_one(sessions, command(program), max_seconds=4.0)
    assert ending.outcome is (outcome or Outcome.TRUNCATED_TIME), ending.reason
    assert time.monotonic() - started < (30 if outcome in (None, Outcome.TRUNCATED_TIME) else 3.9)
    deadline = time.monotonic() + patient(5)  # it has been sent its signal; a full machine takes a while to end it
    while runs(int(file.read_text())):
        assert time.monotonic() < deadline, "it is gone when the trajectory has ended"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("first\n  last \n\n", "last"),
        ("20 %\r100 %", "100 %"),
        ("x" * _KEPT_BYTES, "x" * _KEPT_BYTES),
        ("x" * (_KEPT_BYTES + 1), f"a line of more than {_KEPT_BYTES} bytes"),
        ("cut\n" + "x" * (_KEPT_BYTES - 1), "x" * (_KEPT_BYTES - 1)),
        ("", ""),
    ],
    ids=["lines", "carriage", "as long as is kept", "longer", "begins where it is cut", "nothing"],
)
def test_the_last_line_of_a_command_is_whole_or_said_to_be_too_long(printed, said):
    output = Output()
    for start in range(0, len(printed), 10_000):
        os.write(output.theirs, printed[start : start + 10_000].encode())
        assert output.read()
    assert not output.read() and output.last_line() == said
    os.close(output.theirs)
    os.close(output.end)


@pytest.mark.slow
def test_whoever_forks_all_the_time_is_ended_too(sessions):
    mark = "# forks for the test of external agents\n"
    fork = "    if os.fork() == 0:\n        os.setsid(); os.fork(); time.sleep(300)"
    program = f"{mark}import os, time\nfor i in range(300):\n{fork}"
    ending, _, _ = run_one(sessions, command(f"{program}\nprint('{{\"reward\": 1}}')"))
    assert ending.outcome is Outcome.SOLVED
    assert mark.strip() not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_what_a_command_started_ends_with_the_driver(tmp_path):
    file = tmp_path / "daemon"
    words = [sys.executable, "-I", "-S", SUPERVISOR, sys.executable, "-c"]
    program = DAEMON.format(file=str(file), before="", after="time.sleep(300)")
    watcher = subprocess.Popen([*words, program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watcher.stdin.close()  # as the kernel does when the driver dies
    assert watcher.wait(20) == 0 and not runs(int(file.read_text()))


def test_a_command_sees_a_list_of_variables_and_not_those_of_the_run(sessions, tmp_path, monkeypatch):
    secrets = {"WANDB_API_KEY": "a", "HF_TOKEN": "b", "AWS_SECRET_ACCESS_KEY": "c", "PYTHONPATH": "/of/the/run"}
    for name, value in {**secrets, MARKER_VARIABLE: "run"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "seen"
    program = (
        f"import json, os; open({str(file)!r}, 'w').write(json.dumps(dict(os.environ))); print('{{\"reward\": 1}}')"
    )
    ending, _, _ = run_one(sessions, command(program, env={"HF_TOKEN": "its own"}))
    assert ending.outcome is Outcome.SOLVED
    seen = json.loads(file.read_text())
    told = {
        "ROLL_ASYNC_TASK",
        *(f"{who}_{what}" for who in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY")),
    }
    assert seen["HF_TOKEN"] == "its own" and seen[MARKER_VARIABLE] == "run", "the reaper finds it by its mark"
    assert seen.keys() - {"LC_CTYPE"} <= {*PASSED_ON, *told, "OPENAI_MODEL", "HF_TOKEN"} and told <= seen.keys()


def test_metrics_of_a_result_do_not_stand_in_for_ours(sessions):
    result = {"reward": 1, "metrics": {"acc": 7, "turns": -3, "f1": 0.5}}
    ending, _, _ = run_one(sessions, command(f"print({json.dumps(json.dumps(result))})"))
    assert ending.metrics == {"acc": 1.0, "turns": 0.0, "f1": 0.5, "agent_acc": 7.0, "agent_turns": -3.0}


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

    async def babble(request):
        return web.Response(body=b"\xff" * (1 << 20), content_type="text/plain", charset="no-such-charset")

    async def work():
        app = web.Application()
        app.router.add_post("/", agent)
        app.router.add_post("/refuse", refuse)
        app.router.add_post("/babble", babble)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        gateway = PolicyGateway(model="policy")
        await gateway.start()
        endings = []
        for at in (url, f"{url}/refuse", "http://127.0.0.1:9", f"{url}/babble"):
            one = build(WorldSpec(env_type="http_agent", values={"url": at}))
            assert isinstance(one, HttpAgent)
            endpoint = gateway.open(session)
            endings.append(await run_agent(one, Task(tag="Mine", seed=5), session, endpoint, max_seconds=float("inf")))
        await gateway.close()
        await runner.cleanup()
        return endings

    solved, refused, gone, babbled = asyncio.run(work())
    assert solved.outcome is Outcome.SOLVED and told[0]["model"] == "policy"
    assert told[0]["task"] == {"tag": "Mine", "seed": 5, "validation": False, "row": None}
    exact(session, policy)
    assert refused.outcome is Outcome.AGENT_ERROR and "500: no such task" in refused.reason
    assert gone.outcome is Outcome.INFRA_ERROR
    assert babbled.outcome is Outcome.AGENT_ERROR and "the result must be JSON" in babbled.reason


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


def test_a_row_may_hold_separators_of_unicode(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "a\u2028b\x85"}\n\n{"question": "c"}\n', encoding="utf-8")
    options = CommandOptions(command=("true",), file=str(tmp_path / "rows.jsonl"))
    assert [options.row(seed)["question"] for seed in (0, 1)] == ["a\u2028b\x85", "c"]


def test_a_row_too_long_for_a_variable_is_said(sessions, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "x" * 130_000}))
    ending, _, _ = run_one(sessions, command("print()", file=str(file)))
    assert ending.outcome is Outcome.AGENT_ERROR and "use env_type http_agent" in ending.reason
