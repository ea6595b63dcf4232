"""One prompt to one group: N samples, each scored as soon as it is complete, filtered as soon as all are scored.

run_group:  generate * N -> score * N -> variance test -> KEPT | FILTERED | FAILED | REQUEUED
generate_sequences: one DAPO round over many prompts, with early stop
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from roll_async.algorithms.overlong import OverlongShaping
from roll_async.buffer.errors import first_cause
from roll_async.config.schema import GeneratingArguments, RLVRConfig
from roll_async.observe.outside import OutsideError
from roll_async.rollout.conversations import Conversations, NoScore, RewardOutage, ScoringOptions, Unscorable
from roll_async.rollout.filter_budget import BudgetOptions, FilterBudget, GeneratedTooMany
from roll_async.rollout.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate, GroupOutcome, SourceCounts
from roll_async.rollout.protocol import Scorer
from roll_async.rollout.requests import GenerationFailed, Interrupted
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.schema import Answered, FinishReason, Group, Prompt, Reward, Sample, SamplingParams, WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """The part of the config that the scheduler uses."""

    samples_per_group: int
    """N, the documents' n_resp_per_prompt."""
    sampling: SamplingParams
    filter: GroupFilter | None = None
    """None = every group is kept."""
    max_num_gen_batches: int = 0
    """<= 0 = no limit."""
    gen_batch_size: int | None = None
    """Groups in flight in a round; None = as many as the round wants."""
    scoring: ScoringOptions = ScoringOptions()
    greedy_baseline: bool = False
    """One greedy answer per prompt besides the samples (remax)."""
    spread_samples: bool = True
    """False: the samples of a group go to one replica (is_num_return_sequences_expand: false, or prefix caching)."""

    @classmethod
    def of(cls, config: RLVRConfig) -> SchedulerOptions:
        """How prompts become groups, as the config has it."""
        groups = config.algorithm.filter_groups
        return cls(
            samples_per_group=config.samples_per_group,
            sampling=sampling_of(config.actor_infer.generating_args),
            filter=GroupFilter.of(config, OverlongShaping.of(config)),
            max_num_gen_batches=groups.max_num_gen_batches,
            gen_batch_size=groups.gen_batch_size,
            scoring=ScoringOptions.of(config),
            greedy_baseline=config.algorithm.adv_estimator == "remax",
            spread_samples=config.is_num_return_sequences_expand,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """What a round produced. Every prompt is in exactly one place: `groups`, `surplus`, `leftovers`, `failed`, or
    filtered.
    """

    groups: tuple[Group, ...]
    surplus: tuple[Group, ...]
    """Kept beyond those asked for, because they finished together: no need to generate them again."""
    leftovers: tuple[int, ...]
    """Positions of prompts that were aborted or never started."""
    failed: tuple[tuple[int, str], ...]
    """(position, reason)"""
    statistics: dict[str, float] = field(default_factory=dict)
    """Groups `seen` = `kept` + `filtered` + `failed` + `requeued` (by a weight push); `surplus` of the kept; prompts
    `aborted` by the early stop, and `not_started`. A validation keeps every group that has all its scores, and filters
    the others.
    """


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Counts and groups of a round that is under way."""

    every_group: bool
    """Keep groups whatever the filter says (validation)."""
    kept: list[Group] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    requeued: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    fates: Counter[GroupFate] = field(default_factory=Counter)

    def add(self, index: int, outcome: GroupOutcome) -> None:
        """One group has ended."""
        returned = outcome.group is not None and (self.every_group or outcome.fate is GroupFate.KEPT)
        self.fates[GroupFate.KEPT if returned else outcome.fate] += 1
        if returned:
            assert outcome.group is not None
            self.kept.append(outcome.group)
        elif outcome.fate is GroupFate.FAILED:
            self.failed.append((index, outcome.reason))
        elif outcome.fate is GroupFate.REQUEUED:
            self.requeued.append(index)

    def result(self, num_groups: int, *, not_started: Sequence[int]) -> RolloutResult:
        """The round is over."""
        surplus = tuple(self.kept[num_groups:])
        counts = {
            "seen": self.fates.total(),
            **{fate.value: self.fates[fate] for fate in GroupFate},
            "surplus": len(surplus),
            "aborted": len(self.aborted),
            "not_started": len(not_started),
        }
        return RolloutResult(
            groups=tuple(self.kept[:num_groups]),
            surplus=surplus,
            leftovers=tuple(sorted([*self.requeued, *self.aborted, *not_started])),
            failed=tuple(self.failed),
            statistics={name: float(count) for name, count in counts.items()},
        )


class ChatCompletionScheduler:
    """The GroupSource of question-and-answer tasks, on the replicas of a manager. `tools`: a callback that runs the
    tools which a completion asks for.
    """

    def __init__(
        self,
        manager: AsyncLLMServerManager,
        scorer: Scorer,
        options: SchedulerOptions,
        *,
        tools: ToolCompletionCallback | None = None,
    ) -> None:
        self._manager, self._options = manager, options
        self.conversations = Conversations(manager, scorer, options.scoring, tools=tools)
        self._running: dict[int, list[str]] = {}  # samples by group id
        manager.scheduled_by(self)

    async def run_group(
        self, prompt: Prompt, *, group_id: int, attempt: int = 0, admitted_version: WeightVersion = 0
    ) -> GroupOutcome:
        """One group. Every path ends in an outcome; only cancellation and the loss of all replicas are raised."""
        loop, name = asyncio.get_running_loop(), f"{group_id}.{attempt}"
        admitted = loop.time()
        if prompt.answer_ids is not None:
            group = _supervised_group(prompt, name, group_id, admitted_version, admitted)
            return GroupOutcome(fate=GroupFate.KEPT, group=group)
        affinity = None if self._options.spread_samples else name
        ended: GroupOutcome | None = None
        generated_s = admitted

        def on_generated() -> None:
            nonlocal generated_s
            generated_s = loop.time()

        names = [f"{name}/{i}" for i in range(self._options.samples_per_group)]
        self._running[group_id] = [*names, f"{name}/greedy"]
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(
                        self.conversations.sample(
                            prompt, n, self._options.sampling, affinity, on_generated=on_generated
                        )
                    )
                    for n in names
                ]
                baseline = tasks.create_task(self._baseline(prompt, f"{name}/greedy", affinity, on_generated))
        except* Interrupted:
            ended = GroupOutcome(fate=GroupFate.REQUEUED, reason="interrupted by a weight push")
        except* Unscorable as errors:
            # Without all its scores the group has no statistics, as with a score that is not finite.
            ended = self._unscored(GroupFate.FILTERED, "dropped_invalid: ", prompt, errors)
        except* (GenerationFailed, OutsideError, RewardOutage, ValueError) as errors:
            ended = self._unscored(GroupFate.FAILED, "", prompt, errors)
        finally:
            del self._running[group_id]
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
            generated_s=generated_s,
            baseline_score=baseline.result(),
        )
        aborted = self._options.greedy_baseline and group.baseline_score is None
        if aborted or any(s.finish_reason is FinishReason.ABORT for s in group.samples):
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted", remains=group)
        return self._judge(group)

    def _unscored(self, fate: GroupFate, verdict: str, prompt: Prompt, errors: BaseExceptionGroup) -> GroupOutcome:
        """The outcome of a group whose samples do not all have a score."""
        cause = first_cause(errors)
        raised = isinstance(cause, NoScore) and cause.raised
        never = raised and prompt.domain not in self.conversations.scored
        return GroupOutcome(fate=fate, reason=f"{verdict}{cause}", raised=raised, never_scored=never)

    def _judge(self, group: Group) -> GroupOutcome:
        if self._options.filter is None or group.prompt.domain in self._options.scoring.unscored:
            return GroupOutcome(fate=GroupFate.KEPT, group=group)
        return self._options.filter.judge(group)

    async def _baseline(
        self, prompt: Prompt, name: str, affinity: str | None, on_generated: Callable[[], None]
    ) -> float | None:
        """Score of the greedy answer; None without one, or when it was aborted."""
        if not self._options.greedy_baseline:
            return None
        sample = await self.conversations.sample(
            prompt, name, _greedy(self._options.sampling), affinity, on_generated=on_generated
        )
        return sample.reward.score if sample.reward is not None else None

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Answered]:
        """One scored sample per prompt, without filter or early stop, in the foreground. Failed ones are left out,
        logged.
        """
        sample = self.conversations.sample
        work = [sample(p, f"{name}/{i}", sampling, foreground=True) for i, p in enumerate(prompts)]
        done = await asyncio.gather(*work, return_exceptions=True)
        answered: list[Answered] = []
        for prompt, result in zip(prompts, done, strict=True):
            if isinstance(result, Sample):
                answered.append((prompt, (result,)))
            elif isinstance(result, (GenerationFailed, NoScore, OutsideError, ValueError)):
                told = isinstance(result, NoScore) and result.raised
                logger.log(logging.INFO if told else logging.WARNING, "validation: %s", result)
            else:
                raise result
        return answered

    def counts(self) -> SourceCounts:
        """Counters since the start."""
        tools = self.conversations.tools
        box = None if tools is None else tools.toolbox
        return SourceCounts(
            reward_outages=self.conversations.reward_outages,
            reward_timeouts=self.conversations.reward_timeouts,
            reward_errors=self.conversations.reward_errors,
            tool_calls=0 if box is None else box.num_calls,
            tool_failures=0 if box is None else box.num_failures,
        )

    async def generate_sequences(
        self, prompts: Sequence[Prompt], num_groups: int, *, validation: bool = False, first_id: int = 0
    ) -> RolloutResult:
        """One round: generate until `num_groups` groups are kept, then stop early. With `validation` every prompt
        counts and none is aborted. However the round ends, none of its requests runs afterwards.

        Raises GeneratedTooMany, which carries the groups kept so far, when `max_num_gen_batches` batches did not
        suffice. An error of a group is raised in an ExceptionGroup: ConnectionError when no replica is left.
        """
        options = self._options
        width = len(prompts) if validation else (options.gen_batch_size or num_groups)
        budget = FilterBudget(
            BudgetOptions(
                groups_per_batch=num_groups, gen_batch_size=width, max_num_gen_batches=options.max_num_gen_batches
            )
        )
        tally = _Tally(every_group=validation)
        running: dict[asyncio.Task[GroupOutcome], int] = {}
        position = 0
        try:
            while (running or position < len(prompts)) and (validation or len(tally.kept) < num_groups):
                while len(running) < width and position < len(prompts):
                    task = asyncio.ensure_future(self.run_group(prompts[position], group_id=first_id + position))
                    running[task] = position
                    position += 1
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=running.__getitem__):
                    outcome = task.result()
                    tally.add(running.pop(task), outcome)
                    if not validation and outcome.fate in (GroupFate.KEPT, GroupFate.FILTERED):
                        budget.judged(kept=outcome.fate is GroupFate.KEPT)
        except GeneratedTooMany as error:
            await self._early_stop(running, tally, first_id)
            error.groups = tuple(tally.kept)
            raise
        finally:
            await self._early_stop(running, tally, first_id)
        return tally.result(len(prompts) if validation else num_groups, not_started=range(position, len(prompts)))

    async def abort_groups(self, group_ids: Iterable[int]) -> None:
        """End these groups as REQUEUED: collect the ids of their requests, wait until the servers acknowledge. A group
        that is being scored ends as it would have.
        """
        await self.conversations.abort(name for i in group_ids for name in self._running.get(i, ()))

    async def _early_stop(self, running: dict[asyncio.Task[GroupOutcome], int], tally: _Tally, first_id: int) -> None:
        """Abort what still runs: collect the request ids, wait until the servers acknowledge, then end the tasks.
        Groups that finished meanwhile count.
        """
        try:
            await self.abort_groups(first_id + index for index in running.values())
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            for task, index in running.items():
                ended = None if task.cancelled() or task.exception() is not None else task.result()
                if ended is None or ended.fate is GroupFate.REQUEUED:
                    tally.aborted.append(index)
                else:
                    tally.add(index, ended)
            running.clear()


def _supervised_group(prompt: Prompt, name: str, group_id: int, version: WeightVersion, now_s: float) -> Group:
    """The group of a supervised row: its answer, as if the newest weights had written it."""
    answer = prompt.answer_ids
    assert answer is not None
    sample = Sample(
        sample_id=f"{name}/given",
        prompt_token_ids=prompt.token_ids,
        response_token_ids=answer,
        loss_mask=b"\x01" * len(answer),
        behaviour_logprobs=array("f", bytes(4 * len(answer))),
        version_runs=((version, len(answer)),),
        finish_reason=FinishReason.STOP,
        generation_s=0.0,
        reward=Reward(score=0.0),
    )
    return Group(
        group_id=group_id,
        prompt=prompt,
        samples=(sample,),
        admitted_version=version,
        admitted_s=now_s,
        finished_s=now_s,
        baseline_score=0.0,
    )


def sampling_of(args: GeneratingArguments) -> SamplingParams:
    """How one request samples, as the config has it."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        stop_strings=tuple(args.stop_strings),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=0.0,
        stop_strings=sampling.stop_strings,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        stop_token_ids=sampling.stop_token_ids,
    )
