"""An attempt has one owner, and ends in bounded time wherever it is."""

import asyncio
from dataclasses import replace

import pytest

from roll_async.rollout.attempts import TRANSITIONS, Attempt, AttemptState
from roll_async.schema import FinishReason

WHOLE = [1003 + i for i in range(10)]


def now():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("before", AttemptState)
@pytest.mark.parametrize("after", AttemptState)
def test_a_state_is_left_only_as_the_table_says(before, after):
    attempt = Attempt(None, "r#1", state=before)
    if after in TRANSITIONS[before]:
        attempt.to(after)
        assert attempt.state is after
    else:
        with pytest.raises(AssertionError, match=r"r#1: .* cannot become"):
            attempt.to(after)
    assert Attempt(None, "x", state=before).ended == (before.value in ("answered", "aborted", "lost"))


@pytest.fixture
def distant(replica_class):
    class Distant(replica_class):
        """Each submit is under way for so long; `gone`: it never returns, and the replica then dies."""

        way_s = 5.0

        async def submit(self, requests):
            await asyncio.sleep(self.way_s)
            await super().submit(requests)

    return Distant


def test_what_is_aborted_in_the_outbox_ends_at_once_and_never_leaves(run, distant, make, managed, start):
    async def go():
        replica = distant("far")
        async with managed(replica) as manager:
            first = start(manager, [make("first")])
            await asyncio.sleep(1)
            (second,) = start(manager, [make("second")])
            await asyncio.sleep(1)
            began = now()
            await manager.abort(["second"])
            assert now() == began and (await second).finish_reason is FinishReason.ABORT
            await asyncio.gather(*first)
            assert [r.request_id for r in replica.submitted] == ["first#1"]

    run(go())


def test_what_is_aborted_on_the_wire_ends_when_it_has_arrived(run, distant, make, managed, start):
    async def go():
        replica = distant("far")
        async with managed(replica) as manager:
            (task,) = start(manager, [make("r")])
            await asyncio.sleep(1)
            await manager.abort(["r"])
            assert now() == pytest.approx(5, abs=0.1) and replica.aborted == ["r#1"]
            assert (await task).finish_reason is FinishReason.ABORT and not replica._tasks

    run(go())


def test_a_cancelled_caller_on_the_wire_leaves_nothing_running(run, distant, make, managed, start):
    async def go():
        replica = distant("far")
        async with managed(replica) as manager:
            (task,) = start(manager, [make("r")])
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.sleep(6)
            assert replica.aborted == ["r#1"] and not replica._tasks and manager.stats().in_flight == 0

    run(go())


def test_a_replica_that_dies_while_an_abort_waits_gives_nothing_elsewhere(run, replica_class, make, managed, start):
    async def go():
        deaf, other = replica_class("deaf"), replica_class("other")
        async with managed(deaf) as manager:
            (task,) = start(manager, [make("r")])
            await asyncio.sleep(3.5)
            deaf.deaf = True
            await manager.add(other)
            abort = asyncio.create_task(manager.abort(["r"]))
            await asyncio.sleep(1)
            deaf.die()
            await abort
            assert now() == pytest.approx(4.5, abs=0.1)
            assert (await task).finish_reason is FinishReason.ABORT and other.submitted == []

    run(go())


def test_an_abort_that_is_not_acknowledged_costs_its_time_out_and_the_replica(run, replica_class, make, managed, start):
    async def go():
        deaf, other = replica_class("deaf", token_s=100.0), replica_class("other", token_s=100.0)
        deaf.deaf = True
        async with managed(deaf, other, interrupt_timeout_s=5.0) as manager:
            tasks = start(manager, [make("a"), make("b")])
            await asyncio.sleep(1)
            await manager.abort(["a", "b"])
            assert now() == pytest.approx(6, abs=0.5) and [c.name for c in manager.clients] == ["other"]
            assert all(t.result().finish_reason is FinishReason.ABORT for t in tasks)

    run(go())


def test_a_request_that_avoids_its_replica_holds_nobody_up(run, replica_class, make, managed, start):
    """The others are full for long: what may run on the free one runs there at once."""

    async def go():
        flaky, busy = replica_class("flaky"), replica_class("busy", token_s=100.0)
        flaky.refuse = 1
        async with managed(flaky, busy, max_concurrent_per_server=1) as manager:
            tasks = start(manager, [make("refused"), make("long")])
            await asyncio.sleep(1)
            tasks += start(manager, [make(f"r{i}") for i in range(5)])
            await asyncio.gather(*tasks[2:])
            assert now() == pytest.approx(51, abs=0.5) and not tasks[0].done()
            assert list((await tasks[0]).token_ids) == WHOLE

    run(go())


