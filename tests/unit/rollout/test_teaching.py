"""Teachers behind an address: a real HTTP server on this machine, and outages on the virtual clock."""

import asyncio
from array import array
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("ray")
pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from roll_async.config.api import load
from roll_async.inference.endpoint import ChatEndpoint, EndpointOptions
from roll_async.launch.rollout import start_teachers
from roll_async.rollout.group_source import SourceCounts
from roll_async.rollout.groups import Ended, EndReason, GroupScope, Trajectory, TrajectoryRequest
from roll_async.rollout.teaching import TaughtRunner
from roll_async.schema import SamplingParams
from tests.echo_server import echo_server

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"
FOLDER = "{strategy_args: {strategy_name: megatron_infer}}"


def config_of(url, *more):
    teachers = f"teachers={{far: {{address: {url}/v1, model: big, max_retries: 1}}, near: {FOLDER}}}"
    return load(CONFIG, [teachers, "algorithm.distill_coef=0.5", *more])


class Answers:
    """Trajectories as given."""

    cancels_on_abort = False

    def __init__(self, *ends):
        self.ends = list(ends)

    async def run(self, request):
        return self.ends.pop(0)

    def counts(self, num_retries):
        return SourceCounts(reward_errors=num_retries, metrics={"a/b": 1.0})


def request_of(prompt, **fields):
    sampling = SamplingParams(max_new_tokens=4)
    return TrajectoryRequest(
        **{"name": "7.0/3", "prompt": prompt, "sampling": sampling, "scope": GroupScope(), **fields}
    )


def ask(config, url, runner, *requests):
    """(ends, counters) of requests, one after another, over real HTTP."""

    async def go():
        endpoint = ChatEndpoint(EndpointOptions.of(config.teachers["far"]))
        await endpoint.start()
        try:
            taught = TaughtRunner(runner, config, {"far": endpoint})
            return [await taught.run(request) for request in requests], taught.counts(2)
        finally:
            await endpoint.close()

    return asyncio.run(go())


def test_every_row_of_an_answer_gets_the_log_probs_of_its_response(build):
    far = build.prompt(ids=(3, 4, 5), extra={"teacher": "far"})
    rows = (build.sample(far, (8, 16)), build.sample(far, (32,), prompt_token_ids=array("i", [1])))
    with echo_server() as server:
        config = config_of(server.url)
        (end,), counts = ask(config, server.url, Answers(Trajectory(rows=rows, generated_s=4.0)), request_of(far))
        assert [body["prompt"] for body in server.bodies] == [[3, 4, 5, 8, 16], [1, 32]]
        asked = {"model": "big", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        assert all(asked.items() <= body.items() for body in server.bodies)
    assert [row.teacher_logprobs.tolist() for row in end.rows] == [[-0.125, -0.25], [-0.5]]
    assert [replace(row, teacher_logprobs=None) for row in end.rows] == list(rows) and end.generated_s == 4.0
    assert counts == SourceCounts(reward_errors=2, metrics={"a/b": 1.0, "distill/outages": 0.0})


def test_rows_of_ranks_of_validations_and_of_greedy_baselines_are_not_asked_about(build):
    far, near = (build.prompt(extra={"teacher": name}) for name in ("far", "near"))
    end, ended = Trajectory(rows=(build.sample(far),)), Ended(reason=EndReason.ABORTED, text="aborted")
    greedy = SamplingParams(max_new_tokens=4, temperature=0)
    requests = [request_of(near), request_of(far, validation=True), request_of(far, sampling=greedy), request_of(far)]
    with echo_server() as server:
        found, _ = ask(config_of(server.url), server.url, Answers(end, end, end, ended), *requests)
        assert found == [end, end, end, ended] and server.bodies == []


def test_a_busy_server_is_asked_again_and_a_refused_row_fails_its_group_with_the_reason(build):
    far = build.prompt(extra={"teacher": "far"})
    end = Trajectory(rows=(build.sample(far, sample_id="7.0/3"),))
    with echo_server() as server:
        long, odd = (400, {"error": "too long"}), (200, {"choices": [{"text": "", "logprobs": None}]})
        few = (200, {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, float("nan"), -1.0]}}]})
        server.says = [
            (503, {}),
            (200, {"choices": [{"logprobs": {"token_logprobs": [None, -1, -2, -3]}}]}),
            long,
            odd,
            few,
        ]
        ends, _ = ask(config_of(server.url), server.url, Answers(end, end, end, end), *[request_of(far)] * 4)
    assert ends[0].rows[0].teacher_logprobs.tolist() == [-2.0, -3.0]
    assert {found.reason for found in ends[1:]} == {EndReason.FAILED}
    assert f"teacher far of sample 7.0/3: {server.url}/v1 refuses a request: 400" in ends[1].text
    assert "no log-probs of the prompt (echo) in" in ends[2].text
    assert "4 log-probs for 4 tokens, or some that are not finite" in ends[3].text


