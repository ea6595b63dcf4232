"""Shaping of scores before the estimator, and masks of rows and tokens that are left out of the loss. Shape letters: B
rows, T positions. No gradients.

Order: raw score -> shift_scale_rewards -> overlong_penalty added -> normalise_rewards -> clamp -> advantages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, working_dtype

NORM_TYPES = ("none", "batch", "group", "running")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMoments:
    """Exact pooled moments of all scores seen (Chan et al. 1979); one per domain, checkpointed by the caller."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared deviations from the mean."""

    def merged(self, *, scores_B: Tensor, row_mask_B: Tensor | None = None) -> RunningMoments:
        """These moments and the scores of the counted rows."""
        # float64: these moments are pooled over a whole run.
        scores = scores_B.double() if row_mask_B is None else scores_B.double()[row_mask_B]
        added = scores.numel()
        if not added:
            return self
        mean = float(scores.mean())
        m2 = float(((scores - mean) ** 2).sum())
        count, delta = self.count + added, mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + delta * added / count,
            m2=self.m2 + m2 + delta * delta * self.count * added / count,
        )

    @property
    def std(self) -> float | None:
        """Unbiased; None with fewer than 2 scores or no spread."""
        return None if self.count < 2 or self.m2 == 0 else math.sqrt(self.m2 / (self.count - 1))


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per row, the statistics of its group over counted rows; [B]."""

    count: Tensor
    mean: Tensor
    std: Tensor  # unbiased, 0 where undefined
    equal: Tensor  # bool: all members have the same value, single members included


def group_statistics(values_B: Tensor, group_index_B: Tensor, counted_B: Tensor) -> GroupStatistics:
    """Statistics over rows that share a group index, whatever the values and order of the indices."""
    _, group = torch.unique(group_index_B, return_inverse=True)
    size = int(group.max()) + 1 if group.numel() else 0
    zeros = torch.zeros(size, dtype=values_B.dtype, device=values_B.device)
    x = torch.where(counted_B, values_B, 0)
    count = zeros.scatter_add(0, group, counted_B.to(values_B.dtype))
    mean = zeros.scatter_add(0, group, x) / count.clamp(min=1)
    # Two passes: the mean square minus the squared mean would cancel where the spread is small.
    centred = torch.where(counted_B, values_B - mean[group], 0)
    std = torch.sqrt(zeros.scatter_add(0, group, centred * centred) / (count - 1).clamp(min=1))
    highest = torch.full_like(zeros, -torch.inf).scatter_reduce(
        0, group, torch.where(counted_B, values_B, -torch.inf), "amax"
    )
    lowest = torch.full_like(zeros, torch.inf).scatter_reduce(
        0, group, torch.where(counted_B, values_B, torch.inf), "amin"
    )
    # <=: without a counted row it is -inf <= inf.
    return GroupStatistics(count=count[group], mean=mean[group], std=std[group], equal=(highest <= lowest)[group])


def normalise_rewards(
    *,
    scores_B: Tensor,
    group_index_B: Tensor,
    mean: str,
    std: str,
    running: RunningMoments | None = None,
    row_mask_B: Tensor | None = None,
    values_B: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:
    """[B] (x - m) / (s + epsilon); excluded rows 0. `values_B`: put these on the scale of the scores, whose m and s
    they get, instead of the scores themselves.

    No division where s is undefined or 0; rows that are all equal minus their mean give exactly 0. Raises ValueError
    for an unknown choice and for running without moments.
    """
    for name, value in (("mean", mean), ("std", std)):
        if value not in NORM_TYPES:
            raise ValueError(f"{name} {value!r} is not one of {' | '.join(NORM_TYPES)}")
        if value == "running" and running is None:
            raise ValueError(f"{name} running needs running moments")
    dtype = working_dtype(scores_B)
    counted = torch.ones_like(scores_B, dtype=torch.bool) if row_mask_B is None else row_mask_B
    x = torch.where(counted, scores_B.detach().to(dtype), 0)
    one_group = torch.zeros_like(group_index_B)
    applied = x if values_B is None else torch.where(counted, values_B.detach().to(dtype), 0)
    result = applied
    if mean == "running":
        assert running is not None
        result = applied - running.mean
    elif mean != "none":
        stats = group_statistics(x, group_index_B if mean == "group" else one_group, counted)
        exact = stats.equal & (applied == x)  # equal scores minus their mean are exactly 0, without rounding errors
        result = torch.where(exact, 0, applied - stats.mean)
    if std == "running":
        assert running is not None
        if running.std is not None:
            result = result / (running.std + epsilon)
    elif std != "none":
        stats = group_statistics(x, group_index_B if std == "group" else one_group, counted)
        # The spread of equal values may be a rounding error instead of 0.
        usable = (stats.count >= 2) & (stats.std > 0) & ~stats.equal
        result = torch.where(usable, result / (stats.std + epsilon), result)
    return torch.where(counted, result, 0)


def shift_scale_rewards(*, scores_B: Tensor, shift: float = 0.0, scale: float = 1.0) -> Tensor:
    """[B] (x + shift) * scale."""
    return (scores_B.detach().to(working_dtype(scores_B)) + shift) * scale


def role_baselines(
    *, scores_B: Tensor, role_index_B: Tensor, averages_R: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """([B] baseline of each row, [R] averages after the batch): b = decay b + (1 - decay) R, row after row, as SPIRAL
    does (arXiv 2506.24119, role-conditioned advantage estimation); a row's own score is in its baseline.

    Worked example: scores `1 0 1` of one role, average 0, decay 0.5: baselines `0.5 0.25 0.625`.
    """
    averages, baselines = averages_R.double().tolist(), []
    for role, score in zip(role_index_B.tolist(), scores_B.double().tolist(), strict=True):
        averages[role] = decay * averages[role] + (1 - decay) * score
        baselines.append(averages[role])
    return torch.tensor(baselines, dtype=torch.float64), torch.tensor(averages, dtype=torch.float64)


def overlong_penalty(
    *, lengths_B: Tensor, max_length: int, buffer_length: int, factor: float = 1.0, clamp: bool = True
) -> Tensor:
    """[B] soft overlong punishment (DAPO, arXiv 2503.14476): 0 down to -factor over the last buffer_length tokens.

    `lengths_B`: generated tokens with the end-of-sequence token, without tool and observation tokens. clamp=False goes
    on beyond -factor for longer responses.
    """
    if buffer_length <= 0 or buffer_length > max_length:
        raise ValueError(f"buffer_length {buffer_length} must be in [1, max_length {max_length}]")
    if factor < 0:
        raise ValueError(f"factor {factor} must be >= 0")
    excess = (lengths_B.to(working_dtype(lengths_B)) - (max_length - buffer_length)) / buffer_length
    return -factor * excess.clamp(0, 1 if clamp else None)


def max_length_keep(*, lengths_B: Tensor, max_length: int) -> Tensor:
    """[B] bool: rows shorter than the limit, where only lengths are known; `TrainBatch.cut` says how one ended."""
    return lengths_B < max_length


def difficulty_keep(
    *, scores_B: Tensor, group_index_B: Tensor, low: float = 0.0, high: float = 1.0, row_mask_B: Tensor | None = None
) -> Tensor:
    """[B] bool: the group's mean score lies strictly between low and high."""
    counted = torch.ones_like(scores_B, dtype=torch.bool) if row_mask_B is None else row_mask_B
    x = torch.where(counted, scores_B.detach().to(working_dtype(scores_B)), 0)
    mean = group_statistics(x, group_index_B, counted).mean
    return counted & (mean > low) & (mean < high)


def staleness_keep(
    *, version_lag_BT: Tensor, mask_BT: Tensor, max_lag: int, level: Literal["token", "sequence"]
) -> Tensor:
    """[B,T] bool, within the mask: tokens (or whole rows) whose lag in versions is at most max_lag."""
    check_mask(mask_BT)
    if level == "token":
        return mask_BT & (version_lag_BT <= max_lag)
    if level != "sequence":
        raise ValueError(f"level {level!r} is not one of token | sequence")
    too_old = (mask_BT & (version_lag_BT > max_lag)).any(-1, keepdim=True)
    return mask_BT & ~too_old
