"""The stream of tasks: which world, which seed, by position. The ledger accounts by position, so nothing else is kept.

Worked example: tags A and B with a partition of 3 and 1, run seed 42: positions 0-3 are A A A B, positions 4-7 again;
each position has its own seed, which all trajectories of its group share. Validation has seeds of its own.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from roll_async.agents.protocol import Task
from roll_async.schema import Prompt

_SEEDS = 1 << 30


class Tasks:
    """`rollout/protocol.py: PromptSource`. Without end."""

    def __init__(self, tags: Sequence[str], partition: Sequence[int], *, seed: int, validation: bool = False) -> None:
        self._pattern = [tag for tag, count in zip(tags, partition, strict=True) for _ in range(count)]
        assert self._pattern, "no groups"
        self._seed, self._validation = seed, validation

    def at(self, index: int) -> Prompt:
        """The task at this position, as a prompt without tokens: the world gives the first observation."""
        tag = self._pattern[index % len(self._pattern)]
        # Not hash(), which differs between processes. Validation's range is another: its tasks are not trained.
        seed = zlib.crc32(f"{self._seed}/{index}".encode()) % _SEEDS + (_SEEDS if self._validation else 0)
        return Prompt(
            row_id=f"{tag}/{seed}",
            token_ids=array("i"),
            domain=tag,
            ground_truth="",
            extra={"seed": str(seed), "validation": "1" if self._validation else ""},
        )


def task_of(prompt: Prompt) -> Task:
    """Inverse of what `Tasks.at` wrote."""
    return Task(tag=prompt.domain, seed=int(prompt.extra["seed"]), validation=bool(prompt.extra["validation"]))
