"""Many requests per call over one engine: each ends as a completion or a failure, and nobody waits for ever."""

import asyncio
import sys
from array import array
from dataclasses import replace

import pytest

from roll_async.inference.backends import ENGINES, create_engine
from roll_async.inference.engine_host import PROGRESS_INTERVAL_S, EngineHost
from roll_async.inference.protocol import EngineLoad, PauseMode
from roll_async.inference.settings import EngineSettings
from roll_async.schema import Completion, FinishReason, GenerateRequest, SamplingParams


class FakeEngine:
    """Answers after as many seconds as the request may have tokens; prompt [0] is refused, [1] kills the engine. Tells
    of one token per second.
    """

    def __init__(self):
        self.running, self.aborted, self.modes, self.closed = {}, [], [], False
        self.begun = {}

    async def generate(self, request):
        kind = request.prompt_token_ids[0]
        if kind == 0:
            raise ValueError("the prompt leaves no room")
        if kind == 1:
            raise ConnectionError("the engine process is dead")
        self.running[request.request_id] = stop = asyncio.Event()
        self.begun[request.request_id] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(request.sampling.max_new_tokens):
                await stop.wait()
            return answer(request, FinishReason.ABORT)
        except TimeoutError:
            return answer(request, FinishReason.LENGTH)
        finally:
            del self.running[request.request_id]

    def progress(self, request_id, start):
        count = int(asyncio.get_running_loop().time() - self.begun[request_id]) - start
        return piece(request_id, range(start, start + count)) if count > 0 and request_id in self.running else None

    async def abort(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id].set()
        await asyncio.sleep(0)

    async def pause(self, mode):
        self.modes.append(mode)

    async def resume(self):
        self.modes.append("resume")

    def load(self):
        return EngineLoad(running=len(self.running), waiting=0, free_kv_fraction=1.0)


def answer(request, reason):
    return replace(piece(request.request_id, [7]), finish_reason=reason)


def piece(request_id, tokens):
    return Completion(
        request_id=request_id,
        token_ids=array("i", tokens),
        logprobs=array("f", [-1.0] * len(tokens)),
        version_runs=((0, len(tokens)),),
        finish_reason=FinishReason.ABORT,
        generation_s=1.0,
    )


def ask(name, tokens=1, kind=5):
    sampling = SamplingParams(max_new_tokens=tokens)
    return GenerateRequest(request_id=str(name), prompt_token_ids=array("i", [kind]), sampling=sampling)


def test_no_completion_is_lost_or_told_twice_while_requests_keep_coming(run):
    async def go():
        host = EngineHost(FakeEngine())
        told, reports = [], 0

        async def submit():
            for start in range(0, 400, 8):
                await host.submit([ask(i, tokens=1 + i * 7 % 13) for i in range(start, start + 8)])
                await asyncio.sleep(0.3)

        submitting = asyncio.create_task(submit())
        while len(told) < 400:
            report = await host.collect()
            assert report.completions or report.progress
            assert not report.failures
            told += [c.request_id for c in report.completions]
            reports += 1
        await submitting
        assert sorted(told, key=int) == [str(i) for i in range(400)] and reports < 400

    run(go())


def test_results_that_come_together_travel_together_with_the_load(run):
    async def go():
        host = EngineHost(FakeEngine())
        await host.submit([*(ask(i) for i in range(20)), ask("long", tokens=50)])
        report = await host.collect()
        assert len(report.completions) == 20 and report.load.running == 1 and not report.progress

    run(go())


class OneAtATime(FakeEngine):
    """Each request takes as many milliseconds as it may have tokens, one after the other."""

    def __init__(self):
        super().__init__()
        self.turn, self.waiting = asyncio.Lock(), 0

    async def generate(self, request):
        self.waiting += 1
        async with self.turn:
            self.waiting -= 1
            seconds = request.sampling.max_new_tokens / 1000
            await asyncio.sleep(seconds)
            return replace(answer(request, FinishReason.LENGTH), generation_s=seconds)

    def load(self):
        return EngineLoad(running=1, waiting=self.waiting, free_kv_fraction=1.0)


