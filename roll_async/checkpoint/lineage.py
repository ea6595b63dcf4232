"""Which checkpoints are a run's own, which of them is newest, and which may go. Never the highest number of a folder.

A folder may hold checkpoints of several runs, and of a branch that its run has left by going back to an earlier step.
The rules here are pure; `RunCheckpoints` applies them to folders, the simulator to its store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A complete checkpoint as the rules see it."""

    step: int
    run_id: str | None
    """The run that wrote it; None = one of a version without run ids, which is nobody's own."""


def own_steps(saved: Iterable[Saved], run_id: str | None) -> list[int]:
    """Steps of the checkpoints of a run, ascending."""
    return sorted(one.step for one in saved if one.run_id == run_id)


def newest(saved: Iterable[Saved], run_id: str | None) -> int | None:
    """Step that `latest` means."""
    return max(own_steps(saved, run_id), default=None)


def left_behind(saved: Iterable[Saved], run_id: str | None, step: int) -> list[int]:
    """Steps that a run leaves when it goes back to `step`: its own later ones. They are set aside, not deleted."""
    return [later for later in own_steps(saved, run_id) if later > step]


def beyond(saved: Iterable[Saved], run_id: str | None, keep: int) -> list[int]:
    """Steps to delete so that a run has `keep` checkpoints; 0 = all are kept. What was just written is the newest of
    its run, because later ones are set aside before, and never among them.
    """
    return own_steps(saved, run_id)[:-keep] if keep else []
