"""How many requests a replica gets follows from its KV cache, the answers seen so far, and its preemptions."""

import asyncio
from dataclasses import replace
from math import log2

import pytest

from roll_async.inference.protocol import EngineLoad, KVCache
from roll_async.rollout.dispatch.admission import (
    FIRST_TARGET,
    HIGHEST_TARGET,
    INTERVAL_S,
    LOWEST_TARGET,
    KvLimit,
    LengthSurvival,
    ReplicaAdmission,
    RunningRequest,
)
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.replica_link import ReplicaLink
from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.rollout.dispatch.sticky_routing import PATIENCE_S
from roll_async.rollout.dispatch.waiting import WaitingRequests
from roll_async.simulator.clock import run_virtual
from roll_async.simulator.dispatch_checks import idle_slot_violations
from tests.unit.conftest import make_request

TOTAL = 10_000


def seen(*lengths):
    book = LengthSurvival()
    for length in lengths:
        book.add(length)
    return book


def share(alive, num_tokens):
    """Of answers longer than this: buckets are an eighth of an octave wide."""
    return alive[int(8 * log2(num_tokens + 1))]


def forecast(admission, running=(), *, used=None, prompt=100, preemptions=0, all_run=True, waits=True):
    held = sum(r.prompt_tokens + r.answer_tokens for r in running) if used is None else used
    kv = KVCache(total_tokens=TOTAL, free_tokens=TOTAL - held, preemptions=preemptions)
    admission.forecast(kv, list(running), prompt_tokens=prompt, longest=4000, all_run=all_run, waits=waits, now_s=0.0)
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
    assert fits <= forecast(ReplicaAdmission(256, LengthSurvival())) <= 5 * fits


def test_short_answers_let_more_run_than_long_ones():
    slots = [forecast(ReplicaAdmission(256, seen(*[n] * 60))) for n in (3000, 1000, 300, 30)]
    assert slots == sorted(slots) and slots[0] < 8 and slots[-1] > 60


def test_a_request_never_counts_for_less_than_its_prompt():
    assert forecast(ReplicaAdmission(256, seen(*[30] * 60)), prompt=2000) <= TOTAL // 2000


def test_the_cap_holds_and_one_request_always_runs():
    assert forecast(ReplicaAdmission(8, seen(*[30] * 60))) == 8
    full = at(*[3000] * 5)
    admission = ReplicaAdmission(8, seen(*[3900] * 60))
    assert forecast(admission, full) == 1 and ReplicaAdmission(8, LengthSurvival()).slots == 1


def test_what_the_engine_holds_counts_more_than_what_it_has_reported():
    """Tokens are reported every few seconds, and the cache tells at once."""
    book = seen(*[1000] * 60)
    known = forecast(ReplicaAdmission(256, book), at(*[100] * 10))
    grown = forecast(ReplicaAdmission(256, book), at(*[100] * 10), used=9000)
    assert grown < known


def sharing(admission, count, **options):
    """So many requests whose prompt of 1,000 tokens is in the cache once."""
    forecast(admission, at(*[50] * count, prompt=1000), prompt=1000, **{"used": 1000 + 8 * 50, **options})
    return admission.limit


def test_prompts_that_many_requests_share_are_counted_once():
    book = seen(*[200] * 60)
    alone = forecast(ReplicaAdmission(256, book), at(*[50] * 8, prompt=1000), prompt=1000)
    assert sharing(ReplicaAdmission(256, book), 8) > 1.5 * alone


def test_a_request_with_a_shared_prompt_takes_one_slot_and_more_for_what_it_has_generated():
    limit = sharing(admission := ReplicaAdmission(256, seen(*[200] * 60)), 8)
    admission.sent(1000)
    assert admission.limit == pytest.approx(limit)
    admission.sent(1000, 500)
    assert admission.limit < limit - 1


def test_one_that_waits_in_the_engine_hides_what_prompts_share_but_not_that_they_share_less():
    limit = sharing(admission := ReplicaAdmission(256, seen(*[200] * 60)), 8)
    for waiting in (0, 1, 8):
        assert sharing(admission, 8 + waiting, all_run=False) == pytest.approx(limit, rel=0.1)
    assert sharing(admission, 9, used=4000, all_run=False) < 0.9 * limit


def test_a_long_prompt_takes_the_room_of_several():
    admission = ReplicaAdmission(256, seen(*[200] * 60))
    before = forecast(admission)
    admission.sent(1000)
    assert admission.slots < before - 2


def generations(admission, preemptions_each, count, *, pushes=False, **options):
    """`pushes`: twice in each generation nothing runs."""
    total = 0
    for _ in range(count):
        for _ in range(2):
            for _ in range(5):
                admission.ended()
            if pushes:
                forecast(admission, preemptions=total)
        total += preemptions_each
        forecast(admission, at(*[10] * 10), preemptions=total, **options)
    return admission.target


def test_many_preemptions_lower_the_target_and_few_raise_it_slowly():
    forecast(admission := ReplicaAdmission(256, LengthSurvival()), at(*[10] * 10))
    lowered = generations(admission, 20, 2)
    assert lowered == pytest.approx(FIRST_TARGET * 0.95**2)
    assert generations(ReplicaAdmission(256, LengthSurvival()), 1, 4) == pytest.approx(
        min(HIGHEST_TARGET, FIRST_TARGET + 0.015)
    )
    assert generations(admission, 50, 50) == LOWEST_TARGET
    assert generations(ReplicaAdmission(256, LengthSurvival()), 1, 4, waits=False) == FIRST_TARGET


