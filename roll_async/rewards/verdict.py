"""What every reward function returns, and the shape of the function itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One answer judged."""

    score: float
    acc: float
    """1 = right, 0 = wrong."""
    format: float = 1.0
    """1 = the answer was where it should be."""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Runs in a reward worker process. Deterministic; never evaluates the text as code."""

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict: ...
