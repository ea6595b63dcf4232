"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without variance have a zero gradient.

Shape letter: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from roll_async.algorithms.group_variance import group_verdict

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilterResult:
    """The rows to train, and counts of kept and dropped groups."""

    keep_B: Tensor  # [B] bool
    counters: dict[str, int]


def filter_groups(
    *,
    values_B: Tensor,
    group_index_B: Tensor,
    variance_threshold: float = 1e-8,
    singletons: Literal["keep", "drop"] = "keep",
) -> GroupFilterResult:
    """Keep a group iff the variance (population) of its metric exceeds the threshold and every value is finite."""
    keep = torch.zeros_like(group_index_B, dtype=torch.bool)
    counters: dict[str, int] = dict.fromkeys(
        ("seen", "kept", "dropped_equal", "dropped_invalid", "dropped_singleton", "singletons"), 0
    )
    for index in torch.unique(group_index_B).tolist():
        rows = group_index_B == index
        values = values_B[rows].double().tolist()
        verdict = group_verdict(values, variance_threshold=variance_threshold, singletons=singletons)
        counters["seen"] += 1
        counters["singletons"] += len(values) == 1
        counters["kept" if verdict == "keep" else verdict] += 1
        if verdict == "keep":
            keep |= rows
    return GroupFilterResult(keep_B=keep, counters={f"groups/{name}": n for name, n in counters.items()})


def take_batch(*, carried_groups: Sequence[T], new_groups: Sequence[T], num_groups: int) -> tuple[list[T], list[T]]:
    """(batch, leftovers): carried groups first, order kept; too few groups give ([], all of them)."""
    groups = [*carried_groups, *new_groups]
    return (groups[:num_groups], groups[num_groups:]) if len(groups) >= num_groups else ([], groups)
