"""What an engine tells of its KV cache. In a file of its own: two cores of vLLM in one process share its groups."""

import asyncio

import pytest

pytest.importorskip("vllm")

from test_engine_protocol import Replica

from tests.patience import patient


@pytest.fixture(params=[True, False], ids=["core_in_process", "core_process"])
def small_cache(request, tmp_path):
    """A KV cache of 7 blocks of 128 tokens."""
    small = Replica("vllm", tmp_path, True, cpu_kv_cache_bytes=1 << 20, core_in_process=request.param)
    yield small
    small.close()


def test_the_load_tells_of_the_kv_cache_what_the_requests_must_hold(small_cache):
    """Requests of one block, then of two: there is room for 7, then for 3, and the others are preempted."""

    async def go():
        engine, at_first = small_cache.engine, small_cache.engine.load()
        total = at_first.kv.total_tokens
        assert (at_first.running, at_first.waiting, at_first.kv.free_tokens) == (0, 0, total) and total % 128 == 0
        requests = [small_cache.request([20 + i, *range(30, 150)], max_new_tokens=300) for i in range(20)]
        tasks, before, seen, wanted = small_cache.start(*requests), 0, [], 1
        while before < wanted and not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
            load = engine.load()
            assert load.kv.total_tokens == total and load.kv.preemptions >= before
            assert load.running + load.waiting == sum(not task.done() for task in tasks)
            before = load.kv.preemptions
            seen.append(load)
            wanted = total // 128 - total // 256
        blocks = total // 128
        full = [load for load in seen if load.kv.preemptions == 0 and load.running == blocks]
        assert full and all(load.kv.used_tokens == total for load in full), "one block each"
        assert before >= wanted and any(0 < load.running <= blocks // 2 for load in seen), "two blocks each"
        await engine.abort([r.request_id for r in requests])
        await asyncio.gather(*tasks)
        idle = engine.load()
        assert (idle.running, idle.waiting, idle.kv.free_tokens) == (0, 0, total)
        assert await small_cache.prefix_found_of_one_asked_twice() == (600, 256), "two whole blocks"

    small_cache.runner.run(go())


@pytest.mark.parametrize("small_cache", [True], indirect=True, ids=["core_in_process"])
def test_an_error_that_no_future_takes_ends_its_call(small_cache):
    """vLLM raised StopIteration for an adapter without layers: the start waited for ever."""
    call = small_cache.engine._llm._call(lambda: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration in vLLM"):
        small_cache.runner.run(asyncio.wait_for(call, patient(30)))
