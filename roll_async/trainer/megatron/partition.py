"""Rows to data-parallel ranks and micro-batches, evenly by cost: Karmarkar-Karp largest differencing.

Pure arithmetic on lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.megatron.shapes import padded_length

Parts = list[list[int]]
"""Row numbers by part."""


def balanced_parts(costs: Sequence[int], num_parts: int, *, equal_size: bool) -> Parts:
    """Split items into parts of like total cost; with `equal_size` the numbers of items differ by one at most.

    Largest differencing: merge the two partial partitions of largest spread, heaviest part of one with the lightest of
    the other. Example: costs 8 7 6 5 4 in 2 parts give {8, 6} and {7, 5, 4}: 14 against 16. Raises ValueError for
    num_parts < 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts {num_parts} must be >= 1")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    states = []
    if equal_size:
        for start in range(0, len(order), num_parts):
            block = [[i] for i in order[start : start + num_parts]]
            states.append(block + [[] for _ in range(num_parts - len(block))])
    else:
        states = [[[i], *([] for _ in range(num_parts - 1))] for i in order]
    heap = [_entry(parts, costs, number) for number, parts in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        heapq.heappush(heap, _entry(_merged(first, second), costs, number))
        number += 1
    parts = heap[0][2] if heap else [(0, []) for _ in range(num_parts)]
    return [sorted(items) for _, items in parts]


_Weighted = list[tuple[int, list[int]]]


def _entry(parts: Parts | _Weighted, costs: Sequence[int], number: int) -> tuple[int, int, _Weighted]:
    """Heap entry: largest spread first, then the older one; parts heaviest first."""
    weighted: _Weighted = [p if isinstance(p, tuple) else (sum(costs[i] for i in p), p) for p in parts]
    weighted.sort(key=lambda p: (-p[0], -len(p[1]), p[1]))
    return weighted[-1][0] - weighted[0][0], number, weighted


def _merged(first: _Weighted, second: _Weighted) -> _Weighted:
    """The heaviest part of one with the lightest of the other; sizes stay equal, but for the short block."""
    return [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """Who computes what: `ranks[r][m]` are the rows of micro-batch m of data-parallel rank r.

    Every rank has the same number of micro-batches: expert parallelism exchanges tokens among data-parallel ranks, and
    the interleaved schedule wants a multiple of the pipeline size. Some may be empty.
    """

    ranks: list[Parts]


def plan_rows(
    lengths: Sequence[int], settings: MegatronSettings, *, rows_per_batch: int, num_ranks: int, hidden_size: int
) -> RowPlan:
    """Rows to ranks, then to micro-batches. Any plan gives the same loss and gradients.

    fixed: the same number of rows to every rank, `rows_per_batch` rows of like length each. dynamic: as many rows as
    fit `max_tokens_per_microbatch` with padding. packed: the same without padding.
    """
    costs = [row_cost(length, hidden_size) for length in lengths]
    fixed = settings.micro_batching == "fixed"
    ranks = balanced_parts(costs, num_ranks, equal_size=fixed)
    split = [_fixed(rows, lengths, rows_per_batch) if fixed else _by_tokens(rows, lengths, settings) for rows in ranks]
    count = _count(split, settings)
    if settings.micro_batching == "packed":
        # As many as the fullest rank needs anyway: let the others spread theirs.
        split = [_packed(rows, lengths, costs, settings, at_least=count) for rows in ranks]
        count = _count(split, settings)
    return RowPlan(ranks=[batches + [[] for _ in range(count - len(batches))] for batches in split])


def _count(split: Sequence[Parts], settings: MegatronSettings) -> int:
    """Micro-batches per rank that the fullest rank and the schedule ask for."""
    count = max(1, max(len(batches) for batches in split))
    multiple = settings.parallel.pipeline if settings.parallel.virtual_pipeline else 1
    return -(-count // multiple) * multiple


def row_cost(length: int, hidden_size: int) -> int:
    """Multiplications of a layer on a row, up to a factor: 12 h^2 per token, causal attention length * h."""
    return length * (12 * hidden_size + length)


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def _fixed(rows: Sequence[int], lengths: Sequence[int], size: int) -> Parts:
    order = _longest_first(rows, lengths)
    return [order[i : i + size] for i in range(0, len(order), size)]


def _by_tokens(rows: Sequence[int], lengths: Sequence[int], settings: MegatronSettings) -> Parts:
    """First fit, longest first: a batch is as wide as its first row (dynamic), or the sum of its rows (packed)."""
    budget = settings.max_tokens_per_microbatch
    assert budget is not None, "config refuses dynamic and packed micro-batches without max_tokens_per_microbatch"
    batches: Parts = []
    used: list[int] = []
    packed = settings.micro_batching == "packed"
    for row in _longest_first(rows, lengths):
        own = padded_length(lengths[row], settings)
        size = used[-1] + own if packed and batches else own
        if batches and not packed:
            size = (len(batches[-1]) + 1) * padded_length(lengths[batches[-1][0]], settings)
        if batches and size <= budget:
            batches[-1].append(row)
            used[-1] = size
        else:
            batches.append([row])
            used.append(own)
    return batches


def _packed(
    rows: Sequence[int], lengths: Sequence[int], costs: Sequence[int], settings: MegatronSettings, *, at_least: int
) -> Parts:
    """Parts of like cost within the token budget; one more part until all fit."""
    budget = settings.max_tokens_per_microbatch
    assert budget is not None
    first_fit = _by_tokens(rows, lengths, settings)
    for count in range(at_least, max(at_least, len(first_fit)) + 1):
        parts = balanced_parts([costs[row] for row in rows], count, equal_size=False)
        # Rows of one length side by side: attention takes them in one call.
        parts = [_longest_first([rows[i] for i in part], lengths) for part in parts]
        if all(
            sum(padded_length(lengths[row], settings) for row in part) <= budget or len(part) == 1 for part in parts
        ):
            return parts
    return first_fit
