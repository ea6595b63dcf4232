"""The variance test of a group of values. Pure Python: the rollout applies it as soon as a group is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Its square, and the sum of many of them, is below float64's largest, 1.8e308.
_LARGEST = 1e150


def population_variance(values: Sequence[float]) -> float:
    """mean((x - mean)^2) in float64; NaN when a value is not finite (a scorer outage is not a wrong answer), or so
    large that its square is not.
    """
    # The comparison is False for NaN, too.
    if not values or not all(abs(v) < _LARGEST for v in values):
        return math.nan
    # fsum is exact up to one rounding: the order of the samples does not change the verdict.
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / len(values)


def group_verdict(values: Sequence[float], *, variance_threshold: float = 1e-8, singletons: str = "keep") -> str:
    """keep, dropped_equal, dropped_invalid or dropped_singleton.

    The variance is never compared with 0, because values of 0.1 that are all equal have a variance of 1e-34.
    """
    if not variance_threshold >= 0:
        raise ValueError(f"variance_threshold {variance_threshold} must be >= 0")
    if singletons not in ("keep", "drop"):
        raise ValueError(f"singletons {singletons!r} is not one of keep | drop")
    variance = population_variance(values)
    if math.isnan(variance):
        return "dropped_invalid"
    if len(values) == 1:
        return "keep" if singletons == "keep" else "dropped_singleton"
    return "keep" if variance > variance_threshold else "dropped_equal"
