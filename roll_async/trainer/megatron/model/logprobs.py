"""Log-probs under tensor parallelism: each rank holds a shard of the vocabulary, and no rank ever holds all of it in
float32.

Shape letters: N flattened tokens, V the local vocabulary shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.algorithms.logprobs import Sampling, TokenLogprobs, drop_truncated, merge_vocab_shards, token_logprobs
from roll_async.trainer.megatron.settings import MegatronSettings

_CHUNK_TOKENS = 1024
_CHUNK_BYTES = {"cuda": 128 << 20, "cpu": 2 << 20}
"""Of one float32 copy of a chunk's logits; up to 3 are alive, 8 with truncated sampling. On the CPU a chunk fits a
core's cache, and is memory the allocator has at hand: fresh pages cost like a pass.
"""


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose float32 logits over `vocabulary` words fit the budget of the device."""
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
    return max(1, min(_CHUNK_TOKENS, budget // (4 * vocabulary)))


def next_token_logprobs(
    logits: Tensor,
    targets: Tensor,
    wanted: Tensor,
    settings: MegatronSettings,
    group: dist.ProcessGroup,
    *,
    with_entropy: bool,
    with_squares: bool = False,
) -> TokenLogprobs:
    """Log-prob of `targets[b,s]` from the logits at the same position; 0 where not wanted. `logits` [b,s,V or shard].

    Under truncated sampling (top_k, top_p) one chunk of the whole vocabulary is gathered at a time.
    """
    if group.size() == 1:
        return token_logprobs(
            logits_BTV=logits,
            tokens_BT=targets,
            mask_BT=wanted,
            temperature=settings.temperature,
            top_k=max(0, settings.top_k),
            top_p=settings.top_p,
            chunk_tokens=chunk_tokens(logits.shape[-1], logits.device),
            with_entropy=with_entropy,
            with_squares=with_squares,
        )
    # Truncation gathers the whole vocabulary, a reduction per chunk only its own shard.
    truncated = settings.top_k > 0 or settings.top_p < 1
    chunk = chunk_tokens(logits.shape[-1] * (group.size() if truncated else 1), torch.device("cuda"))
    sampling = Sampling(settings.temperature, max(0, settings.top_k), settings.top_p, chunk, with_entropy, with_squares)
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy, squares = _ShardedLogprobs.apply(flat, targets.reshape(-1), wanted.reshape(-1), sampling, group)
    return TokenLogprobs(
        logprobs=logprobs.view_as(targets),
        entropy=entropy.view_as(targets) if with_entropy else None,
        squares=squares.view_as(targets) if with_squares else None,
    )


class _ShardedLogprobs(torch.autograd.Function):
    """Three reductions per chunk (max, sum, target); gradient (1[v = token] - softmax_v) g / temperature on the own
    shard.
    """

    @staticmethod
    def forward(ctx, logits, tokens, mask, sampling, group):  # noqa: ANN001, ANN205
        count, shard = logits.shape
        first = group.rank() * shard
        logprobs, entropy, squares, log_z, log_kept = (torch.zeros(count, device=logits.device) for _ in range(5))
        for start in range(0, count, sampling.chunk_tokens):
            part = slice(start, start + sampling.chunk_tokens)
            z = _chunk(logits[part], mask[part], sampling.temperature)
            local, mine = _local(tokens[part], first, shard)
            # Before the maximum is subtracted in place: log Z below is on the scale of these logits.
            target = torch.where(mine, z.gather(-1, local[:, None])[:, 0], 0)
            highest = z.amax(-1)
            # Before exp: sums of different ranks add up only relative to the same maximum.
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            exp = z.sub_(highest[:, None]).exp()
            weighted = (exp * z).sum(-1) if sampling.with_entropy else torch.zeros_like(target)
            # In one message.
            sums = torch.stack([exp.sum(-1), target, weighted])
            del exp
            dist.all_reduce(sums, group=group)
            log_z[part] = highest + sums[0].log()
            logprobs[part] = merge_vocab_shards(
                max_PN=highest[None], sumexp_PN=sums[0][None], target_logit_PN=sums[1][None]
            )
            if sampling.with_entropy:  # sum p (log Z - z), with z relative to its maximum
                entropy[part] = sums[0].log() - sums[2] / sums[0]
            if sampling.truncated or sampling.with_squares:
                # z is relative to its maximum already, as is the sum.
                log_p = z.sub_(sums[0].log()[:, None])
            if sampling.truncated:
                log_kept[part] = _drop_truncated(log_p, tokens[part], mask[part], sampling, group)
            if sampling.with_squares:
                shard_squares = log_p.sub_(log_kept[part, None]).mul_(2).exp_().sum(-1)
                dist.all_reduce(shard_squares, group=group)
                squares[part] = shard_squares
        logprobs -= log_kept
        ctx.save_for_backward(logits, tokens, mask, log_z, log_kept, entropy)
        ctx.sampling, ctx.group = sampling, group
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs the backward pass nothing
        squares = torch.where(mask, squares, 0)
        ctx.mark_non_differentiable(squares)
        return torch.where(mask, logprobs, 0), torch.where(mask, entropy, 0), squares

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _):  # noqa: ANN001, ANN205
        logits, tokens, mask, log_z, log_kept, entropy = ctx.saved_tensors
        sampling, shard = ctx.sampling, logits.shape[1]
        first = ctx.group.rank() * shard
        grad = torch.empty_like(logits)
        g = torch.zeros_like(log_z) if grad_logprobs is None else torch.where(mask, grad_logprobs, 0)
        h = None if grad_entropy is None else torch.where(mask, grad_entropy, 0)
        for start in range(0, logits.shape[0], sampling.chunk_tokens):
            part = slice(start, start + sampling.chunk_tokens)
            log_p = _chunk(logits[part], mask[part], sampling.temperature).sub_(log_z[part, None])
            slope = None
            if h is not None:
                slope = log_p.exp().mul_(log_p + entropy[part, None]).mul_(-h[part, None])
            if sampling.truncated:
                _drop_truncated(log_p, tokens[part], mask[part], sampling, ctx.group)
                log_p.sub_(log_kept[part, None])
            policy = log_p.exp_().mul_(-g[part, None])
            local, mine = _local(tokens[part], first, shard)
            policy.scatter_add_(-1, local[:, None], torch.where(mine, g[part], 0)[:, None])
            total = policy if slope is None else policy.add_(slope)
            grad[part] = torch.where(mask[part, None], total / sampling.temperature, 0).to(grad.dtype)
        return grad, None, None, None, None


def _drop_truncated(
    log_p: Tensor, tokens: Tensor, mask: Tensor, sampling: Sampling, group: dist.ProcessGroup
) -> Tensor:
    """In place on the own shard [n,V]: -inf at what top-k, then top-p cut off. Returns the log mass that stays [n]."""
    shards = [torch.empty_like(log_p) for _ in range(group.size())]
    dist.all_gather(shards, log_p.contiguous(), group=group)
    whole = torch.cat(shards, -1)
    # Before the copies that truncation makes.
    del shards
    drop_truncated(whole, torch.where(mask, tokens, 0)[:, None], top_k=sampling.top_k, top_p=sampling.top_p)
    log_p.copy_(whole.chunk(group.size(), -1)[group.rank()])
    return torch.logsumexp(whole, -1)


def _chunk(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    z = logits.to(torch.float32, copy=True).masked_fill_(~mask[:, None], 0)
    return z.div_(temperature) if temperature != 1 else z


def _local(tokens: Tensor, first: int, shard: int) -> tuple[Tensor, Tensor]:
    """Token ids inside this shard (0 for others), and which are this rank's."""
    local = tokens - first
    mine = (local >= 0) & (local < shard)
    return torch.where(mine, local, 0), mine