def test_weight_pushes_within_a_generation_of_answers_do_not_hide_its_preemptions():
    for preemptions_each in (20, 1):
        with_pushes, without = (ReplicaAdmission(256, LengthSurvival()) for _ in range(2))
        for admission in (with_pushes, without):
            forecast(admission, at(*[10] * 10))
        target = generations(without, preemptions_each, 3)
        assert generations(with_pushes, preemptions_each, 3, pushes=True) == target != FIRST_TARGET


def test_after_a_restart_of_the_engine_its_preemptions_are_counted_anew():
    forecast(admission := ReplicaAdmission(256, LengthSurvival()), at(*[10] * 10), preemptions=1000)
    assert generations(admission, 20, 1) == FIRST_TARGET, "the first one tells how many there were"
    assert generations(admission, 40, 1) == pytest.approx(FIRST_TARGET * 0.95)


def test_the_target_rises_while_requests_wait_for_room_and_else_does_not(replica_class):
    def pending():
        return PendingRequest(make_request(), asyncio.get_running_loop().create_future(), None, False)

    async def slots(*, waited):
        admission = KvLimit(ManagerOptions(max_concurrent_per_server=10_000))
        waiting, link = WaitingRequests(), ReplicaLink(replica_class("a"), None, None)
        kv = KVCache(total_tokens=10_000, free_tokens=9_990)
        link.record_load(EngineLoad(running=1, waiting=0, free_kv_fraction=1.0, kv=kv))
        link.send(pending().attempt, 0.0)
        if waited:
            waiting.add(pending())
        for _ in range(9):
            admission.reported(link, waiting)
            admission.ended(link, 5)
            await asyncio.sleep(INTERVAL_S)
        waiting.add(pending())
        admission.reported(link, waiting)
        return admission.slots(link)

    async def main():
        assert await slots(waited=True) > 1.02 * await slots(waited=False) > 100

    run_virtual(main())


def test_one_generation_of_answers_lowers_the_target_once():
    forecast(admission := ReplicaAdmission(256, LengthSurvival()), at(*[10] * 10))
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
            assert 1 <= manager.stats().in_flight < 12 and not idle_slot_violations(manager)
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


@pytest.mark.parametrize("arrived", [True, False], ids=["in the engine", "on their way"])
def test_requests_that_hold_nothing_yet_are_not_taken_for_shared_prompts(managed, replica_class, start, arrived):
    """Four run. The others wait in the engine, or it does not know of them."""
    replica = replica_class("a")

    def told():
        running = min(4, len(replica._tasks))
        waiting = len(replica._tasks) - running if arrived else 0
        kv = KVCache(total_tokens=4000, free_tokens=4000 - 200 * running)
        return EngineLoad(running=running, waiting=waiting, free_kv_fraction=0.5, kv=kv)

    async def main():
        replica._load = told
        async with managed(replica, max_concurrent_per_server=64, admission="kv") as manager:
            start(manager, [make_request(f"r{i}", prompt=range(200), tokens=400) for i in range(60)])
            await asyncio.sleep(1.5 * INTERVAL_S)
            sent, (link,) = manager.stats().in_flight, manager.links
            await link.ask_load()
            assert 4 < sent < 20 and manager.stats().in_flight == sent

    run_virtual(main())


def test_answers_that_have_ended_tell_how_many_may_run_whatever_pieces_they_came_in(managed, replica_class, start):
    async def sent_after(num_answers, *, pushed_after_s=None):
        """So many answers of 100 tokens, then requests that may have 1,000. One runs all the time."""
        replica = with_kv(replica_class("a"), total=12_000)
        async with managed(replica, max_concurrent_per_server=512, admission="kv") as manager:
            start(manager, [make_request("slow", prompt=range(10), tokens=1000)])
            tasks = start(manager, [make_request(f"a{i}", prompt=range(10), tokens=100) for i in range(num_answers)])
            if pushed_after_s is not None:
                await asyncio.sleep(pushed_after_s)
                await manager.interrupt("resume", 10.0)
                await manager.resume()
            await asyncio.gather(*tasks)
            await asyncio.sleep(INTERVAL_S)
            (link,) = manager.links
            await link.ask_load()
            start(manager, [make_request(f"b{i}", prompt=range(10), tokens=1000) for i in range(600)])
            await asyncio.sleep(0.1)
            return manager.stats().in_flight

    async def main():
        whole = await sent_after(30)
        assert whole > 2 * await sent_after(0)
        assert await sent_after(30, pushed_after_s=90.5) == pytest.approx(whole, rel=0.25)

    run_virtual(main())


def test_requests_that_go_on_after_a_push_take_the_room_of_what_they_have_generated(managed, replica_class, start):
    async def main():
        async with managed(with_kv(replica_class("a"), total=12_000), admission="kv") as manager:
            start(manager, [make_request(f"r{i}", prompt=range(10), tokens=1000) for i in range(30)])
            await asyncio.sleep(900)
            assert manager.stats().in_flight == 30
            await manager.interrupt("resume", 10.0)
            await manager.resume()
            await asyncio.sleep(0.1)
            assert 5 < manager.stats().in_flight < 15, "13 of 910 tokens fill the cache"

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
            assert not turn.done() and not idle_slot_violations(manager)
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
            await manager.returning.reject(first, "test")
            assert manager.stats().engines["engine/preemptions"] == 7.0, "of replicas that are gone, too"
            for task in tasks:
                task.cancel()

    run_virtual(main())
