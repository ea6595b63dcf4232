"""Replicas that stand still without dying are found although nobody asks them for anything."""

import asyncio

import pytest

from roll_async.weight_sync.errors import EngineDead

WHOLE = [1003 + i for i in range(10)]


def freeze(replica):
    """As a stopped process: no call returns, no token comes, nothing breaks."""
    replica.frozen = True
    replica._serving.clear()


def test_a_frozen_replica_is_taken_out_and_its_requests_go_on_from_what_it_told_of(
    run, replica_class, make, managed, start, caplog
):
    async def go():
        frozen, good = replica_class("frozen"), replica_class("good")
        async with managed(frozen, good, interrupt_timeout_s=20.0) as manager:
            tasks = start(manager, [make(f"r{i}") for i in range(2)])
            await asyncio.sleep(3.5)
            frozen.tell()
            await asyncio.sleep(0.1)
            freeze(frozen)
            completions = await asyncio.gather(*tasks)
            assert all(list(c.token_ids) == WHOLE for c in completions)
            assert asyncio.get_running_loop().time() == pytest.approx(5 + 20 + 7, abs=0.5)
            assert list(good.submitted[1].prompt_token_ids) == [1, 2, 3, *WHOLE[:3]]
            assert manager.num_servers == 1 and manager.stats().lost_servers == 1
            assert "frozen is lost: no answer to a heartbeat for 20 s; its 1 requests are dispatched" in caplog.text

    run(go())


def test_a_frozen_replica_without_requests_is_found_too(run, replica_class, managed):
    async def go():
        frozen = replica_class("frozen")
        asked = []
        async with managed(frozen, replica_class("good"), interrupt_timeout_s=20.0) as manager:
            manager.returning.supervise(lambda name, reason: asked.append((name, reason)) is None)
            freeze(frozen)
            await asyncio.sleep(26)
            assert asked == [("frozen", "no answer to a heartbeat for 20 s")] and manager.expects_return

    run(go())


def test_all_replicas_are_asked_at_once_and_slow_answers_are_answers(run, replica_class, managed):
    async def go():
        replicas = [replica_class(f"r{i}") for i in range(20)]
        for replica in replicas:
            replica.load_s = 15.0
        async with managed(*replicas, interrupt_timeout_s=20.0) as manager:
            await asyncio.sleep(6)
            assert all(r.calls == ["load"] for r in replicas)
            await asyncio.sleep(100)
            assert manager.num_servers == 20

    run(go())


def test_a_replica_whose_load_is_an_error_is_taken_out_with_it(run, replica_class, managed, caplog):
    async def go():
        broken = replica_class("broken")
        broken.load_error = EngineDead("no memory")
        async with managed(broken, replica_class("good")) as manager:
            await asyncio.sleep(6)
            assert manager.num_servers == 1
            assert "engine broken is lost: asked for its load: no memory" in caplog.text

    run(go())


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_during_a_push_its_own_deadlines_hold_and_afterwards_the_heartbeat_goes_on(run, replica_class, managed, mode):
    async def go():
        busy, good = replica_class("busy"), replica_class("good")
        async with managed(busy, good, interrupt_timeout_s=20.0) as manager:
            await asyncio.sleep(4)
            busy.load_s = 30.0  # its loop is taken up by the weights
            await asyncio.sleep(2)
            await manager.interrupt(mode, 10.0)
            await asyncio.sleep(100)
            assert manager.num_servers == 2
            await manager.resume()
            await asyncio.sleep(26)
            assert manager.num_servers == 1

    run(go())


def test_time_in_which_the_manager_stood_still_itself_is_not_held_against_the_replicas(run, replica_class, managed):
    async def go():
        replica = replica_class("a")
        replica.load_s = 1.0
        async with managed(replica, interrupt_timeout_s=20.0) as manager:
            await asyncio.sleep(5.2)  # the replica was asked at 5
            asyncio.get_running_loop()._now_s += 1000.0  # the process was stopped, the machine slept
            await asyncio.sleep(50)
            assert manager.num_servers == 1

    run(go())
