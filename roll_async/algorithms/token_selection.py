"""Token selections that need the statistics of the whole batch: run once per optimizer step, before micro-batching.

Shape letters: B rows, T positions. All inputs are constants; results are bool [B,T], False where masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, clean, working_dtype
from roll_async.algorithms.policy_losses import clamp_log_ratio
from roll_async.config.options.policy_loss_options import ClipCovOptions, KlCovOptions, M2poOptions


def _covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[B,T] (A - mean A)(logprob - mean logprob) over valid tokens; 0 where masked."""
    dtype = working_dtype(logprobs, advantages)
    count = mask.sum().clamp(min=1).to(dtype)
    a, lp = clean(advantages.detach(), mask, dtype), clean(logprobs.detach(), mask, dtype)
    return torch.where(mask, (a - a.sum() / count) * (lp - lp.sum() / count), 0)


def _budget(cov_ratio: float, mask: Tensor) -> int:
    return max(1, int(cov_ratio * int(mask.sum())))


def _pick(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates of smallest score; ties go to the lower row-major position."""
    # All others sort behind every candidate.
    keyed = torch.where(candidates, scores, torch.inf).flatten()
    chosen = torch.argsort(keyed, stable=True)[: min(count, int(candidates.sum()))]
    picked = torch.zeros_like(keyed, dtype=torch.bool)
    picked[chosen] = True
    return picked.view_as(candidates) & candidates


def select_clip_cov(
    *,
    logprobs_BT: Tensor,
    base_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    random_keys_BT: Tensor,
    options: ClipCovOptions,
) -> Tensor:
    """Tokens whose loss is switched off: covariance in (cov_low, cov_high), not clipped, smallest random keys first."""
    check_mask(mask_BT)
    if not bool(mask_BT.any()):
        return torch.zeros_like(mask_BT)
    cov = _covariance(logprobs_BT, advantages_BT, mask_BT)
    dtype = cov.dtype
    delta = clean(logprobs_BT.detach(), mask_BT, dtype) - clean(base_logprobs_BT.detach(), mask_BT, dtype)
    ratio, a = torch.exp(clamp_log_ratio(delta)), clean(advantages_BT.detach(), mask_BT, dtype)
    clipped = ((a > 0) & (ratio > 1 + options.clip_high)) | ((a < 0) & (ratio < 1 - options.clip_low))
    candidates = mask_BT & (cov > options.cov_low) & (cov < options.cov_high) & ~clipped
    return _pick(random_keys_BT, candidates, _budget(options.cov_ratio, mask_BT))


def select_kl_cov(*, logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, options: KlCovOptions) -> Tensor:
    """Tokens that get the KL penalty: the k valid tokens of largest covariance."""
    check_mask(mask_BT)
    if not bool(mask_BT.any()):
        return torch.zeros_like(mask_BT)
    return _pick(-_covariance(logprobs_BT, advantages_BT, mask_BT), mask_BT, _budget(options.cov_ratio, mask_BT))


def select_m2po(*, logprobs_BT: Tensor, base_logprobs_BT: Tensor, mask_BT: Tensor, options: M2poOptions) -> Tensor:
    """Tokens kept: the longest prefix, by ascending squared log ratio, whose mean stays within m2_threshold."""
    check_mask(mask_BT)
    dtype = working_dtype(logprobs_BT, base_logprobs_BT)
    delta = clean(logprobs_BT.detach(), mask_BT, dtype) - clean(base_logprobs_BT.detach(), mask_BT, dtype)
    count = int(mask_BT.sum())
    squared = torch.where(mask_BT, delta * delta, torch.inf).flatten()
    order = torch.argsort(squared, stable=True)[:count]
    # float64: a running sum over all tokens of a batch.
    running = squared[order].double().cumsum(0) / torch.arange(1, count + 1, device=squared.device)
    within = (running <= options.m2_threshold).nonzero()
    keep = torch.zeros_like(squared, dtype=torch.bool)
    if len(within):
        # The mean of ascending numbers ascends, so the last one within the bound ends the prefix.
        keep[order[: int(within[-1]) + 1]] = True
    return keep.view_as(mask_BT)
