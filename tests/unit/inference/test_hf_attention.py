"""Attention over the caches of many requests at once, against each request alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from roll_async.inference.hf.attention import _attend, _by_kind

REQUESTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)
"""Queries of this step and tokens in the cache before it: decoding, prefilling, going on with a prefill."""


def alone(query, key, value):
    """One request, causal: its last query sees all keys. query [Q,H,D], key and value [K,H,D]."""
    out = torch.empty(*query.shape[:2], value.shape[-1])
    group = query.shape[1] // key.shape[1]
    for at in range(query.shape[0]):
        seen = key.shape[0] - query.shape[0] + at + 1
        for head in range(query.shape[1]):
            scores = key[:seen, head // group] @ query[at, head] * 0.3
            out[at, head] = torch.softmax(scores, 0) @ value[:seen, head // group]
    return out


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, groups=st.sampled_from([1, 2]))
def test_each_request_sees_its_own_cache_and_nothing_else(requests, groups):
    torch.manual_seed(len(requests))
    num_queries = torch.tensor([q for q, _ in requests])
    num_keys = torch.tensor([q + before for q, before in requests])
    bounds_q, bounds_k = (torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)]) for n in (num_queries, num_keys))
    query = torch.randn(int(bounds_q[-1]), 4, 8)
    key, value = torch.randn(int(bounds_k[-1]), 4 // groups, 8), torch.randn(int(bounds_k[-1]), 4 // groups, 6)
    parts = _by_kind(bounds_q, bounds_k)
    read = torch.cat([part.key_at.flatten() for part in parts])
    found = _attend(query, key[read], value[read], parts, 0.3)
    each = zip(
        query.split(num_queries.tolist()), key.split(num_keys.tolist()), value.split(num_keys.tolist()), strict=True
    )
    torch.testing.assert_close(found, torch.cat([alone(*one) for one in each]), rtol=1e-4, atol=1e-5)
