"""One prompt to one group: N samples, each scored the moment it is complete, judged the moment all are there.

run_group:  generate * N -> score * N -> variance test -> KEPT | FILTERED | FAILED | REQUEUED
generate_sequences: one DAPO round over many prompts, with early stop
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from roll_async.algorithms.group_variance import group_verdict
from roll_async.rollout.protocol import Scorer
from roll_async.rollout.requests import GenerationFailed, Interrupted
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Prompt,
    Reward,
    RewardStatus,
    Sample,
    SamplingParams,
    WeightVersion,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0


class GroupFate(Enum):
    """What became of a group."""

    KEPT = "kept"
    FILTERED = "filtered"  # no spread: it would carry no gradient
    FAILED = "failed"  # quarantined with its reason
    REQUEUED = "requeued"  # interrupted: the same prompt again later


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutcome:
    """A group, or why there is none."""

    fate: GroupFate
    group: Group | None = None
    """With KEPT, and with FILTERED unless a sample has no score."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """The part of the config the scheduler obeys."""

    samples_per_group: int
    """N, the documents' n_resp_per_prompt."""
    sampling: SamplingParams
    filter_enabled: bool = False
    filter_metric: str = "score"
    variance_threshold: float = 1e-8
    singletons: str = "keep"
    max_num_gen_batches: int = 0
    """<= 0 = no limit."""
    gen_batch_size: int | None = None
    """Groups in flight in a round; None = as many as the round wants."""
    sample_retries: int = 2
    reward_timeout_s: float = 1800.0
    """Seconds without an answer of the scorer, its queue included, after which it counts as an outage."""
    outage_patience_s: float = 1800.0
    """Seconds a sample waits for a scorer that does not work; then its group fails."""
    greedy_baseline: bool = False
    """One greedy answer per prompt besides the samples (remax)."""
    spread_samples: bool = True
    """False: the samples of a group go to one replica (is_num_return_sequences_expand: false, or prefix caching)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """What a round brought."""

    groups: tuple[Group, ...]
    leftovers: tuple[int, ...]
    """Positions of prompts that were aborted or never started."""
    failed: tuple[tuple[int, str], ...]
    statistics: dict[str, float] = field(default_factory=dict)


class RewardOutage(RuntimeError):
    """The scorer did not work, also after retries. Not a wrong answer."""


class Unscorable(RuntimeError):
    """Judging a sample exceeded the scorer's limits: no score, and no other answer from asking again."""


