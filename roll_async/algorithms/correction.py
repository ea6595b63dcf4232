"""Train/engine correction: importance weights, bands and rejections for rho = pi_train / pi_rollout.

Shape letters: B rows, T positions. All bounds are bounds on rho, never on 1 / rho. TIS: weight_level token, upper 2.
IcePop (arXiv 2510.18855): token, band 0.5-5, no upper. MIS: sequence with a band. Recipes are in
docs_roll/algorithms/correction.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, clean, working_dtype
from roll_async.algorithms.policy_losses import clamp_log_ratio, segment_sums
from roll_async.config.options.correction_options import CorrectionOptions, RejectionRule, carries_behaviour_policy
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS, PolicyLossOptions

# Of 0 to 7 versions, and one for all above.
_NUM_LAG_BUCKETS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Result of `correct`."""

    weights: Tensor  # [B,T] detached, 0 where not kept
    keep: Tensor  # [B,T] bool
    sums: dict[str, Tensor]


def correct(
    *,
    train_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    options: CorrectionOptions,
    segment_ids_BT: Tensor | None = None,
    version_lag_BT: Tensor | None = None,
) -> Correction:
    """Weights and keep mask per token; constants. Raises ValueError for weight_level segment without segments."""
    check_mask(mask_BT)
    dtype = working_dtype(train_logprobs_BT, rollout_logprobs_BT)
    train, rollout = (
        clean(train_logprobs_BT.detach(), mask_BT, dtype),
        clean(rollout_logprobs_BT.detach(), mask_BT, dtype),
    )
    d = clamp_log_ratio(train - rollout)
    ratio = _level_ratio(d, mask_BT, options.weight_level, segment_ids_BT)
    inside = mask_BT
    if options.band_low is not None:
        inside = inside & (ratio >= options.band_low)
    if options.band_high is not None:
        inside = inside & (ratio <= options.band_high)
    passing = mask_BT
    for rule in options.rejections:
        # Over all tokens: what the band masks still counts in the statistic of its row.
        passing = passing & _passes(rule, d, mask_BT)
    keep = inside & passing
    if options.weight_level == "none":
        weights = keep.to(dtype)
        high = low = torch.zeros_like(mask_BT)
    else:
        high = (
            mask_BT & (ratio > options.weight_upper) if options.weight_upper is not None else torch.zeros_like(mask_BT)
        )
        low = (
            mask_BT & (ratio < options.weight_lower) if options.weight_lower is not None else torch.zeros_like(mask_BT)
        )
        bounded = ratio
        if options.weight_lower is not None or options.weight_upper is not None:  # clamp refuses no bound at all
            bounded = ratio.clamp(options.weight_lower, options.weight_upper)
        weights = torch.where(keep, bounded, 0)
    weights = _normalised(weights, keep, options.normalise)
    flags = {"band_masked": mask_BT & ~inside, "rejected": mask_BT & ~passing, "clipped_high": high, "clipped_low": low}
    return Correction(weights=weights, keep=keep, sums=_sums(d, mask_BT, keep, weights, flags, version_lag_BT))


def _level_ratio(d: Tensor, mask: Tensor, level: str, segment_ids: Tensor | None) -> Tensor:
    if level in ("none", "token"):
        return torch.exp(d)
    if level == "segment":
        if segment_ids is None:
            raise ValueError("weight_level segment needs segment_ids_BT")
        sums, counts = segment_sums(d, segment_ids, mask)
        return torch.exp(sums / counts.clamp(min=1))
    total = d.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.exp(clamp_log_ratio(total)).expand_as(d)


def _passes(rule: RejectionRule, d: Tensor, mask: Tensor) -> Tensor:
    """[B,T] tokens that the rule accepts."""
    low, high = rule.low, rule.high
    match rule.statistic:
        case "k1":
            value = d
            # The rule bounds rho, and this statistic is log rho.
            low, high = (None if b is None else math.log(b) for b in (low, high))
        case "k2":
            value = d * d / 2
        case _:
            value = torch.exp(d) - 1 - d
    if rule.aggregation in ("sequence_sum", "sequence_mean"):
        value = torch.where(mask, value, 0).sum(-1, keepdim=True)
        if rule.aggregation == "sequence_mean":
            value = value / mask.sum(-1, keepdim=True).clamp(min=1)
    passes = torch.ones_like(value, dtype=torch.bool)
    if low is not None:
        passes = passes & (value >= low)
    if high is not None:
        passes = passes & (value <= high)
    if rule.aggregation == "sequence_max":
        # One token outside rejects its row; a masked one cannot.
        passes = (passes | ~mask).all(-1, keepdim=True)
    return passes.expand_as(d)


def _normalised(weights: Tensor, keep: Tensor, mode: str) -> Tensor:
    if mode == "none":
        return weights
    kept = keep.sum()
    if mode == "token":
        mean = weights.sum() / kept.clamp(min=1)
    else:
        per_row = keep.sum(-1)
        rows = per_row > 0
        mean = (weights.sum(-1) / per_row.clamp(min=1)).sum() / rows.sum().clamp(min=1)
    return torch.where((kept > 0) & (mean > 0), weights / torch.where(mean > 0, mean, 1), weights)


