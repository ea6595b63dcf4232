"""Counters of trajectory outcomes, by tag."""

from __future__ import annotations

from collections import Counter

from roll_async.agents.protocol import Ending
from roll_async.rollout.trace_tree import TraceTree
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
        """How many since the start; `agent/branches/REASON`: of branches."""
        return {
            **{f"agent/branches/{reason}": float(count) for reason, count in sorted(self._branches.items())},
            "agent/attempts": float(self._total.total()),
            "agent/retries": float(self._retries),
            "agent/unforeseen_errors": float(self.unforeseen),
        }

    def ratios(self) -> dict[str, tuple[float, float]]:
        """`agent/outcomes/NAME`: (attempts that ended so, attempts), with several tags also `agent/TAG/outcomes/NAME`;
        `agent/turns_mean`: (turns, attempts).
        """
        total = self._total
        parts = {"agent": total}
        if len(self._outcomes) > 1:
            parts |= {f"agent/{tag}": outcomes for tag, outcomes in self._outcomes.items()}
        return {
            "agent/turns_mean": (float(self._turns), float(total.total())),
            **{
                f"{prefix}/outcomes/{o.value}": (float(outcomes[o]), float(outcomes.total()))
                for prefix, outcomes in parts.items()
                for o in Outcome
            },
        }

    @property
    def _total(self) -> Counter[Outcome]:
        total: Counter[Outcome] = Counter()
        for outcomes in self._outcomes.values():
            total.update(outcomes)
        return total
