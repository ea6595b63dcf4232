"""KL estimators (J. Schulman, "Approximating KL divergence"). Shape letters: B rows, T positions, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, clean, working_dtype
from roll_async.algorithms.policy_losses import clamp_log_ratio

PLAIN_ESTIMATORS = ("k1", "abs", "k2", "k3")
KL_ESTIMATORS = (*PLAIN_ESTIMATORS, *(f"{name}+" for name in PLAIN_ESTIMATORS))
_K3_LIMIT = 10.0


def kl_estimate(*, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    """[B,T] per token, 0 where masked. A `+` keeps the value and takes the gradient of k2, which is that of the true KL."""
    check_mask(mask_BT)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {estimator!r} is not one of {' | '.join(KL_ESTIMATORS)}")
    dtype = working_dtype(logprobs_BT, ref_logprobs_BT)
    d = clean(logprobs_BT, mask_BT, dtype) - clean(ref_logprobs_BT.detach(), mask_BT, dtype)
    value = _plain(d, estimator.removesuffix("+"))
    if estimator.endswith("+"):
        k2 = d * d / 2
        value = k2 + (value - k2).detach()
    return torch.where(mask_BT, value, 0)


def _plain(d: Tensor, name: str) -> Tensor:
    match name:
        case "k1":
            return d
        case "abs":
            return d.abs()
        case "k2":
            return d * d / 2
        case _:
            x = clamp_log_ratio(-d)
            return (torch.exp(x) - x - 1).clamp(-_K3_LIMIT, _K3_LIMIT)


class _FullKl(torch.autograd.Function):
    """sum_v p (log p - log q), chunk by chunk; saves references and [N] numbers only."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, ref_NV: Tensor, mask_N: Tensor, temperature: float, chunk: int) -> Tensor:  # noqa: ANN001
        dtype = working_dtype(logits_NV, ref_NV)
        out = torch.zeros(logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
        for start in range(0, logits_NV.shape[0], chunk):
            part = slice(start, start + chunk)
            log_p, log_q = _log_softmaxes(logits_NV[part], ref_NV[part], mask_N[part], temperature, dtype)
            out[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
        ctx.save_for_backward(logits_NV, ref_NV, mask_N, out)
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.where(mask_N, out, 0)

    @staticmethod
    def backward(ctx, grad_N: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        logits_NV, ref_NV, mask_N, out = ctx.saved_tensors
        grad = torch.zeros_like(logits_NV)
        for start in range(0, logits_NV.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p, log_q = _log_softmaxes(logits_NV[part], ref_NV[part], mask_N[part], ctx.temperature, out.dtype)
            slope = log_p.exp() * (log_p - log_q - out[part, None]) / ctx.temperature
            scale = torch.where(mask_N[part], grad_N[part], 0)[:, None]
            grad[part] = torch.where(mask_N[part, None], slope * scale, 0).to(grad.dtype)
        return grad, None, None, None, None


def _log_softmaxes(logits: Tensor, ref: Tensor, mask: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keep = mask[:, None]
    log_p = torch.log_softmax(torch.where(keep, logits, 0).to(dtype) / temperature, -1)
    return log_p, torch.log_softmax(torch.where(keep, ref, 0).to(dtype) / temperature, -1)


def full_kl(
    *, logits_BTV: Tensor, ref_logits_BTV: Tensor, mask_BT: Tensor, temperature: float = 1.0, chunk_tokens: int = 1024
) -> Tensor:
    """[B,T] exact KL of the two next-token distributions; gradient to `logits_BTV` only, memory of one chunk."""
    check_mask(mask_BT)
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be > 0")
    vocabulary = logits_BTV.shape[-1]
    flat = _FullKl.apply(
        logits_BTV.reshape(-1, vocabulary),
        ref_logits_BTV.detach().reshape(-1, vocabulary),
        mask_BT.reshape(-1),
        temperature,
        chunk_tokens,
    )
    return flat.view_as(mask_BT)


def kl_in_reward(
    *,
    token_rewards_BT: Tensor,
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """[B,T] rewards - coefficient * kl, detached. `logprobs` are the proximal ones, or the behaviour ones if there are none."""
    kl = kl_estimate(
        logprobs_BT=logprobs_BT.detach(), ref_logprobs_BT=ref_logprobs_BT, mask_BT=mask_BT, estimator=estimator
    )
    rewards = clean(token_rewards_BT.detach(), mask_BT, working_dtype(token_rewards_BT, kl))
    return torch.where(mask_BT, rewards - coefficient * kl, 0)


def update_kl_coefficient(
    *, coefficient: float, observed_kl: float, num_samples: int, target: float | None = None, horizon: int = 10000
) -> float:
    """Adaptive coefficient (Ziegler et al., arXiv 1909.08593, section 2.2); unchanged when `target` is None."""
    if not math.isfinite(observed_kl):
        raise ValueError(f"observed_kl {observed_kl} must be a finite number")
    if target is None:
        return coefficient
    if target <= 0:
        raise ValueError(f"target {target} must be > 0")
    error = min(0.2, max(-0.2, observed_kl / target - 1))
    return coefficient * (1 + error * num_samples / horizon)
