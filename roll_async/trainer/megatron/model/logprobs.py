"""Log-probs of one piece of logits, and their gradient, where each rank holds a shard of the vocabulary.

What a rank finds in its shard is a few numbers per position; they merge by the shards' log-sum-exps in one message. The
gradient takes the place of the logits. So a pass over the vocabulary reads the model's dtype and keeps its float32 in
registers, where a compiler is at hand (Triton on a CUDA device); elsewhere it goes over as many rows at a time as a
cache holds.

Shape letters: n positions of a piece, V this rank's part of the vocabulary, z logits / temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll_async.algorithms.logprobs import Sampling, drop_truncated
from roll_async.trainer.megatron.compiled import compiled, compiles
from roll_async.trainer.megatron.memory_estimate import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class PieceStatistics:
    """[n] float32 each, of the whole vocabulary."""

    logprobs: Tensor
    """Of the target under the full softmax."""
    log_z: Tensor
    """Log-sum-exp of z."""
    log_kept: Tensor
    """Log of the probability mass that truncation leaves; 0 without it."""
    entropy: Tensor
    """Of the full softmax; 0 where it is not wanted."""
    squares: Tensor
    """Sum of the squared probabilities of what is kept; 0 where it is not wanted."""


def piece_statistics(logits: Tensor, words: Tensor, sampling: Sampling, group: dist.ProcessGroup) -> PieceStatistics:
    """Of `logits` [n,V] and target ids `words` [n] of the whole vocabulary. Truncated sampling gathers the vocabulary
    of some rows at a time; else one message of a few numbers per position.
    """
    shard = logits.shape[1]
    local, mine = _local(words, group.rank() * shard, shard)
    wanted = sampling.with_entropy, sampling.with_squares and not sampling.truncated
    read = compiled(_read, logits.device.type)
    rows = [read(logits[part], local[part], sampling.temperature, *wanted) for part in _rows(logits)]
    own, log_z, entropy, squares = (torch.cat(found) for found in zip(*rows, strict=True))
    if group.size() > 1:
        own, log_z, entropy, squares = _merged(torch.where(mine, own, -torch.inf), log_z, entropy, squares, group)
    log_kept = torch.zeros_like(log_z)
    if sampling.truncated:
        for part in _rows(logits, group.size()):
            log_p = _log_p(logits[part], log_z[part], sampling)
            log_kept[part] = _drop_truncated(log_p, words[part], sampling, group)
            if sampling.with_squares:
                squares[part] = _sum(log_p.sub_(log_kept[part, None]).mul_(2).exp_().sum(-1), group)
    return PieceStatistics(own, log_z, log_kept, entropy, squares)


def slope_in_place(
    logits: Tensor,
    words: Tensor,
    found: PieceStatistics,
    gains: tuple[Tensor, Tensor | None],
    sampling: Sampling,
    group: dist.ProcessGroup,
) -> None:
    """Write over `logits` [n,V] the gradient with respect to them. `gains`: [n] float32 gradients with respect to
    log-probs and to the entropy; None = the entropy has none.

    d log p(target) / d z = 1[target] - p, d entropy / d z = -p (log p + entropy); what truncation keeps is a constant.
    """
    shard = logits.shape[1]
    local, mine = _local(words, group.rank() * shard, shard)
    gain, slope = (None if each is None else each / sampling.temperature for each in gains)
    assert gain is not None
    # The target's own entry in float32: the pass rounds to the model's dtype, and 1 - p of a rounded p has no digits.
    sure = found.logprobs - found.log_kept
    entry = -torch.expm1(sure) * gain
    if slope is not None:
        entry = entry - found.logprobs.exp() * (found.logprobs + found.entropy) * slope
    for part in _rows(logits, group.size() if sampling.truncated else 0):
        arguments = logits[part], found.log_z[part], gain[part], sampling.temperature
        about_entropy = None if slope is None else (slope[part], found.entropy[part])
        if sampling.truncated:
            _truncated_slope(*arguments, about_entropy, words[part], found.log_kept[part], sampling, group)
        else:
            compiled(_slope, logits.device.type)(*arguments, about_entropy)
    # Of other ranks' targets the entry stays what the pass wrote.
    kept = logits.gather(1, local[:, None])
    logits.scatter_(1, local[:, None], torch.where(mine[:, None], entry[:, None].to(logits.dtype), kept))


def _read(
    logits: Tensor, local: Tensor, temperature: float, with_entropy: bool, with_squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n] each of a shard as if it were the vocabulary: log-prob of `local`, log-sum-exp, entropy, squares."""
    z = logits.float() if temperature == 1 else logits.float() / temperature
    highest = z.amax(-1, keepdim=True)
    # Relative to the highest: no exp overflows, and the sums lose nothing to its size.
    z = z - highest
    exp = z.exp()
    total = exp.sum(-1)
    log_total = total.log()
    nothing = torch.zeros_like(total)
    entropy = log_total - (exp * z).sum(-1) / total if with_entropy else nothing
    squares = (exp * exp).sum(-1) / (total * total) if with_squares else nothing
    return z.gather(-1, local[:, None])[:, 0] - log_total, highest[:, 0] + log_total, entropy, squares