def test_a_replica_that_was_started_again_under_its_name_is_avoided_by_nobody(run, replica_class, make, managed, start):
    async def go():
        first, busy = replica_class("a"), replica_class("busy", token_s=100.0)
        async with managed(first, busy, max_concurrent_per_server=1) as manager:
            tasks = start(manager, [make("r"), make("long")])
            await asyncio.sleep(2)
            first.die()
            await asyncio.sleep(1)
            again = replica_class("a")
            await manager.add(again)
            assert list((await tasks[0]).token_ids) == WHOLE and now() == pytest.approx(13, abs=0.1)
            tasks[1].cancel()

    run(go())


def test_what_is_learnt_late_about_a_replica_is_not_held_against_its_successor(run, replica_class, managed):
    """A call to the dead process fails when another one already serves under its name."""

    async def go():
        first = replica_class("a")
        async with managed(first, replica_class("b")) as manager:
            late = next(link for link in manager.links if link.name == "a")
            first.die()
            await asyncio.sleep(1)
            await manager.add(replica_class("a"))
            manager.lost(late, "did not pause within 60 s")
            assert {link.name for link in manager.links} == {"a", "b"}

    run(go())


def test_after_a_push_the_oldest_requests_go_on_first(run, replica_class, make, managed, start):
    async def go():
        replicas = [replica_class("a", token_s=1.0), replica_class("b", token_s=1.0)]
        async with managed(*replicas, max_concurrent_per_server=3) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(9)])
            await asyncio.sleep(3.5)
            await manager.interrupt("resume", 10.0)
            for replica in replicas:
                replica.submitted.clear()
            await manager.resume()
            await asyncio.sleep(0.1)
            assert sorted(r.request_id for x in replicas for r in x.submitted) == [f"r{i}#2" for i in range(6)]
            await asyncio.gather(*tasks)

    run(go())


def test_a_replica_that_runs_requests_of_others_gets_what_it_has_room_for(run, replica_class, make, managed, start):
    """It says 500 running and no cache; when it says that it is free again it gets work, though nothing came back."""

    class Shared(replica_class):
        others = 500

        def _load(self):
            load = super()._load()
            return type(load)(running=load.running + self.others, waiting=0, free_kv_fraction=0.0)

    async def go():
        shared, own = Shared("shared", token_s=10.0), replica_class("own", token_s=10.0)
        async with managed(shared, own, max_concurrent_per_server=100, batch_creation_interval_s=1.0) as manager:
            await asyncio.sleep(6)  # the heartbeat has told
            tasks = start(manager, [make(f"r{i}") for i in range(90)])
            await asyncio.sleep(2)
            assert (len(shared.submitted), len(own.submitted)) == (0, 90)
            tasks += start(manager, [make(f"s{i}") for i in range(20)])
            await asyncio.sleep(0.1)
            assert (len(shared.submitted), len(own.submitted)) == (0, 100)
            shared.others = 0
            await asyncio.sleep(1.5)
            assert len(shared.submitted) == 10, "its load is not older than the interval"
            await asyncio.gather(*tasks)

    run(go())


def test_requests_of_one_interval_are_dealt_out_by_what_was_free_when_it_began(
    run, replica_class, make, managed, start
):
    """A replica with 10 free slots and one with 5, which others use, too: of 6 requests 4 and 2. The next interval
    looks anew; between two looks nobody is asked.
    """

    class Shared(replica_class):
        others, asked = 5, 0

        def _load(self):
            self.asked += 1
            load = super()._load()
            return replace(load, running=load.running + self.others)

    async def go():
        shared, own = Shared("shared"), replica_class("own")
        async with managed(shared, own, max_concurrent_per_server=10, batch_creation_interval_s=40.0) as manager:
            await asyncio.sleep(45)  # the heartbeat has told, and the first look is over
            before, tasks = shared.asked, []
            for i in range(6):
                tasks += start(manager, [make(f"r{i}")])
                await asyncio.sleep(0.1)
            assert (len(own.submitted), len(shared.submitted)) == (4, 2)
            await asyncio.gather(*tasks)
            shared.others = 0
            await asyncio.sleep(80)
            heartbeats = 100 // 5
            assert shared.asked - before <= heartbeats + 3
            for i in range(6):
                tasks += start(manager, [make(f"s{i}")])
                await asyncio.sleep(0.1)
            assert (len(own.submitted), len(shared.submitted)) == (4 + 3, 2 + 3)
            await asyncio.gather(*tasks)

    run(go())


def test_how_busy_each_replica_was_is_told_by_name(run, replica_class, make, managed, start):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        async with managed(a, b) as manager:
            await asyncio.gather(*start(manager, [make("r0"), make("r1", tokens=4)]))
            assert manager.stats().busy_s_by_server == pytest.approx({"a": 10.0, "b": 4.0})
            (task,) = start(manager, [make("r2")])
            await asyncio.sleep(3)
            name = next(link.name for link in manager.links if link.in_flight)
            {"a": a, "b": b}[name].die()
            await task
            busy = manager.stats().busy_s_by_server
            assert sum(busy.values()) == pytest.approx(10 + 4 + 3 + 10, abs=0.1), "of a lost one, too"

    run(go())
