"""Rows to data-parallel ranks and micro-batches, evenly by the model FLOPs of what is computed, padding included.

Attention grows with the square of a row's length, so that parts of as many tokens are not parts of as much work. Pure
arithmetic on lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from roll_async.trainer.megatron.model.model_flops import ModelFlops
from roll_async.trainer.megatron.model.shapes import padded_length
from roll_async.trainer.megatron.settings import MegatronSettings

Parts = list[list[int]]
"""Row numbers by part."""


def balanced_parts(costs: Sequence[int], num_parts: int, *, equal_size: bool) -> Parts:
    """Split items into parts of like total cost; with `equal_size` the numbers of items differ by one at most. The
    largest and the smallest total differ by no more than the largest cost.

    Karmarkar-Karp, largest differencing: merge the two partial partitions of largest spread, heaviest part of one with
    the lightest of the other. Example: costs 8 7 6 5 4 in 2 parts give {8, 6} and {7, 5, 4}: 14 against 16. Raises
    ValueError for num_parts < 1.
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
    lengths: Sequence[int],
    settings: MegatronSettings,
    *,
    rows_per_batch: int,
    num_ranks: int,
    flops: ModelFlops,
    common_shape: bool = False,
) -> RowPlan:
    """Rows to ranks and micro-batches. Any plan gives the same loss and gradients, up to the order of their sums.
    `common_shape`: all micro-batches are fed in the shape of the largest, so that a padded row is as wide as any.

    fixed: up to `rows_per_batch` rows of like length. dynamic: rows of like length, as many as fit
    `max_tokens_per_microbatch` with padding. packed: any rows that fit it without padding.
    """
    mode = settings.micro_batching
    widths = [padded_length(length, settings) for length in lengths]
    if common_shape and mode != "packed":
        widths = [max(widths, default=0)] * len(widths)
    costs = [flops.forward([width]) for width in widths]
    if mode == "packed":
        ranks = balanced_parts(costs, num_ranks, equal_size=False)
        count = _count(max(len(_first_fit(rows, widths, settings)) for rows in ranks), settings)
        # As many as the fullest rank needs anyway: let the others spread theirs.
        split = [_packed(rows, widths, costs, settings, at_least=count) for rows in ranks]
        return _plan(split, _count(max(len(batches) for batches in split), settings))
    most_rows = [rows_per_batch if mode == "fixed" else max(1, _budget(settings) // width) for width in widths]
    return _padded(_longest_first(range(len(widths)), widths), costs, most_rows, settings, num_ranks)


def _plan(split: Sequence[Parts], count: int) -> RowPlan:
    return RowPlan(ranks=[[*batches, *([] for _ in range(count - len(batches)))] for batches in split])


def _count(needed: int, settings: MegatronSettings) -> int:
    """Micro-batches per rank: what the fullest rank needs, rounded up to what the schedule asks for."""
    multiple = settings.parallel.pipeline if settings.parallel.virtual_pipeline else 1
    return -(-max(1, needed) // multiple) * multiple


def _padded(
    order: Sequence[int], costs: Sequence[int], most_rows: Sequence[int], settings: MegatronSettings, num_ranks: int
) -> RowPlan:
    """As few micro-batches per rank as `most_rows` allows, and of these the costliest as cheap as can be.

    Worked example: rows of 1,000 tokens and nine of 100, a budget of 4,000, one rank. Two micro-batches are needed.
    Filled up one after another they are 4 rows of 1,000 and 6 of 100; by cost, 1 row of 1,000 and 9 of 100.
    """
    whole = _cut_at(order, costs, most_rows, limit=None)
    count = _count(-(-len(whole) // num_ranks), settings)
    num_batches = count * num_ranks
    # No micro-batch is cheaper than its first row.
    low, high = max(costs, default=0), max((len(rows) * costs[rows[0]] for rows in whole), default=0)
    while low < high:  # the smallest cost of a micro-batch with which their number suffices
        middle = (low + high) // 2
        if len(_cut_at(order, costs, most_rows, limit=middle)) <= num_batches:
            high = middle
        else:
            low = middle + 1
    batches = _cut_at(order, costs, most_rows, limit=high)
    while len(batches) < min(num_batches, len(order)):  # rather than filler
        # There is one of several rows: there are fewer micro-batches than rows.
        costliest = max((rows for rows in batches if len(rows) > 1), key=lambda rows: len(rows) * costs[rows[0]])
        batches.remove(costliest)
        half = len(costliest) // 2
        batches += [costliest[:half], costliest[half:]]
    # Heaviest first on every rank: expert parallelism lets the ranks wait for one another in each micro-batch.
    batches.sort(key=lambda rows: (-len(rows) * costs[rows[0]], rows))
    of_batches = [len(rows) * costs[rows[0]] for rows in batches]
    ranks = balanced_parts(of_batches, num_ranks, equal_size=True)
    return _plan([[batches[i] for i in rank] for rank in ranks], count)


def _cut_at(order: Sequence[int], costs: Sequence[int], most_rows: Sequence[int], *, limit: int | None) -> Parts:
    """Rows in this order, longest first, into the fewest micro-batches of so many rows and of at most `limit` FLOPs.
    Each row costs as much as the first of its micro-batch, and `most_rows` is read of that one.
    """
    batches: Parts = []
    most = 0
    for row in order:
        if batches and len(batches[-1]) < most:
            batches[-1].append(row)
            continue
        batches.append([row])
        most = most_rows[row] if limit is None else min(most_rows[row], limit // costs[row])
    return batches


def _longest_first(rows: Sequence[int], widths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-widths[row], row))


def _first_fit(rows: Sequence[int], widths: Sequence[int], settings: MegatronSettings) -> Parts:
    """Packs of at most so many tokens, filled one after another, longest rows first."""
    budget = _budget(settings)
    packs: Parts = []
    used = 0
    for row in _longest_first(rows, widths):
        if packs and used + widths[row] <= budget:
            packs[-1].append(row)
            used += widths[row]
        else:
            packs.append([row])
            used = widths[row]
    return packs


def _budget(settings: MegatronSettings) -> int:
    budget = settings.max_tokens_per_microbatch
    assert budget is not None, "config refuses dynamic and packed micro-batches without max_tokens_per_microbatch"
    return budget


def _packed(
    rows: Sequence[int], widths: Sequence[int], costs: Sequence[int], settings: MegatronSettings, *, at_least: int
) -> Parts:
    """Packs of like cost within the token budget; one more pack until all fit."""
    budget = _budget(settings)
    first_fit = _first_fit(rows, widths, settings)
    for count in range(at_least, max(at_least, len(first_fit)) + 1):
        parts = balanced_parts([costs[row] for row in rows], count, equal_size=False)
        # Rows of one length side by side: attention takes them in one call.
        parts = [_longest_first([rows[i] for i in part], widths) for part in parts]
        if all(sum(widths[row] for row in part) <= budget or len(part) == 1 for part in parts):
            return parts
    # Balanced by cost, packs may be over the budget whatever their number; first fit's are not, but for one long row.
    return first_fit
