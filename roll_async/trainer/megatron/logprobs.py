"""Log-probs under tensor parallelism: each rank holds a shard of the vocabulary, and no rank ever holds all of it in
float32.

Shape letters: N flattened tokens, V the local vocabulary shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.algorithms.logprobs import TokenLogprobs, merge_vocab_shards, token_logprobs
from roll_async.trainer.megatron.settings import MegatronSettings

_CHUNK_TOKENS = 1024


def next_token_logprobs(
    logits: Tensor, tokens: Tensor, mask: Tensor, settings: MegatronSettings, group: dist.ProcessGroup, *, with_entropy: bool
) -> TokenLogprobs:
    """Log-prob of token t from the logits at t - 1; 0 where not in the mask. `logits` [B,T,V or shard], `tokens`,
    `mask` [B,T].
    """
    target = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    wanted = torch.nn.functional.pad(mask[:, 1:], (0, 1), value=False)
    if group.size() == 1:
        result = token_logprobs(
            logits_BTV=logits,
            tokens_BT=target,
            mask_BT=wanted,
            temperature=settings.temperature,
            top_k=max(0, settings.top_k),
            top_p=settings.top_p,
            chunk_tokens=_CHUNK_TOKENS,
            with_entropy=with_entropy,
        )
        logprobs, entropy = result.logprobs, result.entropy
    else:
        flat = logits.reshape(-1, logits.shape[-1])
        logprobs, ent = _ShardedLogprobs.apply(
            flat, target.reshape(-1), wanted.reshape(-1), settings.temperature, group, with_entropy
        )
        logprobs, entropy = logprobs.view_as(target), ent.view_as(target) if with_entropy else None
    return TokenLogprobs(logprobs=_shift(logprobs), entropy=None if entropy is None else _shift(entropy))


def _shift(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x[:, :-1], (1, 0))


class _ShardedLogprobs(torch.autograd.Function):
    """Three reductions per chunk (max, sum, target); gradient (1[v = token] - softmax_v) g / temperature on the own
    shard.
    """

    @staticmethod
    def forward(ctx, logits, tokens, mask, temperature, group, with_entropy):  # noqa: ANN001, ANN205
        count, shard = logits.shape
        first = group.rank() * shard
        logprobs, entropy, log_z = (torch.zeros(count, device=logits.device) for _ in range(3))
        for start in range(0, count, _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            z = _chunk(logits[part], mask[part], temperature)
            local, mine = _local(tokens[part], first, shard)
            target = torch.where(mine, z.gather(-1, local[:, None])[:, 0], 0)
            highest = z.amax(-1)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            exp = z.sub_(highest[:, None]).exp()
            sums = torch.stack([exp.sum(-1), target, (exp * z).sum(-1) if with_entropy else torch.zeros_like(target)])
            dist.all_reduce(sums, group=group)
            norm = highest + sums[0].log()
            logprobs[part] = merge_vocab_shards(
                max_PN=highest[None], sumexp_PN=sums[0][None], target_logit_PN=sums[1][None]
            )
            log_z[part] = norm
            if with_entropy:  # sum p (log Z - z), with z relative to its maximum
                entropy[part] = sums[0].log() - sums[2] / sums[0]
        ctx.save_for_backward(logits, tokens, mask, log_z, entropy)
        ctx.temperature, ctx.first, ctx.with_entropy = temperature, first, with_entropy
        return torch.where(mask, logprobs, 0), torch.where(mask, entropy, 0)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # noqa: ANN001, ANN205
        logits, tokens, mask, log_z, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        g, h = torch.where(mask, grad_logprobs, 0), torch.where(mask, grad_entropy, 0)
        for start in range(0, logits.shape[0], _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            log_p = _chunk(logits[part], mask[part], ctx.temperature).sub_(log_z[part, None])
            p = log_p.exp()
            local, mine = _local(tokens[part], ctx.first, logits.shape[1])
            slope = p * -g[part, None]
            slope.scatter_add_(-1, local[:, None], torch.where(mine, g[part], 0)[:, None])
            if ctx.with_entropy:
                slope -= p * (log_p + entropy[part, None]) * h[part, None]
            grad[part] = torch.where(mask[part, None], slope / ctx.temperature, 0).to(grad.dtype)
        return grad, None, None, None, None, None


def _chunk(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    z = logits.to(torch.float32, copy=True).masked_fill_(~mask[:, None], 0)
    return z.div_(temperature) if temperature != 1 else z


def _local(tokens: Tensor, first: int, shard: int) -> tuple[Tensor, Tensor]:
    """Token ids inside this shard (0 for others), and which are this rank's."""
    local = tokens - first
    mine = (local >= 0) & (local < shard)
    return torch.where(mine, local, 0), mine
