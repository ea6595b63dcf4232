"""Requests over replicas that are busy, silent, dead, or answer too late."""

import asyncio
import traceback
from array import array
from dataclasses import replace

import pytest

from roll_async.buffer.errors import Defect
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.requests import GenerationFailed
from roll_async.schema import Completion, FinishReason

WHOLE = [1003 + i for i in range(10)]  # what a prompt of 3 tokens and a budget of 10 must give


def test_a_request_comes_back_under_its_own_name_with_all_tokens(run, replica_class, make, managed):
    async def go():
        async with managed(replica_class("a", version=4)) as manager:
            completion = await manager.generate(make("question"))
            assert completion.request_id == "question" and list(completion.token_ids) == WHOLE
            assert completion.version_runs == ((4, 10),) and completion.finish_reason is FinishReason.LENGTH
            stats = manager.stats()
            assert (stats.dispatched, stats.completed, stats.generated_tokens, stats.in_flight) == (1, 1, 10, 0)
            assert stats.busy_s_by_server == pytest.approx({"a": 10})

    run(go())


def test_requests_go_to_the_least_busy_replica(run, replica_class, make, managed, start):
    async def go():
        slow, fast = replica_class("slow", token_s=5.0), replica_class("fast", token_s=1.0)
        async with managed(slow, fast, max_concurrent_per_server=2) as manager:
            await asyncio.gather(*start(manager, [make(f"r{i}") for i in range(24)]))
            assert len(slow.submitted) + len(fast.submitted) == 24
            assert len(fast.submitted) == 20, "a free slot is refilled at once, so work follows speed"

    run(go())


def test_no_replica_ever_holds_more_than_its_limit(run, replica_class, make, managed, start):
    async def go():
        replicas = [replica_class(name) for name in "abc"]
        async with managed(*replicas, max_concurrent_per_server=4) as manager:
            tasks = start(manager, [make(f"r{i}", tokens=3 + i % 5) for i in range(60)])
            await asyncio.sleep(0.5)
            assert manager.stats().in_flight == 12 and manager.stats().queued == 48
            assert all([len(c.token_ids) for c in await asyncio.gather(*tasks)])
            assert [r.peak for r in replicas] == [4, 4, 4]

    run(go())


def test_requests_that_arrive_together_travel_in_one_call(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            await asyncio.gather(*start(manager, [make(f"r{i}") for i in range(50)]))
            assert sum(call.startswith("submit") for call in replica.calls) == 1

    run(go())


def test_the_interval_between_looks_at_the_load_delays_no_request(run, replica_class, make, managed, start):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        async with managed(a, b, max_concurrent_per_server=10, batch_creation_interval_s=1000.0) as manager:
            for i in range(9):
                start(manager, [make(f"r{i}", tokens=1000)])
                await asyncio.sleep(0.3)
                assert len(a.submitted) + len(b.submitted) == i + 1 and manager.stats().queued == 0
            assert {len(a.submitted), len(b.submitted)} == {4, 5}

    run(go())


def test_a_freed_slot_takes_what_waits_at_once_whatever_the_interval(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=1, batch_creation_interval_s=1000.0) as manager:
            tasks = start(manager, [make("r0")])
            await asyncio.sleep(1)
            tasks += start(manager, [make("r1"), make("r2")])
            await asyncio.gather(*tasks)
            assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.1)

    run(go())


def test_requests_of_one_affinity_share_a_replica_until_it_is_full_or_gone(run, replica_class, make, managed, start):
    async def go():
        replicas = {name: replica_class(name) for name in "ab"}
        async with managed(*replicas.values(), max_concurrent_per_server=4) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(3)], affinity="prompt 1")
            await asyncio.sleep(0.5)
            assert sorted(len(r.submitted) for r in replicas.values()) == [0, 3]
            home = max(replicas.values(), key=lambda r: len(r.submitted))
            tasks += start(manager, [make(f"s{i}") for i in range(3)], affinity="prompt 1")
            await asyncio.sleep(0.5)
            assert len(home.submitted) == 4, "more than its limit is not worth a warm cache"
            home.die()
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            manager.forget_affinity("prompt 1")

    run(go())