class ChatCompletionScheduler:
    """Generates and scores groups on the replicas of a manager."""

    def __init__(self, manager: AsyncLLMServerManager, scorer: Scorer, options: SchedulerOptions) -> None:
        self._manager, self._scorer, self._options = manager, scorer, options
        self.reward_outages = self.reward_timeouts = self.reward_errors = 0
        """Attempts that brought no score, by why."""

    async def run_group(
        self, prompt: Prompt, *, group_id: int, attempt: int = 0, admitted_version: WeightVersion = 0
    ) -> GroupOutcome:
        """One group. Every path ends in an outcome; only cancellation and the loss of all replicas are raised."""
        loop, name = asyncio.get_running_loop(), f"{group_id}.{attempt}"
        admitted = loop.time()
        affinity = None if self._options.spread_samples else name
        ended: GroupOutcome | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(self._sample(prompt, f"{name}/{i}", self._options.sampling, affinity))
                    for i in range(self._options.samples_per_group)
                ]
                baseline = tasks.create_task(self._baseline(prompt, f"{name}/greedy", affinity))
        except* Interrupted:
            ended = GroupOutcome(fate=GroupFate.REQUEUED, reason="interrupted by a weight push")
        except* Unscorable as errors:
            # Without all its scores the group has no statistics; like one with a score that is not finite.
            ended = GroupOutcome(fate=GroupFate.FILTERED, reason=f"dropped_invalid: {_first(errors)}")
        except* (GenerationFailed, RewardOutage, ValueError) as errors:
            ended = GroupOutcome(fate=GroupFate.FAILED, reason=str(_first(errors)))
        finally:
            self._manager.forget_affinity(name)
        if ended is not None:
            return ended
        group = Group(
            group_id=group_id,
            prompt=prompt,
            samples=tuple(t.result() for t in samples),
            admitted_version=admitted_version,
            admitted_s=admitted,
            finished_s=loop.time(),
            baseline_score=baseline.result(),
        )
        if any(s.finish_reason is FinishReason.ABORT for s in group.samples):
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted")
        return self._judge(group)

    def _judge(self, group: Group) -> GroupOutcome:
        """The variance test, on the metric the config names."""
        if not self._options.filter_enabled:
            return GroupOutcome(fate=GroupFate.KEPT, group=group)
        try:
            values = [metric_of(s, self._options.filter_metric) for s in group.samples]
        except KeyError as missing:
            return GroupOutcome(
                fate=GroupFate.FAILED, reason=f"filter_groups.metric {missing} is not reported by the reward"
            )
        verdict = group_verdict(
            values, variance_threshold=self._options.variance_threshold, singletons=self._options.singletons
        )
        fate = GroupFate.KEPT if verdict == "keep" else GroupFate.FILTERED
        return GroupOutcome(fate=fate, group=group, reason=verdict)

    async def _sample(
        self, prompt: Prompt, name: str, sampling: SamplingParams, affinity: str | None, *, foreground: bool = False
    ) -> Sample:
        request = GenerateRequest(request_id=name, prompt_token_ids=prompt.token_ids, sampling=sampling)
        completion = await self._manager.generate(request, affinity=affinity, foreground=foreground)
        sample = _sample_of(prompt, name, completion)
        if sample.finish_reason is FinishReason.ABORT:
            return sample
        reward = await self._score(prompt, sample)
        return _with_reward(sample, reward)

    async def _baseline(self, prompt: Prompt, name: str, affinity: str | None) -> float | None:
        if not self._options.greedy_baseline:
            return None
        sample = await self._sample(prompt, name, _greedy(self._options.sampling), affinity)
        return sample.reward.score if sample.reward is not None else None

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward:
        """The reward. An outage is waited out, with backoff, for `outage_patience_s`; an error of the reward itself is
        tried `sample_retries` times more; both then fail the group. A time-out is final and filters the group.
        """
        loop, options = asyncio.get_running_loop(), self._options
        patience_ends = loop.time() + options.outage_patience_s
        pause_s, errors = _FIRST_RETRY_S, 0
        where = f"reward of sample {sample.sample_id} (domain {prompt.domain})"
        while True:
            reward = await self._ask_scorer(prompt, sample)
            match reward.status:
                case RewardStatus.OK:
                    return reward
                case RewardStatus.TIMEOUT:
                    self.reward_timeouts += 1
                    raise Unscorable(f"{where}: {reward.reason}")
                case RewardStatus.ERROR:
                    self.reward_errors += 1
                    errors += 1
                    if errors > options.sample_retries:
                        raise RewardOutage(f"{where}: {reward.reason}")
                case RewardStatus.OUTAGE:
                    self.reward_outages += 1
                    if loop.time() + pause_s > patience_ends:
                        raise RewardOutage(f"{where}: {reward.reason}, for {options.outage_patience_s:g} s")
                    logger.warning("%s: %s; asking again in %g s", where, reward.reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)

    async def _ask_scorer(self, prompt: Prompt, sample: Sample) -> Reward:
        """One attempt; a scorer that is gone or silent is an outage."""
        timeout_s = self._options.reward_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._scorer.score(prompt, sample)
        except TimeoutError:
            return Reward(score=0.0, status=RewardStatus.OUTAGE, reason=f"no answer within {timeout_s:g} s")
        except ConnectionError as error:
            return Reward(score=0.0, status=RewardStatus.OUTAGE, reason=str(error))

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Sample]:
        """One scored sample per prompt, without filter or early stop, in the foreground. Failed ones are left out,
        logged.
        """
        work = [self._sample(p, f"{name}/{i}", sampling, None, foreground=True) for i, p in enumerate(prompts)]
        done = await asyncio.gather(*work, return_exceptions=True)
        samples = []
        for result in done:
            if isinstance(result, Sample):
                samples.append(result)
            elif isinstance(result, (GenerationFailed, RewardOutage, Unscorable, ValueError)):
                logger.warning("validation: %s", result)
            else:
                raise result
        return samples

    async def generate_sequences(
        self, prompts: Sequence[Prompt], num_groups: int, *, validation: bool = False, first_id: int = 0
    ) -> RolloutResult:
        """One round: generate until `num_groups` groups are kept, then stop early. With `validation` every prompt
        counts and none is cut.

        Raises ValueError ("Generated too many. Please check your data.") when `max_num_gen_batches` batches did not
        suffice;
        nothing is lost, the prompts are the caller's.
        """
        options = self._options
        width = len(prompts) if validation else (options.gen_batch_size or num_groups)
        kept: list[Group] = []
        failed: list[tuple[int, str]] = []
        counts = dict.fromkeys(("seen", "kept", "filtered", "failed", "requeued"), 0.0)
        running: dict[asyncio.Task[GroupOutcome], int] = {}
        leftovers: list[int] = []
        position = 0
        while True:
            while len(running) < width and position < len(prompts):
                task = asyncio.ensure_future(self.run_group(prompts[position], group_id=first_id + position))
                running[task] = position
                position += 1
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=running.__getitem__):
                index, outcome = running.pop(task), task.result()
                counts["seen"] += 1
                counts[outcome.fate.value] += 1
                if outcome.group is not None and (validation or outcome.fate is GroupFate.KEPT):
                    kept.append(outcome.group)
                elif outcome.fate is GroupFate.FAILED:
                    failed.append((index, outcome.reason))
                elif outcome.fate is GroupFate.REQUEUED:
                    leftovers.append(index)
            if not validation and len(kept) >= num_groups:
                leftovers += await self._early_stop(running, first_id)
                break
            batches = counts["seen"] / width
            if not validation and 0 < options.max_num_gen_batches <= batches:
                await self._early_stop(running, first_id)
                raise ValueError(
                    f"num_gen_batches={batches:g} >= max_num_gen_batches={options.max_num_gen_batches} with {len(kept)} of {num_groups} "
                    "groups kept. Generated too many. Please check your data."
                )
        leftovers += range(position, len(prompts))
        taken = kept if validation else kept[:num_groups]
        leftovers += [g.group_id - first_id for g in kept[len(taken) :]]
        counts["aborted"] = float(len(leftovers))
        return RolloutResult(
            groups=tuple(taken), leftovers=tuple(sorted(leftovers)), failed=tuple(failed), statistics=counts
        )

    async def _early_stop(self, running: dict[asyncio.Task[GroupOutcome], int], first_id: int) -> list[int]:
        """Abort what still runs: collect the request ids, wait until the servers acknowledge, then end the tasks.
        Positions of the prompts.
        """
        ids = [
            f"{first_id + index}.0/{i}" for index in running.values() for i in range(self._options.samples_per_group)
        ]
        await self._manager.abort(ids)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        return list(running.values())


