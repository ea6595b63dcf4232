"""`roll-async serve-policy` as a process: in front of a remote API, and with an engine of its own."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from array import array
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import click
import pytest

from roll_async.agents.messages import Message, TurnRequest
from roll_async.commands import serve_policy
from roll_async.commands.command_line import execute
from roll_async.config import processor
from roll_async.inference import backends
from roll_async.launch.checks import packages
from roll_async.schema import Completion, FinishReason

sys.path.insert(0, str(Path(__file__).parent))
from remote_api import KEY, Remote, answer, chat, listening

from tests.family_tokenizers import save_family
from tests.patience import patient


@contextmanager
def serving(*arguments, **env):
    """(address, first line, process) of the command; ends it."""
    command = [sys.executable, "-m", "roll_async.cli", "serve-policy", *map(str, arguments), "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OUR_TOKEN": "our-token", **env}
    command += ["--token-env", "OUR_TOKEN"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        lines = [server.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("serving"):
            lines.append(server.stdout.readline())
        address = re.search(r" at (http://127\.0\.0\.1:\d+/v1), key", lines[-1])[1]
        yield f"{address}/chat/completions", "".join(lines), server
    finally:
        server.kill()
        server.wait()


def ended(server):
    """What it says when it is interrupted."""
    server.send_signal(signal.SIGINT)
    said, _ = server.communicate(timeout=patient(60))
    assert server.returncode == 0, said
    return said


def ask(url, key, **more):
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(chat(("user", "hi"), **more)).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=patient(30)) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_in_front_of_a_remote_each_turn_is_written_at_once_and_the_key_never_shown(tmp_path):
    record = tmp_path / "turns.jsonl"

    def use(address):
        options = ["--remote", address, "--remote-key-env", "THEIR_KEY", "--record", record]
        with serving("there", *options, THEIR_KEY=KEY) as (url, first, server):
            assert f"serving there of {address}, for evaluation and data only, at " in first
            assert ask(url, "our-token/a") == 200 and ask(url, "other") == 401
            (line,) = record.read_text().splitlines()
            assert json.loads(line)["trajectory"] == "a"
            assert KEY not in first + ended(server) + record.read_text()

    async def work():
        async with listening(Remote([answer({"content": "hello"})])) as address:
            await asyncio.to_thread(use, address)

    asyncio.run(work())


@pytest.mark.slow
def test_with_an_engine_of_its_own_rows_are_written_at_the_end_and_requests_choose_their_sampling(tiny_model, tmp_path):
    folder, record = tiny_model[0], tmp_path / "rows.jsonl"
    options = ["--dtype", "fp32", "--max-model-len", 200, "--max-new-tokens", 8, "--record", record]
    with serving(folder, *options) as (url, first, server):
        assert f"serving {folder} at {url[:21]}" in first and ask(url, "our-token/a", temperature=0) == 200
        assert ask(url, "our-token/b", temperature=0) == 200
        assert f"warning: the tokenizer of {folder} loses spaces, line breaks; no run takes it" in first
        ended(server)
    line, again = map(json.loads, record.read_text().splitlines())
    assert line["trajectory"] == "a" and sum(line["loss_mask"]) == len(line["behaviour_logprobs"]) > 0
    assert line["response_token_ids"] == again["response_token_ids"], "both are greedy"


@pytest.fixture
def first_turn(tmp_path, monkeypatch):
    """(reply, request at the engine) of a conversation with a model of a family; the engine says hi."""

    def of(family, generation, template=None, **arguments):
        tokenizer = save_family(family, tmp_path, template=template, generation=generation, config=generation)
        asked = []

        class Engine:
            async def start(self):
                pass

            async def close(self):
                pass

            async def generate(self, request):
                asked.append(request)
                end = request.sampling.stop_token_ids[-1]
                ids = array("i", [*tokenizer.encode("\nhi", add_special_tokens=False), end])
                return Completion(
                    request_id=request.request_id,
                    token_ids=ids,
                    logprobs=array("f", bytes(4 * len(ids))),
                    version_runs=((0, len(ids)),),
                    finish_reason=FinishReason.STOP,
                    generation_s=0.0,
                )

        monkeypatch.setattr(backends, "create_engine", lambda *_: Engine())
        given = serve_policy.Arguments(
            **{"model": str(tmp_path), "engine": "hf_infer", "host": "127.0.0.1", "port": 0, "token": "t"},
            **{"max_model_len": 400, "max_new_tokens": 9, "temperature": 1.0, "dtype": "fp32", "device": "cpu"},
            **{"record": None, "remote": None, "template_kwargs": {}, **arguments},
        )

        async def work():
            async with AsyncExitStack() as stack:
                session = (await serve_policy._engine(given, None, stack))("a")
                return await session.turn(TurnRequest(messages=(Message(role="user", content="1+1?"),)))

        return asyncio.run(work()), asked[0], tokenizer

    pytest.importorskip("transformers")
    return of


def test_its_engine_stops_at_the_end_marks_of_the_model_and_no_client_reads_one(first_turn, capsys):
    reply, request, tokenizer = first_turn("glm-4", {"eos_token_id": 256})
    assert [tokenizer.decode([i]) for i in request.sampling.stop_token_ids] == [
        *("<|endoftext|>", "<|user|>", "<|observation|>")
    ]
    assert (reply.text, reply.content) == ("\nhi", "\nhi")
    assert "the engine stops also at '<|user|>' (260; by the chat template), '<|obs" in capsys.readouterr().err


def test_its_template_reads_the_variables_of_the_command_and_refuses_others(first_turn):
    moody = "{{ messages[-1].content }} {{ mood | default('any') }}<|im_end|>"
    of_command = serve_policy.command.make_context("serve-policy", ["there", "--template-kwargs", '{"mood": "calm"}'])
    _, request, tokenizer = first_turn(
        "qwen-3", None, template=moody, template_kwargs=of_command.params["template_kwargs"]
    )
    assert tokenizer.decode(request.prompt_token_ids).startswith("1+1? calm")
    with pytest.raises(ValueError, match=r"--template-kwargs.thinking: true has no effect: .* reads no such"):
        first_turn("qwen-3", None, template=moody, template_kwargs={"thinking": True})
    for given in ("[1]", "{mood: calm}", "9" * 5000):
        with pytest.raises(click.BadParameter, match="is no JSON"):
            serve_policy.command.make_context("serve-policy", ["there", "--template-kwargs", given])


@pytest.mark.parametrize(
    ("options", "native", "dtype"),
    [
        ([], True, "bf16"),
        ([], False, "fp32"),
        (["--device", "cuda"], False, "bf16"),
        (["--dtype", "bf16"], False, "bf16"),
    ],
)
def test_without_a_dtype_an_engine_on_a_cpu_that_emulates_bf16_takes_fp32(monkeypatch, options, native, dtype):
    from roll_async.commands.serve_policy import Arguments, command, engine_settings

    monkeypatch.setattr(processor, "multiplies_bf16", lambda: native)
    given = command.make_context("serve-policy", ["there", *options]).params
    del given["token_env"], given["remote_key_env"]
    assert engine_settings(Arguments(token="", **given)).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--remote", "https://host/v1", "--dtype", "fp32", "--engine", "vllm"], "--engine, --dtype: no effect"),
        (["--remote", "host/v1"], "is no address"),
        (["--remote", "https://me:sk-1@host/v1"], "a key inside the address"),
        (["--remote", "https://host/v1", "--remote-key-env", "NOT_SET_AT_ALL"], "that variable is not set"),
        (["--remote-key-env", "HOME"], "no effect without --remote"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached by others: give a token"),
        (["--host", "localhost.net"], "--host localhost.net can be reached by others: give a token"),
        (["--remote", "https://host/v1", "--record", "/nowhere/at/all.jsonl"], "--record /nowhere/at/all.jsonl"),
        (["--host", "no.such.host.invalid", "--token-env", "HOME"], "--host no.such.host.invalid: "),
        (["--port", "99999999"], "99999999 is not in the range 0<=x<=65535"),
        (["--engine", "trtllm"], "'trtllm' is not one of 'hf_infer', 'sglang', 'vllm'"),
        (["--max-model-len", "0"], "0 is not in the range x>=1"),
        (["--temperature", "nan"], "'nan' is not a finite number"),
        (["--max-new-tokens", "4096"], "leaves no room for a prompt"),
    ],
)
def test_options_that_have_no_effect_or_no_sense_are_refused(arguments, said, capsys):
    assert said in refusal(["there", *arguments], capsys)


def refusal(arguments, capsys):
    """The one line that a call of the command ends with."""
    assert execute(serve_policy.command, arguments, "roll-async serve-policy") == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("roll-async serve-policy: ") and "sk-1" not in captured.out + line
    return line


def test_a_model_that_is_not_here_is_told_before_an_engine_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model, said in [
        (str(tmp_path), "holds no config.json"),
        ("output/demo_assets/model", "make it with: roll-async demo --assets-only"),
        ("some/name", "MODEL: some/name is not in the cache, and the hub cannot be reached"),
    ]:
        assert said in refusal([model, "--port", "0"], capsys)


def test_an_engine_a_device_or_a_port_that_is_not_to_be_had_is_told_before_it_starts(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.PathFinder, "find_spec", lambda *_: None)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    given = [str(tmp_path), "--port", "0"]
    said = "--engine sglang: sglang is not installed here: pip install"
    assert said in refusal([*given, "--engine", "sglang"], capsys)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cuda: torch sees no CUDA device here" in refusal([*given, "--device", "cuda"], capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} is taken" in refusal([str(tmp_path), "--port", port], capsys)


def test_what_an_engine_says_of_a_model_that_it_cannot_load_is_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    assert str(tmp_path) in refusal([str(tmp_path), "--port", "0"], capsys)
