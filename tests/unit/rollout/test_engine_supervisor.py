"""Engines that die are started again; their requests wait, go on elsewhere, and end as if nothing had happened."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from roll_async.buffer.errors import RoleFailed
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.engine_supervisor import EngineSupervisor
from roll_async.rollout.dispatch.manager_options import ManagerOptions


class Garage:
    """Starts replicas: what `plan` says, an exception or the seconds it takes."""

    def __init__(self, replica_class, *plan):
        self.replica_class, self.plan, self.started, self.stopped = replica_class, list(plan), [], []
        self.devices = asyncio.Event()
        self.devices.set()

    def name(self, index):
        return "abcdef"[index]

    async def reserve(self, name):
        await self.devices.wait()

    async def stop(self, name):
        self.stopped.append(name)

    async def start(self, name, number):
        self.started.append((name, number))
        step = self.plan.pop(0)
        if isinstance(step, Exception):
            raise step
        await asyncio.sleep(step)
        replica = self.replica_class(name, version=5)
        self.last = replica
        return replica


@asynccontextmanager
async def supervised(replicas, garage, max_restarts=2, refusals=0):
    manager = EnginePool(replicas, ManagerOptions(interrupt_timeout_s=20.0))
    await manager.start()
    supervisor = EngineSupervisor(manager, garage, max_restarts=max_restarts, start_timeout_s=100.0)

    async def push():
        """Weights for what is held, a second after it is."""
        while True:
            await held.wait()
            held.clear()
            for replica in manager.returning.holding.values():
                if replica not in given:
                    given.append(replica)
                    pushes.append(asyncio.ensure_future(bring(replica)))

    async def bring(replica):
        nonlocal refusals
        await asyncio.sleep(1.0)
        if manager.returning.holding.get(replica.name) is not replica:
            return
        assert replica.calls[0] == "pause abort" and not replica.submitted, "no request before the weights"
        refusals -= 1
        if refusals >= 0:
            await manager.returning.reject(replica, "wrong digest again")
        else:
            await manager.returning.rejoin(replica)

    held, given = asyncio.Event(), []
    manager.returning.attach(held)
    pushes = [asyncio.ensure_future(push())]
    try:
        yield manager, supervisor
    finally:
        for task in pushes:
            task.cancel()
        await supervisor.close()
        await manager.close()


def test_requests_of_the_only_engine_wait_for_its_return_and_keep_what_they_had(run, make, replica_class):
    async def go():
        old, garage = replica_class("a"), Garage(replica_class, 20.0)
        async with supervised([old], garage) as (manager, _):
            before = asyncio.ensure_future(manager.generate(make("r", tokens=10)))
            await asyncio.sleep(4.5)
            await manager.interrupt("resume", 10.0)
            await manager.resume()
            await asyncio.sleep(3.5)
            old.die("SIGKILL")
            await asyncio.sleep(1)
            assert manager.num_servers == 0 and manager.expects_return
            late = asyncio.ensure_future(manager.generate(make("late", tokens=3)))
            done = await before
            assert done.token_ids.tolist() == list(range(1003, 1013)) and len(done.logprobs) == 10
            assert done.version_runs == ((0, 4), (5, 6)), "four tokens were received before the death"
            await late
            stats = manager.stats()
            assert (stats.lost_servers, stats.returned_servers, manager.num_servers) == (1, 1, 1)
            assert garage.started == [("a", 1)] and not manager.expects_return

    run(go())


def test_a_start_that_fails_is_tried_again_as_long_as_restarts_are_left(run, make, replica_class):
    async def go():
        old = replica_class("a")
        garage = Garage(replica_class, RoleFailed("no memory yet"), 1.0)
        async with supervised([old], garage) as (manager, _):
            waiting = asyncio.ensure_future(manager.generate(make()))
            await asyncio.sleep(1)
            old.die()
            assert len((await waiting).token_ids) == 10
            assert garage.started == [("a", 1), ("a", 2)]

    run(go())


def test_an_engine_that_does_not_come_back_is_given_up_and_the_last_one_ends_the_run(run, make, replica_class):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        garage = Garage(replica_class, *[RoleFailed("broken for good")] * 4)
        async with supervised([a, b], garage) as (manager, _):
            a.die("first")
            await asyncio.sleep(50)
            assert not manager.expects_return and manager.num_servers == 1
            waiting = asyncio.ensure_future(manager.generate(make(tokens=100)))
            await asyncio.sleep(1)
            b.die("second")
            with pytest.raises(ConnectionError, match="no engine is left.*broken for good"):
                await waiting
            with pytest.raises(ConnectionError):
                await manager.wait_failed()

    run(go())


def test_a_start_that_hangs_is_given_up_after_its_time_out(run, replica_class):
    async def go():
        old, garage = replica_class("a"), Garage(replica_class, 1e9, 1e9)
        async with supervised([old], garage) as (manager, _):
            old.die()
            with pytest.raises(ConnectionError, match="not up within 100 s"):
                await manager.wait_failed()

    run(go())


@pytest.mark.parametrize("trouble", ["hangs", "raises"])
def test_a_replica_that_holds_the_weights_and_does_not_go_on_is_restarted_again(run, make, replica_class, trouble):
    async def resume():
        if trouble == "raises":
            raise ConnectionError("gone again")
        await asyncio.sleep(1e6)

    async def go():
        old, garage = replica_class("a"), Garage(replica_class, 1.0, 1.0)
        async with supervised([old], garage) as (manager, _):
            old.die()
            while len(garage.started) < 1:
                await asyncio.sleep(0.5)
            await asyncio.sleep(1.5)
            garage.last.resume = resume
            began = asyncio.get_running_loop().time()
            assert len((await manager.generate(make())).token_ids) == 10
            assert asyncio.get_running_loop().time() - began < 60, "less than it may take to start"
            assert garage.started == [("a", 1), ("a", 2)] and manager.num_servers == 1

    run(go())


def test_a_replica_that_refuses_the_weights_is_restarted_whether_it_works_or_is_on_its_way_back(run, replica_class):
    async def go():
        old, garage = replica_class("a"), Garage(replica_class, 1.0, 1.0)
        async with supervised([old], garage, refusals=1) as (manager, supervisor):
            await manager.returning.reject(manager.clients[0], "wrong digest")
            await asyncio.sleep(30)
            assert manager.num_servers == 1 and garage.started == [("a", 1), ("a", 2)]
            await manager.returning.reject(garage.last, "a third time")
            with pytest.raises(ConnectionError, match="a third time"):
                await manager.wait_failed()

    run(go())


def test_a_replica_that_joins_gets_requests_when_it_holds_the_weights_and_is_no_restart(run, make, replica_class):
    async def go():
        garage = Garage(replica_class, 3.0)
        async with supervised([replica_class("a")], garage) as (manager, supervisor):
            assert supervisor.scale(2) == (["b"], []) and supervisor.names == ["a", "b"]
            assert supervisor.scale(2) == ([], []), "one that is on its way counts"
            await asyncio.sleep(3.5)
            assert manager.num_servers == 1 and not garage.last.submitted
            await asyncio.sleep(1.0)
            assert manager.num_servers == 2 and garage.started == [("b", 0)]
            await asyncio.gather(*(manager.generate(make(f"r{i}")) for i in range(4)))
            stats = manager.stats()
            assert garage.last.submitted and (stats.lost_servers, stats.returned_servers) == (0, 0)

    run(go())


def test_what_a_leaving_replica_runs_goes_on_elsewhere_with_all_its_tokens_and_costs_no_retry(run, make, replica_class):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        garage = Garage(replica_class)
        async with supervised([a, b], garage) as (manager, supervisor):
            work = [asyncio.ensure_future(manager.generate(make(f"r{i}"))) for i in range(4)]
            await asyncio.sleep(4.5)
            assert b.submitted and supervisor.scale(1) == ([], ["b"]) and supervisor.names == ["a"]
            await asyncio.sleep(0.1)
            assert manager.num_servers == 1 and garage.stopped == ["b"] and len(b.aborted) == 2
            late = asyncio.ensure_future(manager.generate(make("late")))
            for done in await asyncio.gather(*work, late):
                assert done.token_ids.tolist() == list(range(1003, 1013)) and len(done.logprobs) == 10
            assert len(a.submitted) == 5 and [r.sampling.max_new_tokens for r in a.submitted[2:4]] == [6, 6]
            stats = manager.stats()
            assert (stats.lost_servers, stats.retried, stats.resumed) == (0, 0, 2)

    run(go())


def test_a_replica_that_dies_while_it_leaves_is_not_started_again_and_loses_no_request(run, make, replica_class):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        b.deaf = True
        garage = Garage(replica_class)
        async with supervised([a, b], garage) as (manager, supervisor):
            work = [asyncio.ensure_future(manager.generate(make(f"r{i}"))) for i in range(4)]
            await asyncio.sleep(4.5)
            supervisor.scale(1)
            await asyncio.sleep(1.0)
            b.die()
            for done in await asyncio.gather(*work):
                assert done.token_ids.tolist() == list(range(1003, 1013))
            assert garage.started == [] and garage.stopped == ["b"] and supervisor.names == ["a"]

    run(go())


def test_devices_that_are_not_there_yet_are_waited_for_without_a_deadline_and_can_be_given_up(run, replica_class):
    async def go():
        garage = Garage(replica_class, 1.0)
        garage.devices.clear()
        async with supervised([replica_class("a")], garage) as (manager, supervisor):
            assert supervisor.scale(3) == (["b", "c"], [])
            await asyncio.sleep(5000)  # fifty times what a start may take
            assert garage.started == [] and not manager.expects_return, "the run does not wait for devices"
            assert supervisor.scale(2) == ([], ["c"])
            garage.devices.set()
            await asyncio.sleep(3)
            assert garage.started == [("b", 0)] and garage.stopped == ["c"] and manager.num_servers == 2

    run(go())


def test_those_that_serve_stay_before_those_that_are_on_their_way_and_a_name_is_used_again(run, replica_class):
    async def go():
        a, b = replica_class("a"), replica_class("b")
        garage = Garage(replica_class, 50.0, 1.0, 1.0)
        async with supervised([a, b], garage) as (manager, supervisor):
            a.die()
            await asyncio.sleep(10)
            assert supervisor.names == ["b", "a"] and supervisor.scale(1) == ([], ["a"])
            await asyncio.sleep(5)
            assert manager.num_servers == 1 and garage.started == [("a", 1)] and not manager.expects_return
            assert supervisor.scale(3) == (["a", "c"], [])
            await asyncio.sleep(5)
            assert garage.started == [("a", 1), ("a", 2), ("c", 0)], "no process is twice the same"
            assert {c.name for c in manager.clients} == {"a", "b", "c"}

    run(go())


def test_a_replica_that_leaves_while_it_waits_for_weights_is_forgotten(run, replica_class):
    async def go():
        garage = Garage(replica_class, 0.5)
        async with supervised([replica_class("a")], garage) as (manager, supervisor):
            supervisor.scale(2)
            await asyncio.sleep(1.0)
            assert supervisor.scale(1) == ([], ["b"])
            await asyncio.sleep(5)
            assert manager.num_servers == 1 and garage.stopped == ["b"] and not manager.expects_return

    run(go())


def test_a_new_replica_that_does_not_start_is_given_up_and_the_others_go_on(run, make, replica_class):
    async def go():
        garage = Garage(replica_class, *[ValueError("no such model")] * 3)
        async with supervised([replica_class("a")], garage) as (manager, supervisor):
            supervisor.scale(2)
            await asyncio.sleep(100)
            assert garage.started == [("b", 0), ("b", 1), ("b", 2)] and supervisor.names == ["a"]
            assert len((await manager.generate(make())).token_ids) == 10 and not manager.expects_return

    run(go())
