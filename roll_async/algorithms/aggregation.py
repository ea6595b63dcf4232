"""From per-token losses to one number, with denominators that do not depend on the micro-batch split.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, clean, working_dtype

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """Counts of the whole batch of one optimizer step: all micro-batches, all data-parallel ranks."""

    global_tokens: int
    """Valid tokens."""
    global_sequences: int
    """Rows with at least one valid token."""
    normalizer_length: int
    """Constant (response budget), >= 1."""

    def __post_init__(self) -> None:
        if self.global_tokens < 0 or self.global_sequences < 0 or self.normalizer_length < 1:
            raise ValueError(f"{self}: counts must be >= 0 and normalizer_length >= 1")


def count_denominators(*, mask_BT: Tensor, normalizer_length: int) -> Denominators:
    """Counts of these rows. Count after sample masks and before correction, so that a rejected token counts."""
    check_mask(mask_BT)
    return Denominators(
        global_tokens=int(mask_BT.sum()),
        global_sequences=int(mask_BT.any(-1).sum()),
        normalizer_length=normalizer_length,
    )


def sum_denominators(*, parts: Sequence[Denominators]) -> Denominators:
    """Counts of several parts together. Raises ValueError for no parts or differing normalizer_length."""
    lengths = {p.normalizer_length for p in parts}
    if len(lengths) != 1:
        raise ValueError(f"normalizer_length of the parts: {sorted(lengths)}; expected one common value")
    return Denominators(
        global_tokens=sum(p.global_tokens for p in parts),
        global_sequences=sum(p.global_sequences for p in parts),
        normalizer_length=lengths.pop(),
    )


def aggregate(
    *,
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str = "token-mean",
    denominators: Denominators,
    weights_BT: Tensor | None = None,
) -> Tensor:
    """[] the share of these rows in the loss of the whole batch: partial aggregates of any split add up to the whole.

    `weights_BT` are constants; a weight of exactly 0 drops the token from the numerator (its loss may be NaN) and keeps
    it in the row's own length. Raises ValueError for an unknown mode.
    """
    check_mask(mask_BT)
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {mode!r} is not one of {' | '.join(AGGREGATION_MODES)}")
    dtype = working_dtype(loss_BT, weights_BT)
    count = denominators.global_tokens if mode in ("token-mean", "token-sum") else denominators.global_sequences
    used = mask_BT if count else torch.zeros_like(mask_BT)
    if weights_BT is not None:
        weights = clean(weights_BT.detach(), mask_BT, dtype)
        used = used & (weights != 0)
    x = clean(loss_BT, used, dtype)
    if weights_BT is not None:
        x = x * weights
    if mode in ("token-mean", "token-sum"):
        return x.sum() / (max(1, count) if mode == "token-mean" else 1)
    rows = x.sum(-1)
    if mode == "seq-mean-token-mean":
        rows = rows / mask_BT.sum(-1).clamp(min=1).to(dtype)
    total = rows.sum() / max(1, count)
    return total / denominators.normalizer_length if mode == "seq-mean-token-sum-norm" else total


def merge_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches and ranks as one: `_max`/`_min` keys by max/min, others summed. Reads the tensors: call
    it after the step.
    """
    merged: dict[str, float] = {}
    for part in parts:
        for key, tensor in part.items():
            value = float(tensor)
            if key.endswith("_max"):
                merged[key] = max(merged.get(key, -math.inf), value)
            elif key.endswith("_min"):
                merged[key] = min(merged.get(key, math.inf), value)
            else:
                merged[key] = merged.get(key, 0.0) + value
    return merged


def reduce_metrics(
    *,
    parts: Sequence[Mapping[str, Tensor]],
    denominators: Denominators,
    others: Mapping[str, Denominators] | None = None,
) -> dict[str, float]:
    """The merged metrics of a loss, sums per token. `others`: counts for keys that begin with `NAME/`. An extreme that
    is still infinite (nothing was valid) is left out.
    """
    result = {}
    for key, value in merge_metrics(parts).items():
        tokens = (others or {}).get(key.partition("/")[0], denominators).global_tokens
        if key.endswith(("_max", "_min")):
            if math.isfinite(value):
                result[key] = value
        else:
            result[key] = value / tokens if tokens else 0.0
    return result
