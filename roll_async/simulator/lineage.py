"""Checkpoints on a simulated disk, and invariant 22: a run has one lineage.

The store applies the rules of `checkpoint/lineage.py`; `Lineage` keeps its own books of who wrote what, which no rule
sees, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from roll_async.checkpoint.lineage import Saved, beyond, left_behind, newest, own_steps


# By identity: two processes may save one step, and a position has no hash.
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept(Saved):
    """A checkpoint, and what no rule sees of it."""

    position: Mapping[str, object]
    life: int
    """Number of the process that wrote it: of two with one step, only one is of the run's lineage."""


class CheckpointStore:
    """A folder of checkpoints, which survives a kill: the rules of `checkpoint/lineage.py` over records, as
    `RunCheckpoints` applies them to folders.
    """

    def __init__(self, keep: int = 0) -> None:
        """`keep`: `checkpoint.max_to_keep`."""
        self.keep, self.run_id, self.life = keep, "run 0", 0
        self.there: dict[int, Kept] = {}
        """By step, because a folder has one name of each."""
        self.aside: list[Kept] = []

    def next_life(self) -> CheckpointStore:
        """What the next process finds. Coroutines of this one may still end."""
        after = copy(self)
        after.there, after.aside, after.life = dict(self.there), list(self.aside), self.life + 1
        return after

    def begin_run(self) -> None:
        """The next process is of another run, whose checkpoints have the same folder."""
        self.run_id = f"run {self.life}"

    def position_of(self, step: int) -> Mapping[str, object] | None:
        """Position in the prompts; None for a step without a checkpoint."""
        return self.there[step].position if step in self.there else None

    def steps(self) -> list[int]:
        """Of the run, ascending."""
        return own_steps(self.there.values(), self.run_id)

    def latest(self) -> int:
        """Step that `resume_from=latest` means; 0 = there is none."""
        return newest(self.there.values(), self.run_id) or 0

    def go_back(self, step: int) -> None:
        """The run goes on after this step."""
        self._set_aside(left_behind(self.there.values(), self.run_id, step))

    def commit(self, step: int, position: Mapping[str, object]) -> None:
        """A checkpoint is complete."""
        self._set_aside([*([step] if step in self.there else []), *left_behind(self.there.values(), self.run_id, step)])
        self.there[step] = Kept(step=step, run_id=self.run_id, position=position, life=self.life)
        self.prune()

    def prune(self) -> None:
        """Delete the oldest of the run."""
        for step in beyond(self.there.values(), self.run_id, self.keep):
            del self.there[step]

    def _set_aside(self, steps: Sequence[int]) -> None:
        self.aside += [self.there.pop(step) for step in steps]


class Lineage:
    """What the checkpoints of the present run must be, through all its processes."""

    def __init__(self, report: Callable[[int, str], None], keep: int) -> None:
        self._report, self._keep = report, keep
        self._own: dict[int, int] = {}
        """Step of each checkpoint that was not pruned, to the process that wrote it."""
        self._foreign: frozenset[Kept] = frozenset()
        """Checkpoints of other runs in the same folder."""
        self.pruned_until = 0
        """The ledger may have lost the samples that were trained until this step: it was saved."""

    def begin(self, store: CheckpointStore, start: str) -> int:
        """Step after which the next process goes on, to which the store goes back (`Scenario.starts`)."""
        step, self.pruned_until = 0, max(self._own, default=0)
        if start == "fresh":
            store.begin_run()
            self._own, self._foreign = {}, frozenset(store.there.values())
        else:
            step, steps = store.latest(), store.steps()
            if step != self.pruned_until:
                self._report(22, f"latest is step {step}, the newest of the lineage is {self.pruned_until}")
            if start == "back" and steps:
                step = steps[len(steps) // 2]
            store.go_back(step)
            self._own = {own: life for own, life in self._own.items() if own <= step}
        self._check(store)
        return step

    def saved(self, store: CheckpointStore, step: int) -> None:
        """A checkpoint is complete, and old ones are pruned."""
        self._own[step] = store.life
        self._own = dict(sorted(self._own.items())[-self._keep :])  # keep 0 keeps all: [-0:] is the whole list
        self._check(store)

    def _check(self, store: CheckpointStore) -> None:
        """The folder holds the checkpoints of the lineage and no other of this run; those of others are kept."""
        there = {kept.step: kept.life for kept in store.there.values() if kept.run_id == store.run_id}
        if there != self._own:
            self._report(22, f"{store.run_id} has checkpoints (step: process) {there}, its lineage is {self._own}")
        if lost := self._foreign - {*store.there.values(), *store.aside}:
            self._report(22, f"checkpoints of other runs are gone: {sorted((k.run_id or '', k.step) for k in lost)}")
