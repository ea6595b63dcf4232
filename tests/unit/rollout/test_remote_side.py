"""The driver's clients of a rollout process that is gone."""

import asyncio

import pytest

from roll_async.rollout.remote_side import QueueClient, RolloutServer, RpcChannel


class Calls(RolloutServer):
    """Answers batches until the process is gone."""

    gone = False

    def __init__(self):
        self.freshness = self.step_trained = self.checkpointed = None

    async def take_batch(self, step, num_groups):
        return [], {"step": step, "part": num_groups}

    async def checkpoint_state(self, step):
        assert self.gone
        raise ConnectionError("rollout process: process is gone")


def test_a_step_is_saved_without_the_process_also_when_the_batch_after_it_had_come():
    """It dies between two steps: the next batch has been handed over, and nothing of it is learned."""

    async def go():
        channel = RpcChannel()
        channel.calls = calls = Calls()
        queue = QueueClient(channel)
        for step, part in ((1, None), (2, 1), (2, 2), (3, None)):
            await queue.take_batch(step, part)
        calls.gone = True
        assert await queue.checkpoint_state(2) == {"step": 2, "part": 2}
        assert await queue.checkpoint_state(3) == {"step": 3, "part": None}
        with pytest.raises(ConnectionError, match="process is gone"):
            await queue.checkpoint_state(1)

    asyncio.run(go())
