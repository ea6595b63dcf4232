"""Prompts to the scorer of their domain. Every domain has workers and a queue of its own: a slow one does not stall
the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from roll_async.config.schema import RewardConfig
from roll_async.config.schema_rollout import reads_answers
from roll_async.observe.outside import encodable
from roll_async.rewards.serving.first_answers import FirstAnswers
from roll_async.rewards.serving.llm_judge import LlmJudge
from roll_async.rewards.serving.pool import RewardPool, RewardPoolOptions
from roll_async.rewards.serving.service_client import ServiceClient
from roll_async.rewards.verdict import reward_of_error
from roll_async.schema import Prompt, Reward, RewardStatus

_WORKER_MEMORY_MB = 4096
_LONGEST_REASON = 1000


class DomainScorer(Protocol):
    """What judges one domain: worker processes or a client of a server."""

    async def start(self) -> None: ...

    async def score_response(self, prompt: Prompt, text: str) -> Reward: ...

    async def close(self) -> None: ...


class RewardRouter:
    """All domains of a run. An outage raises ConnectionError; a time-out or an error is a state without a score."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._scorers = {domain: create_scorer(config) for domain, config in rewards.items()}
        self._first = {
            domain: FirstAnswers(domain, config.answer_format, reads_answers=reads_answers(config.type))
            for domain, config in rewards.items()
        }
        self.notices: list[str] = []
        """Notices for the console; the reader clears them."""

    async def start(self) -> None:
        """Start all domains side by side. Raises ValueError for a reward that cannot be built; nothing runs then."""
        # All results, also beside an error: what has started must be ended.
        started = await asyncio.gather(*(s.start() for s in self._scorers.values()), return_exceptions=True)
        failed = [(d, e) for d, e in zip(self._scorers, started, strict=True) if isinstance(e, BaseException)]
        if failed:
            await self.close()
            domain, error = failed[0]
            raise ValueError(f"rewards.{domain}: {error}") from error

    async def score(self, prompt: Prompt, text: str) -> Reward:
        """The verdict of the prompt's domain on the response text."""
        try:
            reward = await self._scorers[prompt.domain].score_response(prompt, text)
        except Exception as error:  # a bug of a scorer must not leave its sample without an answer
            reward = reward_of_error(error)
        reward = _writable(reward)
        if reward.status is RewardStatus.OUTAGE:
            raise ConnectionError(f"reward {prompt.domain}: {reward.reason}")
        if prompt.domain in self._first:
            notice = self._first[prompt.domain].look(text, reward)
            if notice:
                self.notices.append(notice)
        return reward

    async def close(self) -> None:
        """End all worker processes and connections."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))


def _writable(reward: Reward) -> Reward:
    """Its texts, which are a judge's or a user's, as ledger, logs and metrics can write them."""
    return replace(
        reward,
        reason=encodable(reward.reason[:_LONGEST_REASON]),
        metrics={encodable(name): value for name, value in reward.metrics.items()},
        place=encodable(reward.place),
        traceback=encodable(reward.traceback),
    )


def create_scorer(config: RewardConfig) -> DomainScorer:
    """The scorer of one domain, not started."""
    if config.type == "llm_judge":
        assert config.judge is not None, "the loader requires it"
        return LlmJudge(config.judge, timeout_s=config.timeout)
    if config.type == "math_service":
        assert config.service is not None, "the loader requires it"
        return ServiceClient(config.service, timeout_s=config.timeout, answer_format=config.answer_format)
    memory_mb, arguments = _WORKER_MEMORY_MB, {}
    if config.answer_format != "auto":
        arguments = {"answer_format": config.answer_format}
    if config.type == "code_sandbox":
        sandbox = config.sandbox
        arguments = {"timeout_s": config.timeout}
        if sandbox is not None:
            # The sandbox's processes inherit the limit of the worker, and none can raise it again.
            memory_mb += sandbox.memory_mb
            arguments |= {
                "memory_mb": sandbox.memory_mb,
                "case_timeout_s": sandbox.case_timeout,
                "scoring": sandbox.scoring,
                "isolation": sandbox.isolation,
                "api_url": sandbox.api_url,
                "prelude": sandbox.prelude,
            }
    return RewardPool(
        RewardPoolOptions(
            reward=config.type,
            num_workers=config.num_workers,
            timeout_s=config.timeout,
            memory_mb=memory_mb,
            arguments=arguments,
        )
    )
