"""Prompts to the scorer of their domain. Every domain has workers and a queue of its own: a slow one does not stall
the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from roll_async.config.schema import RewardConfig
from roll_async.config.schema_rollout import reads_answers
from roll_async.observe.outside import encodable
from roll_async.observe.thoughts import THINK, Thought, ThoughtMarks, thought_of
from roll_async.rewards.registry import is_own
from roll_async.rewards.serving.first_answers import UNFINISHED, FirstAnswers
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
    """All domains of a run. An outage raises ConnectionError; a time-out or an error is a state without a score.

    Our rewards judge what follows the thought of a response, and an unfinished thought has no answer. A user's reward
    gets the whole text, and how its thought ended as `extra["thought"]`.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], marks: Sequence[ThoughtMarks] = THINK) -> None:
        """`marks`: of thoughts, as the model writes them."""
        self._marks = tuple(marks)
        self._own = frozenset(domain for domain, config in rewards.items() if is_own(config.type))
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
        """The verdict of the prompt's domain on the response text, marks of thoughts included."""
        thought = thought_of(prompt.thought, text, self._marks)
        asked = prompt, thought.rest
        if prompt.domain in self._own:
            asked = replace(prompt, extra={**prompt.extra, "thought": _state(thought, text)}), text
        try:
            reward = await self._scorers[prompt.domain].score_response(*asked)
        except Exception as error:  # a bug of a scorer must not leave its sample without an answer
            reward = reward_of_error(error)
        reward = _writable(reward)
        if reward.status is RewardStatus.OK:
            reward = _with_thought(reward, thought, is_own=prompt.domain in self._own)
        if reward.status is RewardStatus.OUTAGE:
            raise ConnectionError(f"reward {prompt.domain}: {reward.reason}")
        if prompt.domain in self._first:
            notice = self._first[prompt.domain].look(thought, reward)
            if notice:
                self.notices.append(notice)
        return reward

    async def close(self) -> None:
        """End all worker processes and connections."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))


def _state(thought: Thought, text: str) -> str:
    # By the rest: a thought may be empty.
    return "unfinished" if thought.unfinished else "closed" if thought.rest != text else "none"


def _with_thought(reward: Reward, thought: Thought, *, is_own: bool) -> Reward:
    metrics = {**reward.metrics, "unfinished_thought": float(thought.unfinished)}
    if is_own or not thought.unfinished:
        return replace(reward, metrics=metrics)
    # Whatever a rule says of no text at all: to some references the empty answer is equal.
    return replace(reward, score=0.0, metrics={**metrics, "acc": 0.0, "format": 0.0}, reason=UNFINISHED)


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
