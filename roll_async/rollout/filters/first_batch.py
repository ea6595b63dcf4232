"""Whether the code of a reward works at all: decided with the first batch, while nothing is trained yet."""

from __future__ import annotations

from collections import Counter

from roll_async.buffer.errors import RaisesAlways
from roll_async.rollout.group_source import GroupFate, GroupOutcome


class FirstBatch:
    """Ends a run whose reward raises for every sample of the first G groups.

    Example: G = 8, two of the first eight groups are of domain math and failed, because its reward raised, and no
    sample of math has a score. The run ends when all eight have ended: one row may be at fault, two are the code.
    """

    def __init__(self, groups_per_batch: int) -> None:
        self._size = groups_per_batch
        self._open: set[int] = set()
        self._ended = 0
        self._raised: Counter[str] = Counter()

    def started(self, group_id: int) -> None:
        """A group is being generated."""
        if self._ended + len(self._open) < self._size:
            self._open.add(group_id)

    def ended(self, group_id: int, domain: str, outcome: GroupOutcome) -> None:
        """It has ended. Raises RaisesAlways."""
        if group_id in self._open:
            self._open.discard(group_id)
            self._ended += outcome.fate is not GroupFate.REQUEUED  # a requeued one gives its place to a later group
        self._raised[domain] += outcome.raised
        num = self._raised[domain]
        if outcome.never_scored and self._ended == self._size and num >= min(2, self._size):
            raise RaisesAlways(
                f"the reward of domain {domain} raised for every sample of its first {num} groups ({outcome.reason}); "
                "its line is in the warning above, the traceback in run.log"
            )
