"""The fake engine keeps the engine's contract, and its decoder is a fair share of one resource."""

import asyncio
from array import array

import pytest

from roll_async.inference.protocol import PauseMode
from roll_async.schema import FinishReason, GenerateRequest, SamplingParams
from roll_async.simulator.clock import run_virtual
from roll_async.simulator.parts.engine import SimEngine, bucket_names, digest_of
from roll_async.simulator.parts.models import EngineFaults, LengthModel, SpeedModel
from roll_async.simulator.parts.text import Texts, logprobs_of, position_of
from roll_async.weight_sync.bucket import Block, Bucket, UpdatePlan


def request(name, limit=100, prompt=(3, 1, 2)):
    return GenerateRequest(
        request_id=f"{name}.0/0#1", prompt_token_ids=array("i", prompt), sampling=SamplingParams(max_new_tokens=limit)
    )


async def hold(engine, version, lost=()):
    await engine.pause(PauseMode.KEEP)
    await engine.begin_update(UpdatePlan(version=version, transport="shm", verify="full"))
    names = bucket_names(version, 2)
    for index, name in enumerate(names):
        if index not in lost:
            block = Block(source=0, slots=(), num_bytes=1, location=name)
            await engine.load_bucket(Bucket(index=index, blocks=(block,)))
    whole = await engine.finish_update() == digest_of(version, names)
    await engine.commit(version)
    await engine.resume()
    return whole


async def make(slots=10, length=10.0, sigma=0.0, **speed):
    lengths = LengthModel(mean_tokens=length, sigma=sigma, max_tokens=1000)
    engine = SimEngine("e", 0, Texts(0, lengths), SpeedModel(**speed), slots=slots, faults=EngineFaults())
    assert await hold(engine, 0)
    return engine


def test_the_time_of_a_request_is_its_length_times_the_speed_of_its_company():
    async def main():
        engine, loop = await make(token_s=1.0, token_s_per_request=0.5), asyncio.get_running_loop()
        first = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(4)  # 4 tokens alone
        second = asyncio.create_task(engine.generate(request("b")))
        await first  # 6 more at 1.5 s
        assert loop.time() == pytest.approx(13)
        await second  # 6 tokens beside the first, 4 alone
        assert loop.time() == pytest.approx(17)
        assert engine.busy_until_now_s() == pytest.approx(13 + 13)

    run_virtual(main())


def test_requests_beyond_the_slots_wait_their_turn():
    async def main():
        engine, loop = await make(slots=1, token_s=1.0), asyncio.get_running_loop()
        tasks = [asyncio.create_task(engine.generate(request(n))) for n in "abc"]
        await asyncio.sleep(1)
        assert (engine.load().running, engine.load().waiting) == (1, 2)
        await asyncio.gather(*tasks)
        assert loop.time() == pytest.approx(30)

    run_virtual(main())


def test_a_full_kv_cache_preempts_the_youngest_which_reads_its_prefix_again():
    async def main():
        engine, loop = (
            await make(length=20.0, token_s=1.0, prefill_token_s=0.1, kv_tokens=40),
            asyncio.get_running_loop(),
        )
        first = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.generate(request("b")))
        await asyncio.sleep(10)  # 0.6 s for two prompts; each holds 3 + 9 tokens
        load = engine.load()
        assert (load.running, load.kv.used_tokens, load.kv.total_tokens) == (2, 25, 40) and engine.preemptions == 0
        await first  # the youngest is preempted when both hold 19 tokens: the next two would not fit
        assert loop.time() == pytest.approx(0.6 + 20)
        kv = engine.load().kv
        assert kv.preemptions == 1 and engine.load().waiting == 0
        answer = await second  # 19 tokens are read again, 4 more are sampled
        assert loop.time() == pytest.approx(0.6 + 20 + 1.9 + 4)
        assert [position_of(t) for t in answer.token_ids] == list(range(3, 23)), "nothing is lost or doubled"
        assert engine.load().kv.free_tokens == 40

    run_virtual(main())


def test_a_preempted_request_that_is_aborted_returns_what_it_had():
    async def main():
        engine = await make(length=30.0, token_s=1.0, kv_tokens=40)
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in "ab"]
        await asyncio.sleep(25)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        await engine.abort(["b.0/0#1"])
        assert 15 <= len((await tasks[1]).token_ids) <= 17
        await tasks[0]

    run_virtual(main())


