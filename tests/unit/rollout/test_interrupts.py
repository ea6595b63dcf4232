"""What a weight push, an abort and a validation do to requests that run."""

import asyncio

import pytest

from roll_async.rollout.dispatch.requests import Interrupted
from roll_async.schema import FinishReason
from roll_async.simulator.dispatch_checks import idle_slot_violations
from roll_async.weight_sync.errors import EngineDead

WHOLE = [1003 + i for i in range(10)]


async def push(manager, replicas, version, mode, hold_s=5.0):
    """Stand still, new weights, go on. Returns how many tokens came while engines stood still."""
    await manager.interrupt(mode, 100.0)
    for replica in replicas:
        replica.version = version
    await asyncio.sleep(hold_s)
    await manager.resume()


def test_resume_keeps_the_tokens_and_labels_each_with_its_version(run, replica_class, make, managed, start):
    async def go():
        replicas = [replica_class("a"), replica_class("b")]
        async with managed(*replicas) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(6)])
            await asyncio.sleep(3.5)
            await push(manager, replicas, 1, "resume")
            await asyncio.sleep(4.5)
            await push(manager, replicas, 2, "resume")
            for completion in await asyncio.gather(*tasks):
                assert list(completion.token_ids) == WHOLE
                assert completion.version_runs == ((0, 3), (1, 4), (2, 3))
                assert completion.logprobs.tolist() == pytest.approx([-t / 1000 for t in WHOLE])
                assert completion.generation_s == pytest.approx(10)
            assert manager.stats().resumed == 12

    run(go())


def test_nothing_is_dispatched_while_engines_stand_still(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            await manager.interrupt("resume", 10.0)
            (task,) = start(manager, [make()])
            await asyncio.sleep(50)
            assert replica.submitted == [] and manager.stats().queued == 1
            await manager.resume()
            assert list((await task).token_ids) == WHOLE

    run(go())


@pytest.mark.parametrize("mode", ["resume", "wait"])
def test_requests_on_their_way_do_not_hold_a_push_up(run, replica_class, make, mode, managed, start):
    """They arrive behind the pause, where nothing generates, and would be waited for until the deadline."""

    class Distant(replica_class):
        async def submit(self, requests):
            await asyncio.sleep(2.0)
            await super().submit(requests)

    async def go():
        replica = Distant("a")
        async with managed(replica) as manager:
            travelling = start(manager, [make("r1"), make("r2")])
            await asyncio.sleep(0.5)
            behind = start(manager, [make("r3")])  # leaves when the first call is through
            await asyncio.sleep(0.5)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await push(manager, [replica], 1, mode, hold_s=0.0)
            assert loop.time() - began <= (1.0 if mode == "resume" else 50.0)
            for completion in await asyncio.gather(*travelling, *behind):
                assert list(completion.token_ids) == WHOLE
            names = [r.request_id for r in replica.submitted]
            assert len(set(names)) == len(names), "an attempt was sent twice"

    run(go())


def test_abort_discards_the_request_and_says_so(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=2) as manager:
            running, queued = start(manager, [make("r1"), make("r2")]), start(manager, [make("r3")])
            await asyncio.sleep(3.5)
            await push(manager, [replica], 1, "abort")
            results = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(r, Interrupted) for r in results)
            assert (await queued[0]).version_runs == ((1, 10),), "what had not begun is not discarded"
            assert (manager.stats().aborted, manager.stats().aborted_tokens) == (2, 6), "length_bias counts them"

    run(go())


def test_wait_lets_running_requests_finish_and_starts_no_new_one(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=2) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(3)])
            await asyncio.sleep(3.5)
            await push(manager, [replica], 1, "wait")
            completions = await asyncio.gather(*tasks)
            assert [c.version_runs for c in completions] == [((0, 10),), ((0, 10),), ((1, 10),)]

    run(go())


