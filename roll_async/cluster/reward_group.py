"""Reward workers behind a Ray actor: text is decoded and scored there, never in the driver.

One call per sample: scoring costs far more than a call, and a slow sample must not hold back its neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import ray
from ray.actor import ActorHandle

from roll_async.cluster.errors import call
from roll_async.config.schema import RewardConfig
from roll_async.schema import Prompt, Reward, Sample


@ray.remote(max_restarts=0, max_concurrency=4096)
class RewardHost:
    """The worker pools of all domains on one node."""

    def __init__(self, rewards: Mapping[str, RewardConfig], tokenizer_folder: str) -> None:
        self._rewards, self._tokenizer_folder = rewards, tokenizer_folder

    async def start(self) -> None:
        """Start the worker processes of every domain."""
        from roll_async.prompts.tokenizer import load_tokenizer
        from roll_async.rewards.router import RewardRouter

        self._tokenizer = load_tokenizer(self._tokenizer_folder)
        self._router = RewardRouter(self._rewards)
        await self._router.start()

    async def score(self, prompt: Prompt, sample: Sample) -> Reward:
        """One sample. Raises ConnectionError for an outage."""
        text = self._tokenizer.decode(list(sample.response_token_ids), skip_special_tokens=True)
        return await self._router.score(prompt, text)

    async def close(self) -> None:
        await self._router.close()


class RayScorer:
    """`rollout/protocol.py: Scorer` over one or more RewardHosts, in turn."""

    def __init__(self, hosts: Sequence[ActorHandle]) -> None:
        self._hosts = hosts
        self._next = 0

    @classmethod
    async def start(cls, rewards: Mapping[str, RewardConfig], tokenizer_folder: str, env: Mapping[str, str]) -> RayScorer:
        """Start the reward workers. Raises ValueError for a reward that can not be built."""
        options = {"num_cpus": 1, "runtime_env": {"env_vars": {**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}}
        host = RewardHost.options(**options, name="rewards-0").remote(dict(rewards), tokenizer_folder)
        await call("rewards", host.start.remote())
        return cls([host])

    async def score(self, prompt: Prompt, sample: Sample) -> Reward:
        """Score one sample on the next host."""
        host = self._hosts[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        return await call("rewards", host.score.remote(prompt, sample))

    async def close(self) -> None:
        """Stop the worker processes."""
        closing = [asyncio.wrap_future(h.close.remote().future()) for h in self._hosts]
        await asyncio.wait(closing, timeout=5)
        for host in self._hosts:
            ray.kill(host)
