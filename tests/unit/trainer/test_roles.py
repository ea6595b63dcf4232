"""Calls of several roles that go side by side: what is left of them when one fails."""

import asyncio

import pytest

pytest.importorskip("torch")

from roll_async.trainer.roles import LearnerParts


def test_the_error_of_a_role_is_raised_as_it_is_when_the_calls_of_the_others_have_ended(run):
    ended = []

    async def lasts(name):
        try:
            await asyncio.sleep(100.0)
        finally:
            await asyncio.sleep(0.1)
            ended.append(name)

    async def fails(seconds):
        await asyncio.sleep(seconds)
        raise ConnectionError(f"gone after {seconds} s") from OSError("the cause")

    jobs = [("actor_train", lambda: lasts("actor")), ("reference", lambda: lasts("reference"))]
    jobs += [("critic", lambda: fails(0.5)), ("teacher", lambda: fails(0.25))]

    async def work():
        with pytest.raises(ConnectionError, match="gone after 0.25 s") as raised:
            await LearnerParts(actor=None).work(jobs)
        assert isinstance(raised.value.__cause__, OSError)
        assert ended == ["actor", "reference"] and asyncio.all_tasks() == {asyncio.current_task()}

    run(work())


def test_a_step_that_is_cancelled_ends_its_calls(run):
    ended = []

    async def lasts():
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def go():
        jobs = [("actor_train", lasts), ("critic", lasts)]
        step = asyncio.create_task(LearnerParts(actor=None).work(jobs))
        await asyncio.sleep(1.0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert ended == [1.0, 1.0]

    run(go())
