"""Groups: N trajectories of one prompt, run side by side, judged as a whole.

    Rollouter --slot, prompt--> GroupRunner.run_group --GroupOutcome--> Rollouter --> queue.put | queue.release
                                   |  N + redundancy times
                                   +--> TrajectoryRunner.run --> Trajectory | Ended

An answer to a question is a trajectory of one path (`rollout/answers.py`), one in a world is a tree
(`agents/worlds.py`): they differ in `run`. A group runner decides nothing about admission, staleness or versions.

consumes: a prompt   waits for: its trajectories   unblocked by: their ends, `abort_groups`, cancellation
produces: an outcome on every path; only cancellation, the loss of all replicas and bugs are raised
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate, GroupOutcome, SourceCounts
from roll_async.schema import (
    Answered,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Reward,
    Sample,
    SamplingParams,
    WeightVersion,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 10.0


class EndReason(Enum):
    """Why a trajectory has no reward. It is never a reward of 0."""

    FAILED = "failed"  # request, reward, world or agent failed for a reason outside the policy, retries used up
    UNSCORABLE = "unscorable"  # scoring exceeded its limits; asking again would end alike
    INTERRUPTED = "interrupted"  # a weight push with interrupt.mode abort discarded the whole answer
    ABORTED = "aborted"  # early stop or the end of the run: it says nothing about the prompt


FATES: Mapping[EndReason, GroupFate] = {
    # A group is what the first of these reasons says that one of its trajectories ended for: a prompt that fails would
    # fail again if it were requeued. Of worlds an abort comes before FAILED (`GroupRunner._judged`).
    EndReason.FAILED: GroupFate.FAILED,
    EndReason.UNSCORABLE: GroupFate.FILTERED,
    EndReason.INTERRUPTED: GroupFate.REQUEUED,
    EndReason.ABORTED: GroupFate.REQUEUED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A trajectory that may be trained."""

    rows: tuple[Sample, ...]
    """At least one, oldest first, all with the trajectory's reward."""
    generated_s: float | None = None
    """Loop time of the last token; None where no score was waited for."""
    is_scored: bool = True
    """False: its domain feeds another part of the loss, and the reward is a 0 that says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A trajectory that gives nothing to train."""

    reason: EndReason
    text: str
    rows: tuple[Sample, ...] = ()
    """Of an aborted answer: what was sampled, for the length audit alone."""
    can_retry: bool = False
    """In a fresh world. Never after a failed reward: answers would be selected by whether they can be scored."""
    raised: bool = False
    """The code of its reward raised; which line it was has been told."""
    never_scored: bool = False
    """It raised, and no sample of the domain has had a score since the start."""


class OpenTrajectory(Protocol):
    """What an abort must reach: an answer under way, or the session of a world. One that is being scored is not."""

    open_requests: set[str]

    def stop(self, outcome: Outcome, reason: str) -> None:
        """Refuse further turns; running ones continue."""


@dataclass(eq=False, slots=True)
class GroupScope:
    """A running group, as its trajectories see it."""

    open: set[OpenTrajectory] = field(default_factory=set)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    aborted: bool = False
    """A trajectory that waited for the slot of a world looks at it before it begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRequest:
    """One trajectory of a group or of a validation."""

    name: str
    """Its requests begin with it. `7.0/3`; a further attempt in a fresh world is `7.0/3~1`, the greedy answer
    `7.0/greedy`.
    """
    prompt: Prompt
    sampling: SamplingParams | None
    """None = as the world's tag has it."""
    scope: GroupScope
    affinity: str | None = None
    """Requests with the same key go to one replica."""
    validation: bool = False
    """Of a validation, whose requests run also while training is set aside."""


