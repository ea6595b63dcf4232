"""The clock of every simulation and of the unit tests: jumps, order, deadlocks by name, kills."""

import asyncio
from contextlib import suppress

import pytest

from roll_async.simulator.clock import Deadlock, Killed, OutOfEvents, VirtualLoop, run_virtual


def test_an_hour_passes_at_once_and_in_order():
    async def main():
        seen = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(*(sleeper(s) for s in (3600.0, 0.5, 7.0)))
        return seen

    assert run_virtual(main()) == [(0.5, 0.5), (7.0, 7.0), (3600.0, 3600.0)]


def test_a_timeout_fires_on_the_clock():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(30)


def test_a_deadlock_names_who_waits():
    async def main():
        await asyncio.create_task(asyncio.Event().wait(), name="the train loop")

    with pytest.raises(Deadlock, match="at 0 s every coroutine waits.*the train loop"):
        run_virtual(main())


def test_polling_for_ever_is_found():
    async def main():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(OutOfEvents, match="not ended after 100 rounds"):
        run_virtual(main(), VirtualLoop(max_rounds=100))


def test_a_kill_comes_in_its_round_after_what_it_leaves_was_put_aside():
    steps, left = [], []

    async def main():
        for i in range(100):
            steps.append(i)
            await asyncio.sleep(1)

    with pytest.raises(Killed):
        run_virtual(main(), VirtualLoop(kill_in_round=10, on_kill=lambda: left.append(len(steps))))
    assert left == [len(steps)] and 1 < len(steps) < 10


def test_a_task_that_ignores_the_end_of_its_run_is_named():
    async def stubborn():
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def main():
        main.left = asyncio.create_task(stubborn(), name="the stubborn one")
        await asyncio.sleep(1)

    with pytest.raises(OutOfEvents, match="the run is over, and these do not end .*the stubborn one"):
        run_virtual(main())


def test_every_instant_is_shown_once_before_the_clock_moves():
    loop = VirtualLoop(on_advance=lambda: seen.append(loop.time()))
    seen = []

    async def main():
        for _ in range(3):
            await asyncio.sleep(2)
            await asyncio.sleep(0)

    run_virtual(main(), loop)
    assert seen == [0, 2, 4]


def test_threads_are_refused():
    async def main():
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="must not use threads"):
        run_virtual(main())
