"""What the loops need from the parts that are not plain asyncio: the learner, the checkpoint, the observer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

from roll_async.schema import Group
from roll_async.trainer.protocol import StepReport


class Learns(Protocol):
    """`trainer/learner.py`, or a fake on the virtual clock."""

    async def learn(self, groups: Sequence[Group], step: int) -> StepReport: ...


class Saves(Protocol):
    """Checkpoint of the whole loop at the end of a step."""

    async def save(self, step: int) -> None: ...


class Observes(Protocol):
    """Where metrics go."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One training step's metrics, see design.md section 10."""

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """Something that took time, in seconds of the loop."""

    def event(self, name: str, **fields: float | str) -> None:
        """Something worth a line in the log: a validation, a weight push, a stop."""


class RunEnd(Enum):
    """Why a run ended without an error."""

    FINISHED = "finished"  # max_steps done
    END_OF_DATA = "end of data"
    INTERRUPTED = "interrupted"  # stop asked for; state saved