def test_one_request_runs_however_long_it_is():
    async def main():
        engine = await make(length=100.0, token_s=1.0, kv_tokens=40)
        assert len((await engine.generate(request("a"))).token_ids) == 100 and engine.preemptions == 0

    run_virtual(main())


def test_an_abort_returns_the_tokens_so_far_and_the_rest_comes_elsewhere():
    async def main():
        engine, other = await make(token_s=1.0), await make(token_s=1.0)
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(4.5)
        await engine.abort(["a.0/0#1", "unknown"])
        piece = task.result() if task.done() else await task
        assert piece.finish_reason is FinishReason.ABORT and [position_of(t) for t in piece.token_ids] == [3, 4, 5, 6]
        rest = await other.generate(request("a", prompt=(3, 1, 2, *piece.token_ids)))
        assert [position_of(t) for t in rest.token_ids] == list(
            range(7, 13)
        ) and rest.finish_reason is FinishReason.STOP

    run_virtual(main())


def test_progress_tells_the_tokens_since_the_last_report_under_their_versions():
    async def main():
        engine = await make(token_s=1.0)
        task = asyncio.create_task(engine.generate(request("a")))
        name = "a.0/0#1"
        await asyncio.sleep(0.5)
        assert engine.progress(name, 0) is None and engine.progress("unknown", 0) is None
        await asyncio.sleep(2)
        first = engine.progress(name, 0)
        assert [position_of(t) for t in first.token_ids] == [3, 4] and first.version_runs == ((0, 2),)
        assert engine.progress(name, 2) is None
        await asyncio.sleep(2)
        await hold(engine, 7)
        await asyncio.sleep(2)
        second = engine.progress(name, 2)
        assert [position_of(t) for t in second.token_ids] == [5, 6, 7, 8] and second.version_runs == ((0, 2), (7, 2))
        assert second.logprobs == logprobs_of("a.0/0", 5, ((0, 2), (7, 2)))
        await asyncio.sleep(3.4)
        assert [position_of(t) for t in engine.progress(name, 6).token_ids] == [9, 10, 11]
        done = await task
        assert [position_of(t) for t in done.token_ids] == list(range(3, 13)) and done.version_runs == ((0, 4), (7, 6))
        assert engine.progress(name, 0) is None

    run_virtual(main())


def test_kept_requests_go_on_after_a_push_and_carry_both_versions():
    async def main():
        engine = await make(token_s=1.0)
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(4.5)
        await hold(engine, 7)
        done = await task
        assert done.version_runs == ((0, 4), (7, 6))
        assert done.logprobs == logprobs_of("a.0/0", 3, ((0, 4), (7, 6)))

    run_virtual(main())


def test_lost_buckets_show_in_the_digest_and_in_what_is_sampled():
    async def main():
        engine = await make(token_s=1.0)
        for lost in ((0,), (1,), (0, 1)):
            assert not await hold(engine, 5, lost)
            assert engine.content == -1
        assert await hold(engine, 5) and engine.content == 5

    run_virtual(main())


def test_a_dead_engine_fails_everything():
    async def main():
        engine = await make()
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(0)
        engine.die("killed")
        with pytest.raises(ConnectionError, match="e: killed"):
            await task
        with pytest.raises(ConnectionError, match="e: killed"):
            await engine.pause(PauseMode.ABORT)

    run_virtual(main())


@pytest.mark.parametrize(("sigma", "cut"), [(0.6, 600), (1.3, 3000), (1.3, 300)])
def test_lengths_follow_their_distribution(sigma, cut):
    model = LengthModel(mean_tokens=100, sigma=sigma, max_tokens=cut)
    drawn = [model.tokens(1, "p", f"s{i}") for i in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(model.mean_of_cut(), rel=0.03)
    assert max(drawn) <= cut and drawn == [model.tokens(1, "p", f"s{i}") for i in range(20_000)]


def test_answers_to_one_prompt_may_share_their_length():
    model = LengthModel(mean_tokens=100, sigma=1.0, prompt_share=1.0, max_tokens=10**6)
    assert len({model.tokens(1, "p", f"s{i}") for i in range(10)}) == 1
    assert len({model.tokens(1, f"p{i}", "s") for i in range(10)}) > 5
