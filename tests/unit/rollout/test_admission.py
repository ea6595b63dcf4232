"""How many requests a replica gets follows from its KV cache, the answers seen so far, and its preemptions."""

import asyncio
from dataclasses import replace
from math import log2

import pytest

from roll_async.inference.protocol import KVCache
from roll_async.rollout.admission import (
    FIRST_TARGET,
    HIGHEST_TARGET,
    LOWEST_TARGET,
    LengthBook,
    ReplicaAdmission,
    RunningRequest,
)
from roll_async.rollout.home_waits import PATIENCE_S
from roll_async.simulator.clock import run_virtual
from tests.unit.conftest import make_request

TOTAL = 10_000


def seen(*lengths):
    book = LengthBook()
    for length in lengths:
        book.add(length)
    return book


def share(alive, num_tokens):
    """Of answers longer than this: buckets are an eighth of an octave wide."""
    return alive[int(8 * log2(num_tokens + 1))]


def forecast(admission, running=(), *, used=None, prompt=100, longest=4000, preemptions=0, now_s=0.0, waits=True):
    held = sum(r.prompt_tokens + r.answer_tokens for r in running) if used is None else used
    kv = KVCache(total_tokens=TOTAL, free_tokens=TOTAL - held, preemptions=preemptions)
    admission.forecast(kv, list(running), prompt_tokens=prompt, longest=longest, all_run=True, waits=waits, now_s=now_s)
    return admission.slots


def at(*answers, prompt=100):
    return [RunningRequest(prompt_tokens=prompt, answer_tokens=n, max_tokens=4000) for n in answers]


def test_the_survival_function_is_that_of_the_ended_answers():
    alive = seen(*[99, 999] * 40).survival((), 4000)
    assert share(alive, 50) == pytest.approx(1, abs=0.05)
    assert share(alive, 300) == pytest.approx(0.5, abs=0.06)
    assert share(alive, 2000) < 0.1


def test_answers_that_still_run_are_counted_as_long_as_they_are():
    short_only = seen(*[99] * 40).survival((), 4000)
    with_long = seen(*[99] * 40).survival([1500] * 40, 4000)
    assert share(short_only, 1000) < 0.1 < 0.45 < share(with_long, 1000)


def test_lengths_of_long_ago_are_forgotten():
    alive = seen(*[99] * 1000, *[999] * 600).survival((), 4000)
    assert share(alive, 500) > 0.9


def test_without_an_answer_so_few_start_that_long_ones_fit():
    fits = TOTAL // 4100  # if every answer is as long as it may be
    assert fits <= forecast(ReplicaAdmission(256, LengthBook())) <= 5 * fits


def test_short_answers_let_more_run_than_long_ones():
    slots = [forecast(ReplicaAdmission(256, seen(*[n] * 60))) for n in (3000, 1000, 300, 30)]
    assert slots == sorted(slots) and slots[0] < 8 and slots[-1] > 60


def test_a_request_never_counts_for_less_than_its_prompt():
    assert forecast(ReplicaAdmission(256, seen(*[30] * 60)), prompt=2000) <= TOTAL // 2000


def test_the_cap_holds_and_one_request_always_runs():
    assert forecast(ReplicaAdmission(8, seen(*[30] * 60))) == 8
    full = at(*[3000] * 5)
    admission = ReplicaAdmission(8, seen(*[3900] * 60))
    assert forecast(admission, full) == 1 and ReplicaAdmission(8, LengthBook()).slots == 1


def test_what_the_engine_holds_counts_more_than_what_it_has_reported():
    """Tokens are reported every few seconds, and the cache tells at once."""
    book = seen(*[1000] * 60)
    known = forecast(ReplicaAdmission(256, book), at(*[100] * 10))
    grown = forecast(ReplicaAdmission(256, book), at(*[100] * 10), used=9000)
    assert grown < known


def test_prompts_that_many_requests_share_are_counted_once():
    book = seen(*[200] * 60)
    alone = forecast(ReplicaAdmission(256, book), at(*[50] * 8, prompt=1000), prompt=1000)
    shared = forecast(ReplicaAdmission(256, book), at(*[50] * 8, prompt=1000), prompt=1000, used=1000 + 8 * 50)
    assert shared > 1.5 * alone


def test_a_long_prompt_takes_the_room_of_several():
    admission = ReplicaAdmission(256, seen(*[200] * 60))
    before = forecast(admission)
    admission.sent(1000)
    assert admission.slots < before - 2


def generations(admission, preemptions_each, count):
    total = 0
    for _ in range(count):
        for _ in range(10):
            admission.ended()
        total += preemptions_each
        forecast(admission, at(*[10] * 10), preemptions=total)
    return admission.target


def test_many_preemptions_lower_the_target_and_few_raise_it_slowly():
    forecast(admission := ReplicaAdmission(256, LengthBook()), at(*[10] * 10))
    lowered = generations(admission, 20, 2)
    assert lowered == pytest.approx(FIRST_TARGET * 0.95**2)
    assert generations(ReplicaAdmission(256, LengthBook()), 1, 4) == pytest.approx(
        min(HIGHEST_TARGET, FIRST_TARGET + 0.015)
    )
    assert generations(admission, 50, 50) == LOWEST_TARGET


