"""Value loss. Shape letters: B rows, T positions."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, clean, working_dtype


def value_loss(
    *, values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """([B,T] per-token loss, metric sums): half the squared error.

    With `clip`: half the larger of it and the squared error of the value clamped to within `clip` of the old one, as in
    PPO.
    """
    check_mask(mask_BT)
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip {clip} must be null or >= 0")
    dtype = working_dtype(values_BT, old_values_BT, returns_BT)
    v = clean(values_BT, mask_BT, dtype)
    old, target = clean(old_values_BT.detach(), mask_BT, dtype), clean(returns_BT.detach(), mask_BT, dtype)
    error = (v - target) ** 2
    clipped = torch.zeros_like(mask_BT)
    if clip is not None:
        step = v - old
        # Inside the clip the value itself, not old + (v - old): rounding would count it as clipped.
        held = (torch.where(step.abs() <= clip, v, old + step.clamp(-clip, clip)) - target) ** 2
        clipped = mask_BT & (held.detach() > error.detach())
        error = torch.maximum(error, held)
    metrics = {"value/mean": v.detach().sum(), "value/clipped": clipped.to(dtype).sum()}
    return torch.where(mask_BT, error / 2, 0), metrics