def test_an_engine_with_requests_waiting_tells_of_more_results_at_once(run):
    """Whoever sends it the next ones is not needed at once; one that ran dry is reported in the short window."""

    async def told(tokens):
        host, reports = EngineHost(OneAtATime()), []
        await host.submit([ask(i, tokens=ms) for i, ms in enumerate(tokens)])
        while sum(map(len, reports)) < len(tokens):
            reports.append([c.request_id for c in (await host.collect()).completions])
        return reports, asyncio.get_running_loop().time()

    async def go():
        reports, _ = await told([30] * 8)
        assert reports == [["0", "1", "2", "3"], ["4", "5", "6"], ["7"]]
        began = asyncio.get_running_loop().time()
        reports, ended = await told([30, 30])
        assert reports == [["0"], ["1"]] and ended - began == pytest.approx(0.06, abs=0.005), (
            "no end waits for a window"
        )

    run(go())


class Full(FakeEngine):
    """Each request takes as many milliseconds as it may have tokens, beside all others; none waits."""

    def progress(self, request_id, start):
        return None

    async def generate(self, request):
        seconds = request.sampling.max_new_tokens / 1000
        await asyncio.sleep(seconds)
        return replace(answer(request, FinishReason.LENGTH), generation_s=seconds)


@pytest.mark.parametrize(("milliseconds", "most", "least"), [(200, 50, 30), (1_500, 13, 10), (10_000, 11, 8)])
def test_the_longer_answers_take_the_fewer_messages_tell_of_their_ends(run, milliseconds, most, least):
    """A message costs milliseconds of the engine, and a place stays empty for half of the time between two of them: the
    sum of both is least at the square root of twice their product.
    """

    async def go():
        host, number = EngineHost(Full()), 0
        loop = asyncio.get_running_loop()
        for number in range(milliseconds // 10):
            await host.submit([ask(number, tokens=milliseconds)])
            await asyncio.sleep(0.01)  # they end one by one
        reports = 0
        while loop.time() < 5 * milliseconds / 1000:
            report, reports = await host.collect(), reports + 1
            for _ in report.completions:
                number += 1
                await host.submit([ask(number, tokens=milliseconds)])
        assert least < reports / (4 * milliseconds / 1000) < most

    run(go())


def test_the_last_result_does_not_wait_for_a_long_window(run):
    async def go():
        host, loop = EngineHost(Full()), asyncio.get_running_loop()
        await host.submit([ask("first", tokens=9_000)])
        await host.collect()
        began = loop.time()
        await host.submit([ask("short", tokens=100), ask("last", tokens=125)])
        report = await host.collect()
        assert [c.request_id for c in report.completions] == ["short", "last"]
        assert loop.time() - began == pytest.approx(0.14, abs=0.005), "and not 0.2"

    run(go())


def test_collect_waits_when_there_is_nothing_to_tell(run):
    async def go():
        host = EngineHost(FakeEngine())
        collecting = asyncio.create_task(host.collect())
        await asyncio.sleep(100)
        assert not collecting.done()
        await host.submit([ask("a")])
        assert [c.request_id for c in (await collecting).completions] == ["a"]

    run(go())


def test_a_request_that_cannot_fit_is_a_failure_and_the_others_go_on(run):
    async def go():
        host = EngineHost(FakeEngine())
        await host.submit([ask("bad", kind=0), ask("good")])
        first, second = await host.collect(), await host.collect()
        assert first.failures == (("bad", "ValueError: the prompt leaves no room"),) and not first.completions
        assert [c.request_id for c in second.completions] == ["good"]

    run(go())


def test_an_id_that_already_runs_is_refused_and_the_running_one_is_answered(run):
    async def go():
        host = EngineHost(FakeEngine())
        await host.submit([ask("a", tokens=5)])
        await asyncio.sleep(1)
        await host.submit([ask("a", tokens=1)])
        ((request_id, reason),) = (await host.collect()).failures
        assert request_id == "a" and "already running" in reason
        assert len((await host.collect()).completions) == 1
        assert asyncio.get_running_loop().time() == pytest.approx(5, abs=0.1)
        await host.submit([ask("a")])
        assert len((await host.collect()).completions) == 1, "an id is free again when its request has ended"

    run(go())


def test_after_an_abort_the_results_are_ready(run):
    async def go():
        engine = FakeEngine()
        host = EngineHost(engine)
        await host.submit([ask(i, tokens=100) for i in range(3)])
        await asyncio.sleep(1)
        await host.abort(["0", "2", "stranger"])
        report = await host.collect()
        assert {c.request_id: c.finish_reason for c in report.completions} == {
            "0": FinishReason.ABORT,
            "2": FinishReason.ABORT,
        }
        assert list(engine.running) == ["1"] and asyncio.get_running_loop().time() < 2

    run(go())


def test_a_dead_engine_first_tells_what_it_finished_and_then_that_it_is_dead(run):
    async def go():
        host = EngineHost(FakeEngine())
        await host.submit([ask("done")])
        await asyncio.sleep(2)
        await host.submit([ask("fatal", kind=1)])
        await asyncio.sleep(0)
        assert [c.request_id for c in (await host.collect()).completions] == ["done"]
        for _ in range(2):
            with pytest.raises(ConnectionError, match="engine process is dead"):
                await host.collect()

    run(go())


def test_what_running_requests_generate_is_told_every_interval_and_each_token_once(run):
    async def go():
        loop, host = asyncio.get_running_loop(), EngineHost(FakeEngine())
        await host.submit([ask("long", tokens=1000), ask("short", tokens=12)])
        told, times = {"long": [], "short": []}, []
        while len(times) < 5:
            report = await host.collect()
            times += [loop.time()] if report.progress else []
            for progress in report.progress:
                tokens = told[progress.piece.request_id]
                assert progress.start == len(tokens)
                tokens += progress.piece.token_ids
            if report.completions:
                assert loop.time() == pytest.approx(12, abs=0.1), "an end does not wait for an interval"
        gaps = [b - a for a, b in zip([0, *times], times, strict=False)]
        assert gaps == pytest.approx([PROGRESS_INTERVAL_S] * 5, abs=0.1)
        assert told["long"] == list(range(25)) and told["short"] == list(range(10))

    run(go())


def test_an_interval_without_a_token_tells_nothing(run):
    async def go():
        engine = FakeEngine()
        host = EngineHost(engine)
        await host.submit([ask("a", tokens=1000)])
        await asyncio.sleep(0)
        engine.begun["a"] = 50  # as of a paused engine
        report = await host.collect()
        assert asyncio.get_running_loop().time() == pytest.approx(55, abs=0.3)
        assert [len(p.piece.token_ids) for p in report.progress] == [5]

    run(go())


def test_pause_resume_and_load_are_the_engines_own(run):
    async def go():
        engine = FakeEngine()
        host = EngineHost(engine)
        await host.pause(PauseMode.KEEP)
        await host.resume()
        assert engine.modes == [PauseMode.KEEP, "resume"] and await host.load() == replace(
            engine.load(), held=frozenset(), peak_bytes=(await host.load()).peak_bytes
        )
        assert (await host.load()).peak_bytes > 0 or sys.platform != "linux"

    run(go())


def test_an_engine_is_built_by_the_name_of_its_strategy_without_starting_it(tmp_path):
    pytest.importorskip("torch")
    settings = EngineSettings(model_folder=str(tmp_path), dtype="fp32", device="cpu", max_model_len=64)
    engine = create_engine("hf_infer", settings)
    assert type(engine).__name__ == ENGINES["hf_infer"].rpartition(".")[2] and engine.version == 0
    dummy = EngineSettings(model_folder="x", dtype="fp32", device="cpu", max_model_len=64, random_weights=True)
    assert create_engine("hf_infer", dummy).version is None


def test_an_abort_in_the_same_turn_as_its_submit_ends_the_request(run):
    async def go():
        engine = FakeEngine()
        host = EngineHost(engine)
        await host.submit([ask("a", 1000), ask("b", 2)])
        await host.abort(["a"])
        assert asyncio.get_running_loop().time() == 0.0 and list(engine.begun) in ([], ["b"])
        report = await host.collect()
        assert [(c.request_id, c.finish_reason) for c in report.completions] == [("a", FinishReason.ABORT)]
        assert len((await host.collect()).completions) == 1

    run(go())


def test_an_abort_that_overtakes_its_submit_is_remembered(run):
    async def go():
        engine = FakeEngine()
        host = EngineHost(engine)
        await host.abort(["a"])
        await host.submit([ask("a", 1000), ask("b", 2)])
        report = await host.collect()
        assert [c.request_id for c in report.completions] == ["a"] and "a" not in engine.begun
        await host.submit([ask("a", 3)])
        await asyncio.sleep(5)
        names = [c.request_id for c in (await host.collect()).completions]
        assert sorted(names) == ["a", "b"] and "a" in engine.begun, "once"

    run(go())


def test_a_request_that_its_engine_does_not_end_is_cut_off_in_time(run):
    class Stubborn(FakeEngine):
        async def abort(self, request_ids):
            self.aborted += request_ids

    async def go():
        host = EngineHost(Stubborn())
        await host.submit([ask("a", 10_000)])
        await asyncio.sleep(1)
        await host.abort(["a"])
        assert asyncio.get_running_loop().time() <= 12 and not host._tasks
        assert [i for i, _ in (await host.collect()).failures] == ["a"]

    run(go())


def test_the_load_names_what_is_held_until_its_end_is_handed_over(run):
    async def go():
        host = EngineHost(FakeEngine())
        await host.submit([ask("a", 2), ask("b", 100), ask("refused", kind=0)])
        await asyncio.sleep(3)
        assert (await host.load()).held == {"a", "b", "refused"}
        assert (await host.collect()).load.held == {"b"} == (await host.load()).held

    run(go())


TEXT = {1: "The", 2: " answer", 3: "<", 4: "/", 5: "a", 6: ">", 7: "\ufffd"}


class Writes(FakeEngine):
    """Says the tokens of TEXT, in the order of the prompt."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def decode(self, token_ids):
        return "".join(TEXT[i] for i in token_ids)

    async def generate(self, request):
        return replace(await super().generate(request), **fields(self.said))

    def progress(self, request_id, start):
        return replace(piece(request_id, self.said[start:])) if request_id in self.running else None


def fields(tokens):
    part = piece("", tokens)
    return {"token_ids": part.token_ids, "logprobs": part.logprobs, "version_runs": part.version_runs}


@pytest.mark.parametrize(
    ("said", "kept"),
    [([1, 2, 3, 4], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, 3, 1], [1, 2, 3, 1]), ([3, 4, 5], []), ([1, 7], [1])],
)
def test_what_is_handed_over_of_an_unfinished_answer_splits_no_stop_string(run, said, kept):
    """A request that goes on from the kept tokens is a new one to its engine, which looks only at what it samples."""

    async def go():
        host = EngineHost(Writes(said))
        request = ask("r", 1000)
        await host.submit([replace(request, sampling=replace(request.sampling, stop_strings=("</a>",)))])
        await host.submit([ask("without stop strings", 1000)])
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        told = {p.piece.request_id: list(p.piece.token_ids) for p in (await host.collect()).progress}
        assert told == {name: ids for name, ids in (("r", kept), ("without stop strings", said)) if ids}
        await host.abort(["r", "without stop strings"])
        parts = {c.request_id: c for c in (await host.collect()).completions}
        assert list(parts["r"].token_ids) == kept and list(parts["without stop strings"].token_ids) == said
        assert parts["r"].version_runs == (((0, len(kept)),) if kept else ())

    run(go())