def test_wait_turns_into_resume_for_what_is_not_done_in_half_of_the_time(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            short, long = start(manager, [make("short", tokens=4), make("long", tokens=10)])
            started = asyncio.get_running_loop().time()
            await asyncio.sleep(0.5)
            await manager.interrupt("wait", 12.0)
            assert asyncio.get_running_loop().time() - started == pytest.approx(6.5)
            replica.version = 1
            await manager.resume()
            assert (await short).version_runs == ((0, 4),)
            assert (await long).version_runs == ((0, 6), (1, 4))

    run(go())


def test_keep_leaves_requests_in_the_engine(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(3.5)
            await push(manager, [replica], 1, "keep")
            completion = await task
            assert list(completion.token_ids) == WHOLE and completion.version_runs == ((0, 3), (1, 7))
            assert len(replica.submitted) == 1 and manager.stats().resumed == 0

    run(go())


@pytest.mark.parametrize("mode", ["resume", "wait", "keep"])
def test_a_replica_that_does_not_pause_is_out_in_time_and_its_requests_go_elsewhere(
    run, replica_class, make, mode, managed, start
):
    async def go():
        good, deaf = replica_class("good"), replica_class("deaf")
        async with managed(good, deaf) as manager:
            tasks = start(manager, [make(f"r{i}", tokens=40) for i in range(4)])
            await asyncio.sleep(3.5)
            await push(manager, [good, deaf], 1, "resume", hold_s=0)
            deaf.deaf = True
            await asyncio.sleep(5)
            before = len(deaf.submitted)
            began = asyncio.get_running_loop().time()
            await manager.interrupt(mode, 20.0)
            assert asyncio.get_running_loop().time() - began == pytest.approx(20, abs=0.1)
            assert manager.num_servers == 1 and manager.stats().lost_servers == 1
            good.version = 2
            await manager.resume()
            for completion in await asyncio.gather(*tasks):
                assert list(completion.token_ids) == [1003 + i for i in range(40)], "nothing lost, nothing twice"
                assert completion.version_runs[0] == (0, 3), "what was received before the silence is kept"
            assert len(deaf.submitted) == before and manager.stats().late_results == 0

    run(go())


def test_the_last_replica_that_does_not_pause_ends_the_run_with_its_name(run, replica_class, make, managed, start):
    async def go():
        deaf = replica_class("deaf")
        deaf.deaf = True
        async with managed(deaf) as manager:
            tasks = start(manager, [make("r1"), make("r2")])
            watch = asyncio.create_task(manager.wait_failed())
            await asyncio.sleep(1)
            pause = asyncio.create_task(manager.interrupt("resume", 5.0))
            for result in await asyncio.gather(*tasks, watch, pause, return_exceptions=True):
                assert isinstance(result, ConnectionError)
                assert "no engine is left; the last one, deaf, was lost: did not pause within 5 s" in str(result)

    run(go())


@pytest.mark.parametrize("trouble", ["hangs", "raises"])
def test_a_replica_that_does_not_go_on_is_out_and_the_others_do(run, replica_class, make, trouble, managed, start):
    class Stubborn(replica_class):
        async def resume(self):
            if trouble == "raises":
                raise EngineDead("the cache is gone")
            await asyncio.sleep(1e6)

    async def go():
        good, stubborn = replica_class("good"), Stubborn("stubborn")
        async with managed(good, stubborn, interrupt_timeout_s=7.0) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            await asyncio.sleep(2.5)
            await push(manager, [good, stubborn], 1, "resume", hold_s=0)
            assert asyncio.get_running_loop().time() == pytest.approx(2.5 + (7.0 if trouble == "hangs" else 0.0))
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            assert [client.name for client in manager.clients] == ["good"]

    run(go())


def test_a_replica_that_dies_in_the_interrupt_delays_nobody(run, replica_class, make, managed, start):
    async def go():
        good, doomed = replica_class("good"), replica_class("doomed")
        async with managed(good, doomed) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(4)])
            await asyncio.sleep(2.5)
            doomed.die()
            await push(manager, [good], 1, "resume", hold_s=0)
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))
            assert manager.num_servers == 1 and asyncio.get_running_loop().time() < 20

    run(go())


def test_tokens_of_a_replica_that_paused_but_never_told_are_generated_again(run, replica_class, make, managed, start):
    async def go():
        silent, good = replica_class("silent"), replica_class("good", version=1)
        silent.silent = True
        async with managed(silent) as manager:
            (task,) = start(manager, [make()])
            await asyncio.sleep(1)
            await manager.interrupt("resume", 10.0)
            assert manager.stats().in_flight == 0 and manager.stats().queued == 1
            await manager.add(good)
            await manager.returning.reject(silent, "no answer")
            await manager.resume()
            assert (await task).version_runs == ((1, 10),)

    run(go())


def test_an_aborted_request_returns_what_it_has_before_abort_returns(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=1) as manager:
            running, queued, other = start(manager, [make("r1"), make("r2"), make("r3")])
            await asyncio.sleep(3.5)
            await manager.abort(["r1", "r2", "nobody"])
            await asyncio.sleep(0)
            assert running.done() and queued.done()
            assert list(running.result().token_ids) == WHOLE[:3] and len(queued.result().token_ids) == 0
            assert running.result().finish_reason is queued.result().finish_reason is FinishReason.ABORT
            assert list((await other).token_ids) == WHOLE
            assert manager.stats().aborted == 2

    run(go())


def test_an_abort_returns_the_tokens_of_a_reply_that_comes_after_its_acknowledgement(
    run, replica_class, make, managed, start
):
    class Slow(replica_class):
        async def abort(self, request_ids):
            self.aborted += request_ids
            asyncio.get_running_loop().call_later(0.2, self.end, request_ids)

        def end(self, request_ids):
            for request_id in request_ids:
                self._tasks[request_id].cancel()
                self._end(request_id, FinishReason.ABORT)

    async def go():
        async with managed(Slow("a")) as manager:
            (task,) = start(manager, [make("r1")])
            await asyncio.sleep(3.5)
            await manager.abort(["r1"])
            assert list((await task).token_ids) == WHOLE[:3]

    run(go())


