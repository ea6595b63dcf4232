"""Attention of Transformers' continuous batching on the CPU: each request sees its own cache.

Transformers has all tokens of a step in one row and lets each query meet the keys of all requests, most of them masked:
with 256 requests 255 of 256 products are for nothing. Here the keys of a request are one row of a batch, padded to the
longest; requests that decode one token are one call, those that prefill another.

Shape letters: N tokens of the step, M of all caches, R requests, Q and K the longest query and cache of them, H heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def install() -> None:
    """From now on `sdpa` in this process is what is below, where it helps."""
    AttentionInterface.register("sdpa", attend_by_request)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests whose queries are equally long, or nearly."""

    query_at: Tensor
    """[R,Q] positions of their queries among the tokens of the step; past the end of one, its first."""
    queries: Tensor
    """[R,Q] bool: not past the end."""
    key_at: Tensor
    """[R,K] positions of their keys among all caches; past the end of one, its first."""
    visible: Tensor
    """[R,1,Q,K] bool."""


def attend_by_request(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: PagedAttentionCache | None = None,
    **kwargs,  # noqa: ANN003 (what Transformers hands to the attention of any model)
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query, key, value [1,H,N,D] to [1,N,H,D]. Layers with a sliding window, and
    whatever is no continuous batching on the CPU, are Transformers' own.
    """
    if cache is None or query.is_cuda or not _reads_all(cache, module):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, cache=cache, **kwargs
        )
    allocator = cache.layer_to_allocator[module.layer_idx]
    parts = _by_kind(kwargs["cu_seq_lens_q"].long(), kwargs["cu_seq_lens_k"][allocator.layer_type].long())
    wanted = torch.cat([part.key_at.flatten() for part in parts])
    read_index = kwargs["read_index"][allocator.index]
    reads_cache = bool(read_index.numel())
    if reads_cache:  # what is read is at once as long as it is padded
        indices = list(kwargs["read_index"])  # a copy: other layers of the step read the list, too
        indices[allocator.index] = read_index[wanted]
        kwargs["read_index"] = indices
    width = value.shape[-1]
    # The cache has one size for keys and values; those of latent attention are smaller.
    key, value = cache.update(key, F.pad(value, (0, key.shape[-1] - width)), module.layer_idx, kwargs)
    keys, values = (x[0].transpose(0, 1) for x in (key, value))
    if not reads_cache:  # every request is new
        keys, values = keys.index_select(0, wanted), values.index_select(0, wanted)
    return _attend(query[0].transpose(0, 1), keys, values[..., :width], parts, scaling)[None], None


def _reads_all(cache: PagedAttentionCache, module: torch.nn.Module) -> bool:
    """Whether the layer has no sliding window."""
    return isinstance(cache.layer_to_allocator[module.layer_idx], FullAttentionCacheAllocator)


def _by_kind(bounds_q: Tensor, bounds_k: Tensor) -> list[_Rows]:
    """Requests that decode, and those that prefill. `bounds_q`, `bounds_k`: [requests + 1] of a step's tokens and of
    all caches.
    """
    decodes = bounds_q.diff() == 1
    return [_rows(bounds_q, bounds_k, kind.nonzero()[:, 0]) for kind in (decodes, ~decodes) if kind.any()]


def _rows(bounds_q: Tensor, bounds_k: Tensor, requests: Tensor) -> _Rows:
    num_queries, num_keys = bounds_q.diff()[requests, None], bounds_k.diff()[requests, None]
    query, key = torch.arange(int(num_queries.max())), torch.arange(int(num_keys.max()))
    queries, keys = query < num_queries, key < num_keys
    # Query q of a request stands at position (its keys - its queries) + q, and sees no later key.
    seen = key <= (num_keys - num_queries)[..., None] + query[:, None]
    return _Rows(
        query_at=bounds_q[requests, None] + torch.where(queries, query, 0),
        queries=queries,
        key_at=bounds_k[requests, None] + torch.where(keys, key, 0),
        visible=(seen & keys[:, None])[:, None],
    )


def _attend(query: Tensor, keys: Tensor, values: Tensor, parts: Sequence[_Rows], scaling: float | None) -> Tensor:
    """[N,H,D] from queries [N,H,D] and the padded keys and values of the parts, one after another, [sum of R*K,H,D]."""
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    sizes = [part.key_at.numel() for part in parts]
    for part, *padded in zip(parts, keys.split(sizes), values.split(sizes), strict=True):
        asked = query.index_select(0, part.query_at.flatten()).unflatten(0, part.query_at.shape).transpose(1, 2)
        key, value = (x.unflatten(0, part.key_at.shape).transpose(1, 2) for x in padded)
        found = F.scaled_dot_product_attention(
            asked, key, value, attn_mask=part.visible, scale=scaling, enable_gqa=asked.shape[1] != key.shape[1]
        ).transpose(1, 2)
        out.index_copy_(0, part.query_at[part.queries], found[part.queries])
    return out
