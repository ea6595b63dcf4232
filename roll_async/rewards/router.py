"""Prompts to the scorer of their domain. Every domain has workers and a queue of its own: a slow one does not stall
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from roll_async.config.schema import RewardConfig
from roll_async.rewards.pool import PoolOptions, RewardPool
from roll_async.schema import Prompt, Reward, RewardStatus


class RewardRouter:
    """All domains of a run. An outage raises ConnectionError; a time-out is a state without a score."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._pools = {
            domain: RewardPool(
                PoolOptions(reward=config.type, num_workers=config.num_workers, timeout_s=config.timeout)
            )
            for domain, config in rewards.items()
        }

    async def start(self) -> None:
        """Start the workers of every domain. Raises ValueError for a reward that cannot be built."""
        for pool in self._pools.values():
            await pool.start()

    async def score(self, prompt: Prompt, text: str) -> Reward:
        """The verdict of the prompt's domain on the response text."""
        reward = await self._pools[prompt.domain].score(text, prompt.ground_truth, prompt.extra)
        if reward.status is RewardStatus.OUTAGE:
            raise ConnectionError(f"reward {prompt.domain}: {reward.reason}")
        return reward

    async def close(self) -> None:
        """End all worker processes."""
        for pool in self._pools.values():
            await pool.close()
