"""Log-probs of given tokens from logits, one chunk of the vocabulary matrix at a time.

Shape letters: B rows, T positions, N = B*T flattened tokens, V vocabulary, P vocabulary shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """float32 (float64 for float64 logits); 0 where masked."""

    logprobs: Tensor  # [B,T]
    entropy: Tensor | None  # [B,T]


@dataclass(frozen=True, slots=True)
class _Sampling:
    temperature: float
    top_k: int
    top_p: float
    chunk: int
    with_entropy: bool

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def _scaled(logits_NV: Tensor, mask_N: Tensor | None, sampling: _Sampling, dtype: torch.dtype) -> Tensor:
    """[n,V] a fresh chunk of logits / temperature, in `dtype`, 0 where masked."""
    z = logits_NV.to(dtype, copy=True)
    if mask_N is not None:
        z.masked_fill_(~mask_N[:, None], 0)
    return z.div_(sampling.temperature) if sampling.temperature != 1 else z


def _kept(z: Tensor, tokens_N: Tensor, sampling: _Sampling) -> Tensor:
    """[n,V] bool: what top-k, then top-p leave, and always the sampled token."""
    vocabulary = z.shape[-1]
    keep = torch.ones_like(z, dtype=torch.bool)
    if 0 < sampling.top_k < vocabulary:
        keep = z >= z.topk(sampling.top_k, dim=-1).values[:, -1:]
    if sampling.top_p < 1:
        probs = torch.softmax(z.masked_fill(~keep, -torch.inf), -1)
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1).sub_(ordered)
        keep = keep & torch.zeros_like(keep).scatter(-1, order, before < sampling.top_p)
    return keep.scatter(-1, tokens_N[:, None], True)


class _TokenLogprobs(torch.autograd.Function):
    """Forward saves the inputs by reference and O(N) numbers; backward recomputes chunk by chunk into one gradient buffer."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, tokens_N: Tensor, mask_N: Tensor | None, sampling: _Sampling) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        count = logits_NV.shape[0]
        logprobs, entropy, log_z, full_log_z = (torch.zeros(count, dtype=dtype, device=logits_NV.device) for _ in range(4))
        for start in range(0, count, sampling.chunk):
            part = slice(start, min(start + sampling.chunk, count))
            mask = None if mask_N is None else mask_N[part]
            tokens = tokens_N[part]
            z = _scaled(logits_NV[part], mask, sampling, dtype)
            target = z.gather(-1, tokens[:, None])[:, 0]
            full = torch.logsumexp(z, -1)
            if sampling.with_entropy:
                probs = torch.softmax(z, -1)
                entropy[part] = full - probs.mul_(z).sum(-1)
                del probs
            norm = full
            if sampling.truncated:
                norm = torch.logsumexp(z.masked_fill_(~_kept(z, tokens, sampling), -torch.inf), -1)
            logprobs[part], log_z[part], full_log_z[part] = target - norm, norm, full
        if mask_N is not None:
            logprobs.masked_fill_(~mask_N, 0)
            entropy.masked_fill_(~mask_N, 0)
        ctx.save_for_backward(logits_NV, tokens_N, mask_N, log_z, full_log_z, entropy)
        ctx.sampling = sampling
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        logits_NV, tokens_N, mask_N, log_z, full_log_z, entropy = ctx.saved_tensors
        sampling: _Sampling = ctx.sampling
        grad = torch.empty_like(logits_NV)
        if mask_N is not None:
            grad_logprobs, grad_entropy = grad_logprobs * mask_N, grad_entropy * mask_N
        for start in range(0, logits_NV.shape[0], sampling.chunk):
            part = slice(start, min(start + sampling.chunk, logits_NV.shape[0]))
            mask, tokens = None if mask_N is None else mask_N[part], tokens_N[part]
            z = _scaled(logits_NV[part], mask, sampling, log_z.dtype)
            slope = torch.zeros_like(z) if sampling.with_entropy else None
            if slope is not None:  # d entropy / d z = -p (log p + entropy)
                torch.sub(z, full_log_z[part, None], out=slope)
                probs = slope.exp()
                slope.add_(entropy[part, None]).mul_(probs).mul_(-grad_entropy[part, None])
                del probs
            if sampling.truncated:
                z.masked_fill_(~_kept(z, tokens, sampling), -torch.inf)
            z.sub_(log_z[part, None]).exp_().mul_(-grad_logprobs[part, None])
            z.scatter_add_(-1, tokens[:, None], grad_logprobs[part, None])
            if slope is not None:
                z.add_(slope)
            grad[part] = z.div_(sampling.temperature) if sampling.temperature != 1 else z
        if mask_N is not None:
            grad.masked_fill_(~mask_N[:, None], 0)
        return grad, None, None, None


def token_logprobs(
    *,
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """Log-prob of each token under softmax(logits / temperature), renormalised over what top-k and top-p keep; entropy untruncated.

    Beyond logits and their gradient at most 3 * chunk_tokens * V * 4 bytes are alive (8 * with truncation). Raises ValueError
    for temperature <= 0, top_p outside (0, 1], chunk_tokens < 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be in (0, 1]")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be >= 1")
    if mask_BT is not None:
        check_mask(mask_BT)
    tokens = tokens_BT if mask_BT is None else torch.where(mask_BT, tokens_BT, 0)
    logprobs, entropy = _TokenLogprobs.apply(
        logits_BTV.reshape(-1, logits_BTV.shape[-1]),
        tokens.reshape(-1),
        None if mask_BT is None else mask_BT.reshape(-1),
        _Sampling(temperature, top_k, top_p, chunk_tokens, with_entropy),
    )
    shape = tokens_BT.shape
    return TokenLogprobs(logprobs=logprobs.view(shape), entropy=entropy.view(shape) if with_entropy else None)


def merge_vocab_shards(*, max_PN: Tensor, sumexp_PN: Tensor, target_logit_PN: Tensor) -> Tensor:
    """[N] log-prob from per-shard (max z, sum exp(z - max), z of the token or 0). Stable for any finite input."""
    highest = max_PN.amax(0)
    total = (sumexp_PN * torch.exp(max_PN - highest)).sum(0)
    return target_logit_PN.sum(0) - (highest + torch.log(total))
