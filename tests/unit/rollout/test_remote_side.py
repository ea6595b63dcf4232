"""The driver's clients of a rollout process that is gone."""

import asyncio

import pytest

from roll_async.rollout.remote_side import QueueClient, RpcChannel


class Dying(RpcChannel):
    """Answers batches until it is gone."""

    gone = False

    async def ask(self, what, *args):
        if self.gone:
            raise ConnectionError("rollout process: process is gone")
        assert what == "take_batch"
        return [], {"step": args[0], "part": args[1]}

    wait = ask


def test_a_step_is_saved_without_the_process_also_when_the_batch_after_it_had_come():
    """It dies between two steps: the next batch has been handed over, and nothing of it is learned."""

    async def go():
        border = Dying()
        queue = QueueClient(border)
        for step, part in ((1, None), (2, 1), (2, 2), (3, None)):
            await queue.take_batch(step, part)
        border.gone = True
        assert await queue.checkpoint_state(2) == {"step": 2, "part": 2}
        assert await queue.checkpoint_state(3) == {"step": 3, "part": None}
        with pytest.raises(ConnectionError, match="process is gone"):
            await queue.checkpoint_state(1)

    asyncio.run(go())