def metric_of(sample: Sample, name: str) -> float:
    """The number `filter_groups.metric` means. Raises KeyError for one the reward does not report."""
    assert sample.reward is not None
    if name in ("score", "seq_reward", "seq_final_reward"):
        return sample.reward.score
    return sample.reward.metrics[name]


def _sample_of(prompt: Prompt, name: str, completion: Completion) -> Sample:
    return Sample(
        sample_id=name,
        prompt_token_ids=prompt.token_ids,
        response_token_ids=completion.token_ids,
        loss_mask=b"\x01" * len(completion.token_ids),
        behaviour_logprobs=completion.logprobs,
        version_runs=completion.version_runs,
        finish_reason=completion.finish_reason,
        generation_s=completion.generation_s,
    )


def _with_reward(sample: Sample, reward: Reward) -> Sample:
    return Sample(
        sample_id=sample.sample_id,
        prompt_token_ids=sample.prompt_token_ids,
        response_token_ids=sample.response_token_ids,
        loss_mask=sample.loss_mask,
        behaviour_logprobs=sample.behaviour_logprobs,
        version_runs=sample.version_runs,
        finish_reason=sample.finish_reason,
        generation_s=sample.generation_s,
        reward=reward,
        num_turns=sample.num_turns,
    )


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=0.0,
        stop_strings=sampling.stop_strings,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        stop_token_ids=sampling.stop_token_ids,
    )


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
