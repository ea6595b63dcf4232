"""Log-probs of given tokens from logits, one chunk of tokens at a time.

Shape letters: B rows, T positions, N = B*T flattened tokens, V vocabulary, P vocabulary shards. Logits are never
flattened or copied as a whole: flattening a view such as `logits[:, :-1]` would copy what the chunks avoid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, working_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """float32 (float64 for float64 logits); 0 where masked."""

    logprobs: Tensor  # [B,T]
    entropy: Tensor | None  # [B,T]
    squares: Tensor | None = None  # [B,T] sum over the vocabulary of the squared probability, without gradient


def token_chunks(shape: Sequence[int], chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Index pairs that cover a [B,T] grid in order, each of at most `chunk_tokens` tokens: rows, or a part of one."""
    num_rows, length = shape
    if length <= chunk_tokens:
        step = chunk_tokens // max(1, length)
        yield from ((slice(row, row + step), slice(0, length)) for row in range(0, num_rows, step))
        return
    for row in range(num_rows):
        for start in range(0, length, chunk_tokens):
            yield slice(row, row + 1), slice(start, start + chunk_tokens)


def scaled_chunk(logits: Tensor, mask: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    """[b,t,V] a fresh copy of logits / temperature in `dtype`, 0 where masked."""
    z = logits.to(dtype, copy=True)
    if mask is not None:
        # What stands there may be NaN, and NaN times a zero gradient is NaN.
        z.masked_fill_(~mask.unsqueeze(-1), 0)
    return z.div_(temperature) if temperature != 1 else z


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the distribution is read: what shapes it, and what is wanted of it."""

    temperature: float
    top_k: int
    top_p: float
    chunk_tokens: int
    with_entropy: bool
    with_squares: bool

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def reads_as_is(self, logits: Tensor, dtype: torch.dtype) -> bool:
        """Whether logits can be read without a copy, which would cost one more pass over the vocabulary."""
        return self.temperature == 1 and logits.dtype == dtype


def drop_truncated(z: Tensor, tokens: Tensor, *, top_k: int, top_p: float) -> None:
    """In place: -inf for tokens that top-k, then top-p exclude; the sampled token (last axis of 1) always stays."""
    cut = torch.zeros_like(z, dtype=torch.bool)
    if 0 < top_k < z.shape[-1]:
        # Only the logits that top-k keeps are sorted, not the vocabulary. Those equal to the k-th are kept, too.
        highest, order = z.topk(top_k, dim=-1)
        least = highest[..., -1:]
        cut = z < least
        if top_p < 1:
            total = torch.logsumexp(z.masked_fill(cut, -torch.inf), -1, keepdim=True)
            over = _over((highest - total).exp_(), top_p)
            cut |= (z == least) & over[..., -1:]  # ties of the last one are cut, too
            cut.scatter_(-1, order, over)
    elif top_p < 1:
        # Stable: the backward pass sorts again, and must cut the same of equal tokens.
        ordered, order = torch.softmax(z, -1).sort(dim=-1, descending=True, stable=True)
        cut.scatter_(-1, order, _over(ordered, top_p))
    z.masked_fill_(cut.scatter_(-1, tokens, False), -torch.inf)


def _over(ordered: Tensor, top_p: float) -> Tensor:
    """bool like `ordered` probabilities, highest first: whether those before have a mass of top_p."""
    # The mass before a token, so that the one that reaches top_p stays.
    before = ordered.cumsum(-1).sub_(ordered)
    return before >= top_p


def _gain(grad: Tensor, kept: Tensor | None, temperature: float) -> Tensor:
    """[b,t,1] the gradient with respect to z that follows from one [b,t] of log-probs or entropy."""
    return ((grad if kept is None else torch.where(kept, grad, 0)) / temperature).unsqueeze(-1)


class _TokenLogprobs(torch.autograd.Function):
    """Forward saves references and [B,T] numbers; backward recomputes chunk by chunk into one gradient buffer."""

    @staticmethod
    def forward(ctx, logits: Tensor, tokens: Tensor, mask: Tensor | None, sampling: Sampling) -> tuple[Tensor, ...]:  # noqa: ANN001
        dtype = working_dtype(logits)
        # log_z: log-sum-exp of all z. log_kept: log of the probability mass that truncation leaves, 0 without it.
        logprobs, entropy, squares, log_z, log_kept = (
            torch.zeros(tokens.shape, dtype=dtype, device=logits.device) for _ in range(5)
        )
        as_is = sampling.reads_as_is(logits, dtype)
        for part in token_chunks(tokens.shape, sampling.chunk_tokens):
            kept = None if mask is None else mask[part]
            z = logits[part] if as_is else scaled_chunk(logits[part], kept, sampling.temperature, dtype)
            index = tokens[part].unsqueeze(-1)
            log_p = torch.log_softmax(z, -1)
            own = log_p.gather(-1, index)
            # z - log p of any token is log Z: no further pass over the vocabulary.
            logprobs[part], log_z[part] = own.squeeze(-1), (z.gather(-1, index) - own).squeeze(-1)
            # Before truncation: the entropy is that of the full softmax.
            if sampling.with_entropy:
                entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
            if sampling.truncated:
                drop_truncated(log_p, index, top_k=sampling.top_k, top_p=sampling.top_p)
                log_kept[part] = torch.logsumexp(log_p, -1)
            if sampling.with_squares:
                # In place: log_p is not read again.
                squares[part] = torch.exp(torch.logsumexp(log_p.mul_(2), -1) - 2 * log_kept[part])
            del z, log_p  # before the next chunk is made
        logprobs -= log_kept
        if mask is not None:
            logprobs.masked_fill_(~mask, 0)
            entropy.masked_fill_(~mask, 0)
            squares.masked_fill_(~mask, 0)
        ctx.save_for_backward(logits, tokens, mask, log_z, log_kept, entropy)
        ctx.sampling = sampling
        ctx.set_materialize_grads(False)  # the backward pass skips an entropy that is only reported
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        logits, tokens, mask, log_z, log_kept, entropy = ctx.saved_tensors
        sampling: Sampling = ctx.sampling
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_z)
        # The chunks cover the grid, so every element is written below.
        grad = torch.empty_like(logits)
        as_is = sampling.reads_as_is(logits, log_z.dtype)
        for part in token_chunks(tokens.shape, sampling.chunk_tokens):
            kept = None if mask is None else mask[part]
            out, norm, index = grad[part], log_z[part].unsqueeze(-1), tokens[part].unsqueeze(-1)
            if as_is:
                # In the gradient's own memory: no chunk besides it.
                z = torch.sub(logits[part], norm, out=out)
            else:
                z = scaled_chunk(logits[part], kept, sampling.temperature, log_z.dtype).sub_(norm)
            slope = None
            if grad_entropy is not None:  # d entropy / d z = -p (log p + entropy)
                slope = z.exp().mul_(-_gain(grad_entropy[part], kept, sampling.temperature))
                slope.mul_(z + entropy[part].unsqueeze(-1))
            if sampling.truncated:
                drop_truncated(z, index, top_k=sampling.top_k, top_p=sampling.top_p)
                z.sub_(log_kept[part].unsqueeze(-1))
            gain = _gain(grad_logprobs[part], kept, sampling.temperature)
            # d log p(token) / d z = 1[token] - p.
            z.exp_().mul_(-gain).scatter_add_(-1, index, gain)
            if slope is not None:
                z.add_(slope)
            if not as_is:
                out.copy_(z)
            elif kept is not None:  # logits there may be anything
                out.masked_fill_(~kept.unsqueeze(-1), 0)
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
    with_squares: bool = False,
) -> TokenLogprobs:
    """Log-prob of each token under softmax(logits / temperature), renormalised over what top-k, then top-p keep.

    The sampled token is always kept; what is kept is a constant for the gradient; the entropy is that of the full
    softmax, the squares are those of what is kept. Beyond logits and their gradient at most 3 * chunk_tokens * V * 4
    bytes are alive (8 with truncation). Raises ValueError for temperature <= 0, top_p outside (0, 1], chunk_tokens < 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} must be in (0, 1]")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be >= 1")
    if mask_BT is not None:
        check_mask(mask_BT)
    # gather reads an index where masked, too: it must be one of the vocabulary.
    tokens = tokens_BT if mask_BT is None else torch.where(mask_BT, tokens_BT, 0)
    sampling = Sampling(temperature, top_k, top_p, chunk_tokens, with_entropy, with_squares)
    logprobs, entropy, squares = _TokenLogprobs.apply(logits_BTV, tokens, mask_BT, sampling)
    return TokenLogprobs(
        logprobs=logprobs, entropy=entropy if with_entropy else None, squares=squares if with_squares else None
    )


def merge_vocab_shards(*, max_PN: Tensor, sumexp_PN: Tensor, target_logit_PN: Tensor) -> Tensor:
    """[N] log-prob from per-shard (max z, sum exp(z - its max), z of the token if the shard owns it, else 0).

    Stable for any finite input. Example: logits 2 1 | 0 -1 and token 1 give max 2 | 0, sumexp 1.367879 | 1.367879,
    target 1 | 0, result -1.440190.
    """
    dtype = working_dtype(max_PN, sumexp_PN, target_logit_PN)
    shard_max = max_PN.to(dtype)
    highest = shard_max.amax(0)
    total = (sumexp_PN.to(dtype) * torch.exp(shard_max - highest)).sum(0)
    return target_logit_PN.to(dtype).sum(0) - (highest + torch.log(total))