def _slope(
    logits: Tensor, log_z: Tensor, gain: Tensor, temperature: float, about_entropy: tuple[Tensor, Tensor] | None
) -> None:
    """In place -p (gain + slope (log p + entropy)), the gradient of everything but the target."""
    z = logits.float() if temperature == 1 else logits.float() / temperature
    log_p = z - log_z[:, None]
    if about_entropy is None:
        logits.copy_(log_p.exp() * -gain[:, None])
        return
    slope, entropy = about_entropy
    # Distributed, so that a row needs two numbers of its own.
    weight = log_p * slope[:, None] + (gain + slope * entropy)[:, None]
    logits.copy_(log_p.exp() * -weight)


def _rows(logits: Tensor, gathered: int = 0) -> Iterator[slice]:
    """Parts of the rows whose float32 fits a budget, with `gathered` shards of each; all of them at once where a
    compiled pass makes no float32.
    """
    device = logits.device.type
    if compiles(device) and not gathered:
        yield slice(None)
        return
    step = max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * logits.shape[1] * max(1, gathered)))
    yield from (slice(start, start + step) for start in range(0, max(1, len(logits)), step))


def _merged(
    own: Tensor, log_z: Tensor, entropy: Tensor, squares: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n] each of the whole vocabulary, from [n] each of the shards. `own` is -inf where the target is another's."""
    mine = torch.stack([own, log_z, entropy, squares])
    shards = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(shards, mine, group=group)
    owns, log_zs, entropies, squares_of = torch.stack(shards).unbind(1)  # [P,n] each
    total = log_zs.logsumexp(0)
    log_share = log_zs - total  # log of the probability mass of each shard
    share = log_share.exp()
    # Entropy of which shard it is, and of what stands in it.
    entropy = (share * (entropies - log_share)).sum(0)
    return (owns + log_share).amax(0), total, entropy, (share * share * squares_of).sum(0)


def _log_p(logits: Tensor, log_z: Tensor, sampling: Sampling) -> Tensor:
    """[n,V] a fresh float32 copy."""
    return logits.to(torch.float32, copy=True).div_(sampling.temperature).sub_(log_z[:, None])


def _truncated_slope(
    logits: Tensor,
    log_z: Tensor,
    gain: Tensor,
    temperature: float,
    about_entropy: tuple[Tensor, Tensor] | None,
    words: Tensor,
    log_kept: Tensor,
    sampling: Sampling,
    group: dist.ProcessGroup,
) -> None:
    log_p = _log_p(logits, log_z, sampling)
    if about_entropy is not None:
        # Of the full softmax, which truncation does not change.
        _slope(logits, log_z, torch.zeros_like(gain), temperature, about_entropy)
    _drop_truncated(log_p, words, sampling, group)
    policy = log_p.sub_(log_kept[:, None]).exp_().mul_(-gain[:, None])
    logits.copy_(policy if about_entropy is None else policy.add_(logits))


def _drop_truncated(log_p: Tensor, words: Tensor, sampling: Sampling, group: dist.ProcessGroup) -> Tensor:
    """In place on the own shard [n,V]: -inf at what top-k, then top-p cut off. Returns the log mass that stays [n]."""
    if group.size() == 1:
        drop_truncated(log_p, words[:, None], top_k=sampling.top_k, top_p=sampling.top_p)
        return torch.logsumexp(log_p, -1)
    shards = [torch.empty_like(log_p) for _ in range(group.size())]
    dist.all_gather(shards, log_p.contiguous(), group=group)
    whole = torch.cat(shards, -1)
    # Before the copies that truncation makes.
    del shards
    drop_truncated(whole, words[:, None], top_k=sampling.top_k, top_p=sampling.top_p)
    log_p.copy_(whole.chunk(group.size(), -1)[group.rank()])
    return torch.logsumexp(whole, -1)


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _local(words: Tensor, first: int, shard: int) -> tuple[Tensor, Tensor]:
    """Token ids inside this shard (0 for others), and which are this rank's."""
    local = words - first
    mine = (local >= 0) & (local < shard)
    return torch.where(mine, local, 0), mine
