"""KL estimators (J. Schulman, "Approximating KL divergence"). Shape letters: B rows, T positions, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll_async.algorithms.logprobs import scaled_chunk, token_chunks
from roll_async.algorithms.masked import check_mask, clean, working_dtype
from roll_async.algorithms.policy_losses import clamp_log_ratio

PLAIN_ESTIMATORS = ("k1", "abs", "k2", "k3")
KL_ESTIMATORS = (*PLAIN_ESTIMATORS, *(f"{name}+" for name in PLAIN_ESTIMATORS))
_K3_LIMIT = 10.0


def kl_estimate(*, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, estimator: str) -> Tensor:
    """[B,T] per token, 0 where masked. A `+` keeps the value and takes the gradient of k2, that of the true KL."""
    check_mask(mask_BT)
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {estimator!r} is not one of {' | '.join(KL_ESTIMATORS)}")
    dtype = working_dtype(logprobs_BT, ref_logprobs_BT)
    d = clean(logprobs_BT, mask_BT, dtype) - clean(ref_logprobs_BT.detach(), mask_BT, dtype)
    value = _plain(d, estimator.removesuffix("+"))
    if estimator.endswith("+"):
        k2 = d * d / 2
        value = value.detach() + (k2 - k2.detach())
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
    """sum_v p (log p - log q), chunk by chunk; saves references and [B,T] numbers. At most 3 chunks are alive."""

    @staticmethod
    def forward(ctx, logits: Tensor, ref: Tensor, mask: Tensor, temperature: float, chunk_tokens: int) -> Tensor:  # noqa: ANN001
        out = torch.zeros(mask.shape, dtype=working_dtype(logits, ref), device=logits.device)
        for part in token_chunks(mask.shape, chunk_tokens):
            log_p, log_ratio = _log_ratio(logits[part], ref[part], mask[part], temperature, out.dtype)
            out[part] = log_p.exp_().mul_(log_ratio).sum(-1)
        ctx.save_for_backward(logits, ref, mask, out)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return torch.where(mask, out, 0)

    @staticmethod
    def backward(ctx, grad_BT: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        logits, ref, mask, out = ctx.saved_tensors
        grad = torch.empty_like(logits)
        scale = torch.where(mask, grad_BT, 0) / ctx.temperature
        for part in token_chunks(mask.shape, ctx.chunk_tokens):
            log_p, log_ratio = _log_ratio(logits[part], ref[part], mask[part], ctx.temperature, out.dtype)
            # d KL / d z_v = p_v (log p_v - log q_v - KL).
            log_ratio.sub_(out[part].unsqueeze(-1)).mul_(scale[part].unsqueeze(-1))
            grad[part] = log_p.exp_().mul_(log_ratio)
        return grad, None, None, None, None


def _log_ratio(
    logits: Tensor, ref: Tensor, mask: Tensor, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fresh (log p, log p - log q) of one chunk; where masked both are those of equal logits, so the second is 0."""
    log_p, log_q = scaled_chunk(logits, mask, temperature, dtype), scaled_chunk(ref, mask, temperature, dtype)
    for z in (log_p, log_q):
        z.sub_(torch.logsumexp(z, -1, keepdim=True))  # in place, which log_softmax is not
    # Into the memory of log_q: a third chunk less.
    return log_p, torch.sub(log_p, log_q, out=log_q)


def full_kl(
    *, logits_BTV: Tensor, ref_logits_BTV: Tensor, mask_BT: Tensor, temperature: float = 1.0, chunk_tokens: int = 1024
) -> Tensor:
    """[B,T] exact KL of the two next-token distributions; gradient to `logits_BTV` only, memory of one chunk."""
    check_mask(mask_BT)
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be >= 1")
    return _FullKl.apply(logits_BTV, ref_logits_BTV.detach(), mask_BT, temperature, chunk_tokens)


def kl_in_reward(
    *,
    token_rewards_BT: Tensor,
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """[B,T] rewards - coefficient * kl, detached. `logprobs`: proximal, or behaviour if there are none."""
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
    if not target > 0:
        raise ValueError(f"target {target} must be > 0")
    error = min(0.2, max(-0.2, observed_kl / target - 1))
    return coefficient * (1 + error * num_samples / horizon)
