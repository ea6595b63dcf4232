"""One DAPO round (arXiv 2503.14476) over many prompts, for programs of your own: a run takes its groups through the
queue.

prompts --run_group, `width` at a time--> kept | filtered | failed | requeued --enough--> early stop
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll_async.rollout.filters.filter_budget import BudgetOptions, FilterBudget, GeneratedTooMany
from roll_async.rollout.group_source import GroupFate, GroupOutcome
from roll_async.rollout.groups import GroupRunner
from roll_async.schema import Group, Prompt


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


async def generate_round(
    groups: GroupRunner,
    prompts: Sequence[Prompt],
    budget: BudgetOptions,
    *,
    validation: bool = False,
    first_id: int = 0,
) -> RolloutResult:
    """Generate until `groups_per_batch` groups are kept, then stop early. With `validation` every prompt counts and
    none is aborted. However the round ends, none of its requests runs afterwards.

    Raises GeneratedTooMany, which carries the groups kept so far, when `max_num_gen_batches` batches did not suffice.
    An error of a group is raised in an ExceptionGroup: ConnectionError when no replica is left.
    """
    num_groups = budget.groups_per_batch
    width = len(prompts) if validation else budget.gen_batch_size
    judged = FilterBudget(budget)
    tally = _Tally(every_group=validation)
    running: dict[asyncio.Task[GroupOutcome], int] = {}
    position = 0
    try:
        while (running or position < len(prompts)) and (validation or len(tally.kept) < num_groups):
            while len(running) < width and position < len(prompts):
                task = asyncio.ensure_future(groups.run_group(prompts[position], group_id=first_id + position))
                running[task] = position
                position += 1
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # `done` is a set: its order would differ from run to run.
            for task in sorted(done, key=running.__getitem__):
                outcome = task.result()
                tally.add(running.pop(task), outcome)
                if not validation and outcome.fate in (GroupFate.KEPT, GroupFate.FILTERED):
                    judged.judged(kept=outcome.fate is GroupFate.KEPT)
    except GeneratedTooMany as error:
        # Here, too: what it still keeps belongs to the error's groups.
        await _early_stop(groups, running, tally, first_id)
        error.groups = tuple(tally.kept)
        raise
    finally:
        await _early_stop(groups, running, tally, first_id)
    return tally.result(len(prompts) if validation else num_groups, not_started=range(position, len(prompts)))


async def _early_stop(
    groups: GroupRunner, running: dict[asyncio.Task[GroupOutcome], int], tally: _Tally, first_id: int
) -> None:
    """Abort what still runs: collect the request ids, wait until the servers acknowledge, then end the tasks. Groups
    that finished meanwhile count.
    """
    try:
        await groups.abort_groups(first_id + index for index in running.values())
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