class TrajectoryRunner(Protocol):
    """One kind of task."""

    @property
    def cancels_on_abort(self) -> bool:
        """True for worlds: a step that hangs would delay the abort. False for answers: one that is being scored ends as
        it would have, and the lengths of the others are counted.
        """
        ...

    async def run(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """Raises ConnectionError when no replica is left."""
        ...

    def counts(self, num_retries: int) -> SourceCounts:
        """Counters since the start. `num_retries`: further attempts of trajectories, which the group runner makes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """How prompts become groups."""

    samples_per_group: int
    """N, the documents' n_resp_per_prompt; group_size of worlds."""
    sampling: SamplingParams | None
    """None = as the tag of each world has it."""
    filter: GroupFilter | None = None
    """None = every group is kept."""
    redundancy: int = 0
    """More trajectories than N, of which the first N that end well are kept."""
    retries: int = 0
    """Further attempts of a trajectory whose world failed (`fault.sample_retries`); answers have none."""
    greedy_baseline: bool = False
    """One greedy answer per prompt besides the samples (remax)."""
    spread_samples: bool = True
    """False: the samples of a group go to one replica (is_num_return_sequences_expand: false, or prefix caching)."""


class _NotWhole(Exception):
    """Too many trajectories have ended badly: the task group cancels the others."""


class GroupRunner:
    """Runs groups of one kind of task on the replicas of a manager."""

    def __init__(self, runner: TrajectoryRunner, manager: EnginePool | None, options: GroupOptions) -> None:
        """`manager`: of the replicas that the runner asks; None = it asks an address, by validations alone."""
        self.runner, self._manager, self._options = runner, manager, options
        self._running: dict[int, GroupScope] = {}
        self._num_retries = 0

    async def run_group(
        self, prompt: Prompt, *, group_id: int, attempt: int = 0, admitted_version: WeightVersion = 0
    ) -> GroupOutcome:
        """One whole group. Names of requests begin with `GROUP_ID.ATTEMPT`, so that a late reply of an earlier attempt
        is recognized.
        """
        loop, name = asyncio.get_running_loop(), f"{group_id}.{attempt}"
        empty = Group(
            group_id=group_id,
            prompt=prompt,
            samples=(),
            admitted_version=admitted_version,
            admitted_s=loop.time(),
            finished_s=loop.time(),
        )
        if prompt.answer_ids is not None:
            # A supervised row answers itself: one sample, which no filter judges.
            group = replace(empty, samples=(_supervised(prompt, name, admitted_version),), baseline_score=0.0)
            return GroupOutcome(fate=GroupFate.KEPT, group=group, is_scored=False)
        affinity = None if self._options.spread_samples else name
        scope = self._running[group_id] = GroupScope()
        try:
            ends = await self._run_all(self._requests(prompt, name, scope, affinity), scope)
        finally:
            del self._running[group_id]
            if affinity is not None and self._manager is not None:
                self._manager.forget_affinity(affinity)
        return self._judged(ends, name, scope, empty)

    def _requests(self, prompt: Prompt, name: str, scope: GroupScope, affinity: str | None) -> list[TrajectoryRequest]:
        options = self._options
        requests = [
            TrajectoryRequest(
                name=f"{name}/{i}", prompt=prompt, sampling=options.sampling, scope=scope, affinity=affinity
            )
            for i in range(options.samples_per_group + options.redundancy)
        ]
        if options.greedy_baseline:
            assert options.sampling is not None
            requests.append(replace(requests[0], name=f"{name}/greedy", sampling=_greedy(options.sampling)))
        return requests

    async def _run_all(self, requests: Sequence[TrajectoryRequest], scope: GroupScope) -> dict[str, Trajectory | Ended]:
        """Ends by name, in their order. Trajectories that run when the group is decided are cancelled and left out:
        when this returns or raises, none of them runs.
        """
        ends: dict[str, Trajectory | Ended] = {}

        async def run(request: TrajectoryRequest) -> None:
            ends[request.name] = await self._with_retries(request)
            if self._num_bad(ends) > self._options.redundancy and not self.runner.cancels_on_abort:
                raise _NotWhole

        try:
            async with asyncio.TaskGroup() as tasks:
                scope.tasks = [tasks.create_task(run(request), name=request.name) for request in requests]
                if self.runner.cancels_on_abort:
                    return await self._first(scope.tasks, ends)
        except* _NotWhole:
            pass
        return ends

    async def _first(
        self, tasks: Sequence[asyncio.Task[None]], ends: Mapping[str, Trajectory | Ended]
    ) -> dict[str, Trajectory | Ended]:
        """The ends of worlds until there are N good ones, or too many bad ones; of those that end together, in the
        order of their names.
        """
        options, aborted = self._options, Ended(reason=EndReason.ABORTED, text="aborted")
        first: dict[str, Trajectory | Ended] = {}
        pending, num_good = set(tasks), 0
        try:
            while pending and num_good < options.samples_per_group and self._num_bad(first) <= options.redundancy:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # A task that an abort cancelled has left no end.
                first |= {t.get_name(): ends.get(t.get_name(), aborted) for t in tasks if t in done}
                num_good = sum(isinstance(end, Trajectory) for end in first.values())
            return first
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _num_bad(self, ends: Mapping[str, Trajectory | Ended]) -> int:
        """Those that cannot become part of the group. An aborted answer decides nothing: the lengths of the others are
        counted.
        """
        waits = None if self.runner.cancels_on_abort else EndReason.ABORTED
        return sum(isinstance(end, Ended) and end.reason is not waits for end in ends.values())

    async def _with_retries(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """Its end; while its world fails, in further attempts, each in a fresh world and with a name of its own."""
        pause_s, attempt, this = _FIRST_RETRY_S, 0, request
        while True:
            end = await self.runner.run(this)
            if isinstance(end, Trajectory) or not end.can_retry:
                return end
            logger.warning("trajectory %s: %s", this.name, end.text)
            if attempt == self._options.retries:
                return end
            attempt += 1
            self._num_retries += 1
            await asyncio.sleep(pause_s)
            pause_s, this = min(_LONGEST_RETRY_S, 2 * pause_s), replace(request, name=f"{request.name}~{attempt}")

    def _judged(
        self, ends: Mapping[str, Trajectory | Ended], name: str, scope: GroupScope, empty: Group
    ) -> GroupOutcome:
        options, worlds = self._options, self.runner.cancels_on_abort
        baseline = ends.get(f"{name}/greedy")
        samples = {key: end for key, end in ends.items() if end is not baseline}
        # With redundancy more than N may have ended well.
        kept = [end for end in samples.values() if isinstance(end, Trajectory)][: options.samples_per_group]
        bad = [end for end in ends.values() if isinstance(end, Ended)]
        # The greedy answer counts: the group waits for its last token, too.
        times = [t for end in ends.values() if isinstance(end, Trajectory) and (t := end.generated_s) is not None]
        empty = replace(empty, finished_s=asyncio.get_running_loop().time(), generated_s=max(times, default=None))
        is_whole = len(kept) == options.samples_per_group
        if worlds and (scope.aborted or not is_whole and any(end.reason is EndReason.ABORTED for end in bad)):
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted")
        if is_whole and not isinstance(baseline, Ended):
            if not worlds:  # answers in the order of their names; worlds in that of their ends
                kept = [end for _, end in sorted(samples.items(), key=_number) if isinstance(end, Trajectory)]
            reward = None if baseline is None else baseline.rows[0].reward
            score = None if reward is None else reward.score
            return self._judge(replace(empty, samples=_rows(kept), baseline_score=score), kept)
        reason = next(reason for reason in FATES if any(end.reason is reason for end in bad))
        causes = [end for end in bad if end.reason is reason]
        if reason is EndReason.ABORTED:
            ordered = [end for _, end in sorted(samples.items(), key=_number)]
            return GroupOutcome(fate=FATES[reason], reason="aborted", remains=replace(empty, samples=_rows(ordered)))
        if worlds:
            text = f"{len(kept)} of {options.samples_per_group} trajectories ended with trust; {causes[-1].text}"
            return GroupOutcome(fate=FATES[reason], reason=text)
        cause = causes[0]
        # Without all its scores the group has no statistics, as with a score that is not finite.
        verdict = "dropped_invalid" if reason is EndReason.UNSCORABLE else ""
        return GroupOutcome(
            fate=FATES[reason],
            reason=f"{verdict}: {cause.text}" if verdict else cause.text,
            verdict=verdict,
            raised=cause.raised,
            never_scored=cause.never_scored,
        )

    def _judge(self, group: Group, kept: Sequence[Trajectory]) -> GroupOutcome:
        scored = all(end.is_scored for end in kept)
        if self._options.filter is None or not scored:
            return GroupOutcome(fate=GroupFate.KEPT, group=group, is_scored=scored)
        return self._options.filter.judge(group)

    async def abort_groups(self, group_ids: Iterable[int]) -> None:
        """End these groups as REQUEUED; none of their requests runs any more when this returns. Unknown ids are
        ignored. An answer that is being scored ends as it would have.
        """
        scopes = [self._running[i] for i in group_ids if i in self._running]
        for scope in scopes:
            scope.aborted = True  # before anything is awaited: what waits for a slot must not begin
            for trajectory in scope.open:
                # First: an abort reaches running requests, not a next turn.
                trajectory.stop(Outcome.CANCELLED, "aborted")
        assert self._manager is not None, "an address is asked by validations alone"
        await self._manager.abort([i for s in scopes for trajectory in s.open for i in trajectory.open_requests])
        if self.runner.cancels_on_abort:
            for task in (task for scope in scopes for task in scope.tasks):
                task.cancel()

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Answered]:
        """One trajectory per prompt, without filter or early stop; its requests are those of a validation. Failed ones
        are left out, logged. An aborted answer has no score.
        """
        scope = GroupScope()
        asked = [
            TrajectoryRequest(name=f"{name}/{i}", prompt=p, sampling=sampling, scope=scope, validation=True)
            for i, p in enumerate(prompts)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._with_retries(request)) for request in asked]
        ends = [task.result() for task in running]
        for end in ends:
            # Of those that can be retried `_with_retries` has told.
            if isinstance(end, Ended) and end.reason is not EndReason.ABORTED and not end.can_retry:
                logger.log(logging.INFO if end.raised else logging.WARNING, "validation: %s", end.text)
        return [(prompt, end.rows) for prompt, end in zip(prompts, ends, strict=True) if end.rows]

    def counts(self) -> SourceCounts:
        """Counters since the start."""
        return self.runner.counts(self._num_retries)


def _rows(ends: Iterable[Trajectory | Ended]) -> tuple[Sample, ...]:
    return tuple(row for end in ends for row in end.rows)


def _number(named: tuple[str, object]) -> int:
    return int(named[0].rpartition("/")[2])  # as text 10 would come before 2


def _supervised(prompt: Prompt, name: str, version: WeightVersion) -> Sample:
    """The sample of a supervised row: its answer, as if the newest weights had written it."""
    answer = prompt.answer_ids
    assert answer is not None
    return Sample(
        sample_id=f"{name}/given",
        prompt_token_ids=prompt.token_ids,
        response_token_ids=answer,
        loss_mask=b"\x01" * len(answer),
        behaviour_logprobs=array("f", bytes(4 * len(answer))),  # zeros, 4 bytes each
        version_runs=((version, len(answer)),),
        finish_reason=FinishReason.STOP,
        generation_s=0.0,
        reward=Reward(score=0.0),
    )


def _greedy(sampling: SamplingParams) -> SamplingParams:
    # Without truncation and penalty, which would change the greedy answer; it ends where the samples end.
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=0.0,
        stop_strings=sampling.stop_strings,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        stop_token_ids=sampling.stop_token_ids,
    )