def test_one_generation_of_answers_lowers_the_target_once():
    forecast(admission := ReplicaAdmission(256, LengthBook()), at(*[10] * 10))
    for total in (20, 40, 60):
        forecast(admission, at(*[10] * 10), preemptions=total)
    assert admission.target == FIRST_TARGET


def with_kv(replica, total=1000, per_request=50):
    """The replica tells of a KV cache that its requests fill."""
    load, replica.preemptions = replica._load, 0

    def told():
        used = min(total, per_request * len(replica._tasks))
        return replace(
            load(), kv=KVCache(total_tokens=total, free_tokens=total - used, preemptions=replica.preemptions)
        )

    replica._load = told
    return replica


def test_a_manager_sends_what_the_cache_has_room_for_and_the_rest_later(managed, replica_class, start):
    async def main():
        replica = with_kv(replica_class("a"))
        async with managed(replica, max_concurrent_per_server=64, admission="kv") as manager:
            tasks = start(manager, [make_request(f"r{i}", prompt=range(40), tokens=400) for i in range(30)])
            await asyncio.sleep(0.1)
            assert 1 <= manager.stats().in_flight < 12 and not manager.overlooked()
            await asyncio.gather(*tasks)

    run_virtual(main())


def test_fewer_are_sent_beside_a_long_prompt(managed, replica_class, start):
    async def in_flight(*prompts):
        async with managed(with_kv(replica_class("a"), total=4000), admission="kv") as manager:
            start(manager, [make_request(f"r{i}", prompt=range(n), tokens=100) for i, n in enumerate(prompts)])
            await asyncio.sleep(0.1)
            return manager.stats().in_flight

    async def main():
        alike, one_long = await in_flight(*[40] * 60), await in_flight(40, 1000, *[40] * 58)
        assert 4 < one_long < alike - 4

    run_virtual(main())


def test_a_replica_that_does_not_tell_of_its_cache_has_the_cap(managed, replica_class, start):
    async def main():
        async with managed(replica_class("a"), max_concurrent_per_server=20, admission="kv") as manager:
            start(manager, [make_request(f"r{i}", tokens=400) for i in range(30)])
            await asyncio.sleep(0.1)
            assert manager.stats().in_flight == 20

    run_virtual(main())


def test_the_fixed_number_looks_at_no_cache(managed, replica_class, start):
    async def main():
        async with managed(with_kv(replica_class("a")), max_concurrent_per_server=20, admission="fixed") as manager:
            start(manager, [make_request(f"r{i}", prompt=range(40), tokens=400) for i in range(30)])
            await asyncio.sleep(0.1)
            assert manager.stats().in_flight == 20

    run_virtual(main())


def test_a_later_turn_waits_for_the_replica_that_has_its_prefix_but_not_for_ever(managed, replica_class, start):
    async def main():
        loop = asyncio.get_running_loop()
        replicas = [replica_class(name) for name in "ab"]
        async with managed(*replicas, max_concurrent_per_server=1, admission="kv") as manager:
            home = (await manager.generate(make_request("c.1", tokens=2), conversation="c")).replica
            blockers = start(manager, [make_request(name, tokens=1000) for name in "xy"])
            await asyncio.sleep(0.05)
            at_s = loop.time()
            turn = asyncio.create_task(manager.generate(make_request("c.2", tokens=2), conversation="c"))
            await asyncio.sleep(0.05)
            assert max(len(k.in_flight) for k in manager.links) == 1, "the cap holds for later turns, too"
            (away,) = [r for k in manager.links if k.name != home for r in k.in_flight.values()]
            await manager.abort([away.request.request.request_id])
            await asyncio.sleep(0.05)
            assert not turn.done() and not manager.overlooked()
            assert (await turn).replica != home and loop.time() - at_s >= PATIENCE_S
            for task in blockers:
                task.cancel()

    run_virtual(main())


def test_the_metrics_are_of_all_replicas_that_tell(managed, replica_class, start):
    async def main():
        first, second, silent = with_kv(replica_class("a")), with_kv(replica_class("b")), replica_class("c")
        async with managed(first, second, silent, max_concurrent_per_server=64, admission="kv") as manager:
            tasks = start(manager, [make_request(f"r{i}", prompt=range(40), tokens=400) for i in range(90)])
            await asyncio.sleep(0.1)
            first.preemptions, second.preemptions = 3, 4
            for link in manager.links:
                await link.ask_load()
            used = 50 * (len(first._tasks) + len(second._tasks))
            engines = manager.stats().engines
            assert engines == {"engine/preemptions": 7.0, "engine/kv_use": used / 2000} and used > 0
            await manager.remove("a", "test")
            assert manager.stats().engines["engine/preemptions"] == 7.0, "of replicas that are gone, too"
            for task in tasks:
                task.cancel()

    run_virtual(main())