def test_an_abort_is_over_in_time_when_the_replica_acknowledges_nothing(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        replica.deaf = replica.silent = True
        async with managed(replica, interrupt_timeout_s=5.0) as manager:
            (task,) = start(manager, [make("r1")])
            await asyncio.sleep(1)
            await manager.abort(["r1"])
            assert asyncio.get_running_loop().time() <= 1 + 2 * 5
            assert (await task).finish_reason is FinishReason.ABORT

    run(go())


def test_an_abort_between_two_attempts_gives_all_tokens_of_the_first(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            (task,) = start(manager, [make("r1")])
            await asyncio.sleep(3.5)
            await manager.interrupt("resume", 10.0)
            await manager.abort_all()
            completion = await task
            assert list(completion.token_ids) == WHOLE[:3] and completion.finish_reason is FinishReason.ABORT

    run(go())


def test_validation_sets_training_requests_aside_and_they_go_on_afterwards(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica, max_concurrent_per_server=2) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(3)])
            await asyncio.sleep(3.5)
            await manager.pause_training(True)
            questions = start(manager, [make(f"v{i}", tokens=4) for i in range(2)], validation=True)
            before = asyncio.get_running_loop().time()
            assert all(list(c.token_ids) == WHOLE[:4] for c in await asyncio.gather(*questions))
            assert asyncio.get_running_loop().time() - before == pytest.approx(4)
            assert not any(t.done() for t in tasks)
            await asyncio.sleep(20)
            assert not any(t.done() for t in tasks), "they wait until they are called back"
            await manager.pause_training(False)
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*tasks))

    run(go())


def test_a_validation_gets_the_slot_of_what_had_not_been_sent_yet(run, replica_class, make, managed, start):
    """One training request is on a slow wire, and the next one in the outbox behind it."""

    class Distant(replica_class):
        async def submit(self, requests):
            await asyncio.sleep(5)
            await super().submit(requests)

    async def go():
        async with managed(Distant("a"), max_concurrent_per_server=2) as manager:
            training = start(manager, [make("t1")])
            await asyncio.sleep(1)
            training += start(manager, [make("t2")])
            await asyncio.sleep(1)
            (validation,) = start(manager, [make("v")], validation=True)
            await asyncio.sleep(1)
            aside = asyncio.create_task(manager.pause_training(True))
            await asyncio.sleep(1)
            assert idle_slot_violations(manager) == []
            await aside
            assert list((await validation).token_ids) == WHOLE
            await manager.pause_training(False)
            assert [list(c.token_ids) for c in await asyncio.gather(*training)] == [WHOLE] * 2

    run(go())


def test_the_engines_are_busy_only_while_something_runs(run, replica_class, make, managed, start):
    async def go():
        replica = replica_class("a")
        async with managed(replica) as manager:
            await asyncio.sleep(100)
            await manager.generate(make("r1"))
            await asyncio.sleep(100)
            (task,) = start(manager, [make("r2")])
            await asyncio.sleep(3.5)
            assert manager.stats().busy_s_by_server == pytest.approx({"a": 13.5})
            await task

    run(go())


def test_a_validation_that_yields_uses_free_slots_only_and_gives_them_back(run, replica_class, make, managed, start):
    """It keeps its tokens, and ends at once when the training is set aside for it."""

    async def go():
        replica, loop = replica_class("a"), asyncio.get_running_loop()
        async with managed(replica, max_concurrent_per_server=2) as manager:
            manager.yield_validation(True)
            questions = start(manager, [make(f"v{i}") for i in range(2)], validation=True)
            await asyncio.sleep(4.5)
            began = loop.time()
            tasks = start(manager, [make(f"r{i}") for i in range(3)])
            await asyncio.gather(*tasks[:2])
            assert loop.time() - began == pytest.approx(10, abs=0.1), "they waited for no validation request"
            assert not any(q.done() for q in questions)
            await asyncio.sleep(3)  # a third training request and one validation request
            manager_waits = asyncio.create_task(manager.pause_training(True))
            assert all(list(c.token_ids) == WHOLE for c in await asyncio.gather(*questions))
            await manager_waits
            assert loop.time() - began == pytest.approx(13 + 6, abs=0.2), "4 of the 10 tokens were kept"
            assert not tasks[2].done()
            manager.yield_validation(True)  # of no effect while the training is set aside
            (last,) = start(manager, [make("v9", tokens=2)], validation=True)
            await last
            await manager.pause_training(False)
            assert list((await tasks[2]).token_ids) == WHOLE

    run(go())
