"""The protocol of what turns a prompt into a group: pipelines differ in it alone.

    Rollouter --prompt--> GroupSource.run_group --GroupOutcome--> Rollouter

`ChatCompletionScheduler` is the source of question-and-answer tasks (RLVR), `agents/groups.py` that of environments. A
source decides nothing about admission, staleness or versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from roll_async.schema import Answered, Group, Prompt, SamplingParams, WeightVersion


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


class GroupSource(Protocol):
    """Generates and scores the samples of one prompt at a time, any number of prompts concurrently."""

    async def run_group(
        self, prompt: Prompt, *, group_id: int, attempt: int = 0, admitted_version: WeightVersion = 0
    ) -> GroupOutcome:
        """One whole group. Every path ends in an outcome; only cancellation and the loss of all replicas are raised.
        Names of requests begin with `GROUP_ID.ATTEMPT`, so that a late reply of an earlier attempt is recognized.
        """
        ...

    async def abort_groups(self, group_ids: Iterable[int]) -> None:
        """End these groups as REQUEUED; returns when no request of them runs any more. Unknown ids are ignored."""

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Answered]:
        """One scored answer per prompt, in the foreground. Failed ones are left out."""
        ...

    def counts(self) -> SourceCounts:
        """Counters since the start."""
        ...
