"""Counters of trajectory outcomes, by tag."""

from __future__ import annotations

from collections import Counter

from roll_async.agents.protocol import Ending
from roll_async.agents.trace_tree import TraceTree
from roll_async.schema import Outcome


class AgentCounts:
    """Counters since the start, without validation."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Counter[Outcome]] = {}
        self._branches: Counter[str] = Counter()
        self._turns = self._retries = 0
        self.unforeseen = 0
        """Attempts that ended in an error which none of the parts expects."""

    def ended(self, tag: str, ending: Ending, tree: TraceTree) -> None:
        """Count the end of an attempt of a trajectory."""
        self._outcomes.setdefault(tag, Counter())[ending.outcome] += 1
        self._branches.update(tree.branches)
        self._turns += len(tree.turns)

    def retried(self) -> None:
        """Count a further attempt, in a new world."""
        self._retries += 1

    def metrics(self) -> dict[str, float]:
        """`agent/outcomes/NAME`: share of all attempts that ended so, with several tags also `agent/TAG/outcomes/NAME`;
        `agent/branches/REASON`: how many.
        """
        total: Counter[Outcome] = Counter()
        found: dict[str, float] = {}
        for tag, outcomes in self._outcomes.items():
            total.update(outcomes)
            if len(self._outcomes) > 1:
                found |= _shares(f"agent/{tag}", outcomes)
        attempts = total.total()
        return {
            **_shares("agent", total),
            **found,
            **{f"agent/branches/{reason}": float(count) for reason, count in sorted(self._branches.items())},
            "agent/attempts": float(attempts),
            "agent/retries": float(self._retries),
            "agent/unforeseen_errors": float(self.unforeseen),
            "agent/turns_mean": self._turns / max(1, attempts),
        }


def _shares(prefix: str, outcomes: Counter[Outcome]) -> dict[str, float]:
    return {f"{prefix}/outcomes/{o.value}": outcomes[o] / max(1, outcomes.total()) for o in Outcome}