def _sums(
    d: Tensor, mask: Tensor, keep: Tensor, weights: Tensor, flags: Mapping[str, Tensor], lag: Tensor | None
) -> dict[str, Tensor]:
    # Sums, not means: those of micro-batches are added before `correction_metrics` divides.
    rho = torch.where(mask, torch.exp(d), 0)
    rows = mask.any(-1)
    row_sum = torch.where(mask, d, 0).sum(-1)
    sums = {
        "num_tokens": mask.sum(),
        "num_sequences": rows.sum(),
        "num_kept": keep.sum(),
        "num_kept_sequences": keep.any(-1).sum(),
        **{f"num_{name}": flag.sum() for name, flag in flags.items()},
        "rho": rho.sum(),
        "log_rho": row_sum.sum(),
        "k3": torch.where(mask, torch.exp(d) - 1 - d, 0).sum(),
        "rho_squared": (rho * rho).sum(),
        "sequence_rho_squared": torch.where(rows, torch.exp(clamp_log_ratio(2 * row_sum)), 0).sum(),
        "weight": weights.sum(),
        "weight_squared": (weights * weights).sum(),
        "rho_max": torch.where(mask, rho, -torch.inf).amax() if mask.numel() else rho.new_tensor(-torch.inf),
        "rho_min": torch.where(mask, rho, torch.inf).amin() if mask.numel() else rho.new_tensor(torch.inf),
    }
    if lag is not None:
        capped = lag.clamp(max=_NUM_LAG_BUCKETS - 1)
        for k in range(_NUM_LAG_BUCKETS):
            bucket = mask & (capped == k)
            sums[f"lag_{k}/num_tokens"] = bucket.sum()
            sums[f"lag_{k}/abs_log_rho"] = torch.where(bucket, d.abs(), 0).sum()
    return {f"correction/{key}": value.detach() for key, value in sums.items()}


def correction_metrics(*, sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Sums of one or many micro-batches (max and min already merged) to the published metrics."""
    s = {key.removeprefix("correction/"): float(value) for key, value in sums.items()}
    tokens, rows = s["num_tokens"], s["num_sequences"]

    def per(value: float, count: float) -> float:
        return value / count if count else 0.0

    metrics = {
        "num_tokens": tokens,
        "kl": per(-s["log_rho"], tokens),
        "k3": per(s["k3"], tokens),
        # The chi-square divergence is E[rho^2] - 1, with the expectation over what the engine sampled.
        "chi2_token": per(s["rho_squared"], tokens) - (1 if tokens else 0),
        "chi2_sequence": per(s["sequence_rho_squared"], rows) - (1 if rows else 0),
        # Effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2).
        "ess": per(s["weight"] ** 2, tokens * s["weight_squared"]),
        "rho_mean": per(s["rho"], tokens),
        "rho_max": s["rho_max"] if tokens else 0.0,
        "rho_min": s["rho_min"] if tokens else 0.0,
        "weight_mean": per(s["weight"], tokens),
        "clipped_high_fraction": per(s["num_clipped_high"], tokens),
        "clipped_low_fraction": per(s["num_clipped_low"], tokens),
        "band_masked_fraction": per(s["num_band_masked"], tokens),
        "rejected_fraction": per(s["num_rejected"], tokens),
        "kept_fraction": per(s["num_kept"], tokens),
        "kept_sequence_fraction": per(s["num_kept_sequences"], rows),
        "all_rejected": float(tokens > 0 and s["num_kept"] == 0),
    }
    for k in range(_NUM_LAG_BUCKETS):
        count = s.get(f"lag_{k}/num_tokens", 0.0)
        if count:
            metrics[f"lag_{k}/abs_log_rho"] = s[f"lag_{k}/abs_log_rho"] / count
            metrics[f"lag_{k}/token_fraction"] = count / tokens
    return {f"correction/{key}": value for key, value in metrics.items()}


def interpolate_proximal(
    *, logprobs_BT: Tensor, behaviour_logprobs_BT: Tensor, version_lag_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """[B,T] proximal log-probs without a forward pass (A-3PO, arXiv 2512.06547), detached.

    behaviour / lag + (1 - 1 / lag) current; the current ones where the lag is 0. The lag is the token's staleness in
    training steps. Raises ValueError for a negative lag at a valid token.
    """
    check_mask(mask_BT)
    dtype = working_dtype(logprobs_BT, behaviour_logprobs_BT)
    lag = torch.where(mask_BT, version_lag_BT, 0)
    # A tensor on the meta device has no values to look at.
    if not lag.is_meta and bool((lag < 0).any()):
        raise ValueError("version_lag_BT holds a negative lag at a valid token: a token cannot come from the future")
    alpha = torch.where(lag > 0, 1 / lag.clamp(min=1).to(dtype), 0)
    current, behaviour = (
        clean(logprobs_BT.detach(), mask_BT, dtype),
        clean(behaviour_logprobs_BT.detach(), mask_BT, dtype),
    )
    return alpha * behaviour + (1 - alpha) * current


def check_no_double_correction(*, loss_name: str, ratio_base: str, weight_level: str) -> None:
    """Raise ValueError when the loss already carries the behaviour policy and the correction would weight it again."""
    if loss_name not in POLICY_LOSS_OPTIONS:
        raise ValueError(f"loss_name {loss_name!r} is not one of {' | '.join(POLICY_LOSS_OPTIONS)}")
    # The constructors raise ValueError for an unknown name.
    CorrectionOptions(weight_level=weight_level)  # type: ignore[arg-type]
    PolicyLossOptions(ratio_base=ratio_base)  # type: ignore[arg-type]
    if weight_level != "none" and carries_behaviour_policy(loss_name, ratio_base):
        raise ValueError(
            f"correction.weight_level {weight_level!r} would correct twice: {loss_name} with ratio_base {ratio_base} "
            "already carries the behaviour policy; set it to none"
        )