def test_what_a_dead_replica_held_is_generated_elsewhere(run, replica_class, make, managed, start):
    async def go():
        doomed, other = replica_class("doomed"), replica_class("other")
        async with managed(doomed, other) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(8)])
            await asyncio.sleep(4.5)
            doomed.die("process ended")
            completions = await asyncio.gather(*tasks)
            assert all(list(c.token_ids) == WHOLE for c in completions)
            assert [c.request_id for c in completions] == [f"r{i}" for i in range(8)]
            stats = manager.stats()
            assert stats.lost_servers == 1 and stats.retried == 4 and manager.num_servers == 1

    run(go())


def test_tokens_received_before_a_death_are_kept(run, replica_class, make, managed, start):
    async def go():
        first, other = replica_class("first", version=1), replica_class("other", version=2)
        async with managed(first) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(4.5)
            await manager.interrupt("resume", 10.0)
            await manager.add(other)
            first.die()
            await manager.resume()
            completion = await task
            assert list(completion.token_ids) == WHOLE and completion.version_runs == ((1, 4), (2, 6))
            (resumed,) = other.submitted
            assert list(resumed.prompt_token_ids) == [1, 2, 3, *WHOLE[:4]] and resumed.sampling.max_new_tokens == 6
            assert manager.stats().resumed == 1

    run(go())


def test_a_request_goes_on_from_the_last_token_its_dead_replica_told_of(run, replica_class, make, managed, start):
    async def go():
        first, other = replica_class("first", version=1), replica_class("other", version=2)
        async with managed(first) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(2.5)
            first.tell()
            await asyncio.sleep(2)
            await manager.add(other)
            first.die()
            completion = await task
            assert list(completion.token_ids) == WHOLE and completion.version_runs == ((1, 2), (2, 8))
            assert completion.logprobs.tolist() == pytest.approx([-t / 1000 for t in WHOLE])
            (resumed,) = other.submitted
            assert list(resumed.prompt_token_ids) == [1, 2, 3, *WHOLE[:2]] and resumed.sampling.max_new_tokens == 8
            stats = manager.stats()
            assert (stats.resumed, stats.retried, stats.generated_tokens) == (1, 1, 10)

    run(go())


