"""What becomes of a prompt: a group, or why there is none, and the counters of what makes groups (`groups.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from roll_async.schema import Group


class GroupFate(Enum):
    """What became of a group."""

    KEPT = "kept"
    FILTERED = "filtered"  # no reward variance: its gradient would be zero
    FAILED = "failed"  # quarantined with its reason
    REQUEUED = "requeued"  # interrupted: the same prompt is generated again later


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutcome:
    """A group, or why there is none."""

    fate: GroupFate
    group: Group | None = None
    """With KEPT, and with FILTERED unless a sample has no score."""
    reason: str = ""
    verdict: str = ""
    """Of the filter (`algorithms/group_variance.py`); `dropped_invalid` also where a sample has no score."""
    raised: bool = False
    """The code of its reward raised, so it has no scores; which line it was has been told."""
    never_scored: bool = False
    """It raised, and no sample of the domain has had a score since the start."""
    remains: Group | None = None
    """The samples that an aborted group had, not a whole group: for the length audit alone."""
    is_scored: bool = True
    """False: its domain feeds another part of the loss, and its rewards are zeros that say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """Counters of a source since its start."""

    reward_outages: int = 0
    """Attempts to score that gave no score because the scorer did not work."""
    reward_timeouts: int = 0
    """Attempts that gave no score because scoring took too long."""
    reward_errors: int = 0
    """Attempts that gave no score because the reward raised."""
    tool_calls: int = 0
    tool_failures: int = 0
    """Tool calls that ended in an error, which the model then read."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of this source, by key; published unchanged."""
    ratios: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Two counters each, (part, whole), by the key of their ratio (`pipelines/metrics.py: ratio_metrics`)."""