class Away:
    """A server that does not work for some seconds, or hangs."""

    def __init__(self, back_s=float("inf"), hangs=False):
        self.back_s, self.hangs = back_s, hangs

    async def echo(self, token_ids):
        if self.hangs:
            await asyncio.sleep(1e9)
        if asyncio.get_running_loop().time() < self.back_s:
            raise ConnectionError("nothing answers")
        return "", array("f", [-0.5] * (len(token_ids) - 1))


def test_an_outage_is_waited_out_and_fails_the_group_after_the_patience_of_rewards(run, build):
    far = build.prompt(extra={"teacher": "far"})
    end = Trajectory(rows=(build.sample(far, sample_id="7.0/3"),))
    config = config_of("http://127.0.0.1:1", "fault.stall_timeout=60")

    async def go(server):
        taught = TaughtRunner(Answers(end), config, {"far": server})
        found = await taught.run(request_of(far))
        return found, asyncio.get_running_loop().time(), taught.counts(0).metrics["distill/outages"]

    found, _, outages = run(go(Away(back_s=20.0)))
    assert found.rows[0].teacher_logprobs.tolist() == [-0.5, -0.5] and outages == 6
    for server, reason in ((Away(), "nothing answers"), (Away(hangs=True), "no answer")):
        found, ended_s, _ = run(go(server))
        assert found.reason is EndReason.FAILED and not found.can_retry and ended_s <= 60
        assert found.text == f"teacher far of sample 7.0/3: {reason}, for 60 s (fault.stall_timeout)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer: one id per byte."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    target = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(target)
    return str(target)


def test_a_teacher_that_reads_ids_otherwise_or_is_not_there_is_refused_before_anything_is_trained(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def start(config):
        async with AsyncExitStack() as stack:
            return list(await start_teachers(config, stack))

    def refused(*more, url=None):
        with pytest.raises(ValueError) as error:
            asyncio.run(start(config_of(url or server.url, f"pretrain={folder}", *more)))
        return str(error.value)

    with echo_server(tokenizer.decode) as server:
        assert asyncio.run(start(config_of(server.url, f"pretrain={folder}"))) == ["far"]
        server.decode = lambda ids: tokenizer.decode([i + 1 for i in ids])
        assert "has another vocabulary: it reads 'The answer is 42" in (said := refused())
        assert said.startswith("teachers.far: http://127.0.0.1:") and said.endswith("with the policy's tokenizer")
        server.says = [(200, {"choices": [{"text": "x"}]})]
        assert "teachers.far: no log-probs of the prompt (echo)" in refused()
        assert "there is no model small; it serves big" in refused("teachers.far.model=small")
        said = refused("teachers.far.api_key_env=NOT_SET")
        assert said == "teachers.far: api_key_env NOT_SET: that environment variable is not set"
    assert "nothing answers at http://127.0.0.1:" in refused(url=server.url)
    assert asyncio.run(start(load(CONFIG))) == []