def test_an_answer_that_was_told_of_before_is_not_doubled(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            (task,) = start(manager, [make()])
            for _ in range(9):
                await asyncio.sleep(1)
                replica.tell()  # each tells of all tokens anew: only the first begins where the last one ended
            completion = await task
            assert list(completion.token_ids) == WHOLE and manager.stats().generated_tokens == 10
            (task,) = start(manager, [make()])
            await asyncio.sleep(2.5)
            replica.tell()
            await asyncio.sleep(1)
            await manager.interrupt("resume", 10.0)
            await manager.resume()
            assert list((await task).token_ids) == WHOLE and manager.stats().generated_tokens == 20

    run(go())


def test_tokens_are_counted_once_and_as_soon_as_they_are_told_of(run, replica_class, make, managed, start):
    async def go():
        first, other = replica_class("first"), replica_class("other")
        async with managed(first) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(2.5)
            first.tell()
            await asyncio.sleep(0.1)
            assert manager.stats().generated_tokens == 2, "an answer may take longer than a step"
            await task
            assert manager.stats().generated_tokens == 10
            given_up, moved = start(manager, [make("given up"), make("moved")])
            await asyncio.sleep(3.5)
            first.tell()
            await asyncio.sleep(0.1)
            given_up.cancel()
            await asyncio.wait({given_up})
            assert manager.stats().generated_tokens == 10 + 2 * 3, "what was told of stays counted"
            await manager.add(other)
            first.die()
            await moved
            assert manager.stats().generated_tokens == 10 + 3 + 10

    run(go())


@pytest.mark.parametrize("gone", [1, 3], ids=["told twice", "a report was lost"])
def test_tokens_that_do_not_follow_the_last_ones_told_of_are_not_kept(run, replica_class, make, managed, start, gone):
    async def go():
        first, other = replica_class("first"), replica_class("other")
        async with managed(first) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(2.5)
            first.tell()
            await asyncio.sleep(2)
            first.tell()
            first.told[0] = replace(first.told[0], start=gone)
            await asyncio.sleep(0.1)
            await manager.add(other)
            first.die()
            assert list((await task).token_ids) == WHOLE
            assert list(other.submitted[0].prompt_token_ids) == [1, 2, 3, *WHOLE[:2]]

    run(go())


def test_a_late_report_of_an_earlier_attempt_changes_nothing(run, replica_class, make, managed, start):
    async def go():
        first, other = replica_class("first"), replica_class("other")
        async with managed(first) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(1.5)
            first.tell()
            late = first.told[0]
            await asyncio.sleep(1)
            await manager.add(other)
            first.die()
            await asyncio.sleep(3)
            other.told.append(late)  # of r#1, while r#2 runs
            other._news.set()
            await asyncio.sleep(0.1)
            third = replica_class("third")
            await manager.add(third)
            other.die()
            assert list((await task).token_ids) == WHOLE
            assert list(third.submitted[0].prompt_token_ids) == [1, 2, 3, *WHOLE[:1]]
            assert manager.stats().late_results == 0

    run(go())


def test_a_request_that_timed_out_keeps_what_its_silent_replica_told_of(
    run, replica_class, make, managed, start, caplog
):
    async def go():
        stuck, other = replica_class("stuck"), replica_class("other")
        async with managed(stuck, generation_timeout_s=100.0) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(3.5)
            stuck.tell()
            await asyncio.sleep(0.1)
            stuck._serving.clear()
            stuck.deaf = True
            await manager.add(other)
            assert list((await task).token_ids) == WHOLE
            assert list(other.submitted[0].prompt_token_ids) == [1, 2, 3, *WHOLE[:3]]
            assert "request r#1 did not end within 100 s on stuck" in caplog.text

    run(go())


@pytest.mark.parametrize("mode", ["abort", "resume"])
def test_mode_abort_discards_what_a_replica_that_does_not_pause_told_of(run, replica_class, make, managed, start, mode):
    async def go():
        deaf, other = replica_class("deaf"), replica_class("other")
        async with managed(deaf) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(3.5)
            deaf.tell()
            await asyncio.sleep(0.1)
            deaf.deaf = True
            await manager.add(other)
            await manager.interrupt(mode, 3.0)
            await manager.resume()
            assert list((await task).token_ids) == WHOLE
            kept = {"abort": [], "resume": WHOLE[:3]}[mode]
            assert list(other.submitted[0].prompt_token_ids) == [1, 2, 3, *kept]

    run(go())


def test_when_the_last_replica_dies_every_caller_and_the_watch_are_told(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("only")
        async with managed(replica, max_concurrent_per_server=1) as manager:
            watch = asyncio.create_task(manager.wait_failed())
            tasks = start(manager, [make("a"), make("b")])
            await asyncio.sleep(2)
            replica.die("SIGKILL")
            results = await asyncio.gather(*tasks, watch, return_exceptions=True)
            assert all(isinstance(r, ConnectionError) and "only" in str(r) for r in results), results

    run(go())


def test_a_silent_replica_loses_its_requests_after_the_time_out_to_another_one(
    run, replica_class, make, managed, start
):
    async def go():
        silent, good = replica_class("silent"), replica_class("good")
        silent.silent = True
        async with managed(silent, good, generation_timeout_s=100.0) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            background = start(manager, [make("long", tokens=10_000)])  # the silent one stays the least busy
            completions = await asyncio.gather(*tasks)
            assert all(list(c.token_ids) == WHOLE for c in completions)
            assert 100 <= asyncio.get_running_loop().time() <= 140
            assert silent.aborted, "it is asked to stop before it is given up"
            background[0].cancel()

    run(go())


def test_a_request_goes_back_to_the_replica_it_failed_on_when_there_is_no_other(run, replica_class, make, managed):
    async def go():
        flaky, other = replica_class("flaky"), replica_class("other")
        flaky.refuse = 1
        async with managed(flaky, other) as manager:
            assert list((await manager.generate(make("r"), affinity="x")).token_ids) == WHOLE
            assert [r.request_id for r in other.submitted] == ["r#2"]
            await manager.returning.reject(other, "shrink")
            flaky.refuse = 2
            assert list((await manager.generate(make("s"))).token_ids) == WHOLE

    run(go())


def test_a_request_that_fails_everywhere_fails_with_the_last_reason(run, replica_class, make, managed):
    async def go():
        replica = replica_class("a")
        replica.refuse = 4
        async with managed(replica, request_retries=3) as manager:
            with pytest.raises(GenerationFailed, match="failed 4 times; last: a: out of memory"):
                await manager.generate(make())
            replica.refuse = 3
            assert list((await manager.generate(make())).token_ids) == WHOLE

    run(go())


def test_late_and_repeated_replies_are_counted_and_change_nothing(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            completion = await manager.generate(make("r"))
            again = Completion(
                request_id="r#1",
                token_ids=completion.token_ids[:2],
                logprobs=completion.logprobs[:2],
                version_runs=((9, 2),),
                finish_reason=FinishReason.STOP,
                generation_s=1.0,
            )
            replica.reply(again)
            replica.reply(again)
            await asyncio.sleep(1)
            (second,) = start(manager, [make("r")])
            assert list((await second).token_ids) == WHOLE
            assert manager.stats().late_results == 2 and manager.stats().completed == 2

    run(go())


def test_a_reply_of_an_earlier_attempt_is_not_taken_for_the_present_one(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a", token_s=20.0)
        replica.silent = True
        async with managed(replica, generation_timeout_s=100.0) as manager:
            (task,) = start(manager, [make("r")])
            await asyncio.sleep(1)
            replica.silent = False
            while len(replica.submitted) < 2:
                await asyncio.sleep(1)
            replica.reply(
                Completion(
                    request_id=replica.submitted[0].request_id,
                    token_ids=array("i", [77]),
                    logprobs=array("f", [0.0]),
                    version_runs=((0, 1),),
                    finish_reason=FinishReason.STOP,
                    generation_s=1.0,
                )
            )
            await asyncio.sleep(1)
            assert manager.stats().late_results == 1 and not task.done()
            replica.token_s = 1.0
            assert list((await task).token_ids) == WHOLE

    run(go())


def test_a_cancelled_caller_frees_its_slot_and_stops_the_work(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=1) as manager:
            first, second, third = start(manager, [make("r1"), make("r2"), make("r3")])
            await asyncio.sleep(2)
            first.cancel()
            third.cancel()
            assert list((await second).token_ids) == WHOLE
            assert replica.aborted == ["r1#1"] and len(replica.submitted) == 2

    run(go())


def test_a_cancelled_caller_whose_conversation_is_forgotten_leaves_no_home(run, replica_class, make, managed, start):
    async def go():
        async with managed(replica_class("a"), replica_class("b"), max_concurrent_per_server=1) as manager:
            (gone,) = start(manager, [make("gone")], conversation="c")
            await asyncio.sleep(0)  # it waits, and hears of its end after the replicas are chosen
            gone.cancel()
            manager.forget_affinity("c")
            start(manager, [make("r1"), make("r2")])
            await asyncio.sleep(0.5)
            start(manager, [make("later")], conversation="c")
            await asyncio.sleep(0.5)
            assert (manager.stats().in_flight, manager.stats().queued) == (2, 1)

    run(go())


def test_a_new_replica_gets_work_at_once(run, replica_class, make, managed, start):
    async def go():
        first, second = replica_class("first"), replica_class("second")
        async with managed(first, max_concurrent_per_server=2) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            await asyncio.sleep(1)
            await manager.add(second)
            await asyncio.gather(*tasks)
            assert (len(first.submitted), len(second.submitted)) == (2, 2)
            assert asyncio.get_running_loop().time() == pytest.approx(11)

    run(go())


def test_closing_cancels_what_waits(run, replica_class, make, managed, start):
    async def go():
        async with managed(replica_class("a"), max_concurrent_per_server=1) as manager:
            tasks = start(manager, [make("r1"), make("r2")])
            await asyncio.sleep(1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)

    run(go())


def test_every_request_stops_at_the_end_marks_of_the_model_besides_its_own(run, replica_class, make, managed):
    async def go():
        replica = replica_class("a")
        async with managed(replica, end_ids=(7, 9)) as manager:
            mine = make("mine")
            mine = replace(mine, sampling=replace(mine.sampling, stop_token_ids=(3,)))
            await asyncio.gather(manager.generate(make("plain")), manager.generate(mine, validation=True))
        stops = {request.request_id: request.sampling.stop_token_ids for request in replica.submitted}
        assert stops == {"plain#1": (7, 9), "mine#1": (3, 7, 9)} and mine.sampling.stop_token_ids == (3,)

    run(go())


def test_a_fault_of_ours_in_the_dispatch_ends_the_requests_with_its_frame(run, replica_class, make):
    class Faulty(EnginePool):
        def _dispatch(self, pending, link, now_s):
            raise KeyError("seeded")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: None)  # it is raised into the loop as well
        manager = Faulty([replica_class("a")], ManagerOptions())
        await manager.start()
        with pytest.raises(Defect) as caught:
            await asyncio.wait_for(manager.generate(make("r")), 5.0)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
        assert frames[-1] == "_dispatch" and "seeded" in str(caught.value)
        with pytest.raises(Defect):
            await manager.wait_failed()
        await manager.close()

    run(main())
