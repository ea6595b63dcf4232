"""Engines that die are started again; their requests wait, go on elsewhere, and end as if nothing had happened."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from roll_async.rollout.engine_supervisor import EngineSupervisor
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.rollout.server_manager import AsyncLLMServerManager


class Garage:
    """Starts replicas: what `plan` says, an exception or the seconds it takes."""

    def __init__(self, replica_class, *plan):
        self.replica_class, self.plan, self.started = replica_class, list(plan), []

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
    manager = AsyncLLMServerManager(replicas, ManagerOptions())
    await manager.start()
    supervisor = EngineSupervisor(manager, garage.start, max_restarts=max_restarts, start_timeout_s=100.0)

    def rejoin(replica):  # the synchronizer: weights, then readmit
        async def bring():
            nonlocal refusals
            await asyncio.sleep(1.0)
            assert replica.calls[0] == "pause abort" and not replica.submitted, "no request before the weights"
            refusals -= 1
            if refusals >= 0:
                await supervisor.remove_replica(replica.name, "wrong digest again")
            else:
                await supervisor.readmit(replica)

        tasks.append(asyncio.ensure_future(bring()))

    tasks = []
    supervisor.attach(rejoin)
    try:
        yield manager, supervisor
    finally:
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
        garage = Garage(replica_class, RuntimeError("no memory yet"), 1.0)
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
        garage = Garage(replica_class, *[RuntimeError("broken for good")] * 4)
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
            assert len((await manager.generate(make())).token_ids) == 10
            assert garage.started == [("a", 1), ("a", 2)] and manager.num_servers == 1

    run(go())


def test_a_replica_that_refuses_the_weights_is_restarted_whether_it_works_or_is_on_its_way_back(run, replica_class):
    async def go():
        old, garage = replica_class("a"), Garage(replica_class, 1.0, 1.0)
        async with supervised([old], garage, refusals=1) as (manager, supervisor):
            await supervisor.remove_replica("a", "wrong digest")
            await asyncio.sleep(30)
            assert manager.num_servers == 1 and garage.started == [("a", 1), ("a", 2)]
            await supervisor.remove_replica("a", "a third time")
            with pytest.raises(ConnectionError, match="a third time"):
                await manager.wait_failed()

    run(go())
