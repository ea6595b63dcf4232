"""Rows to ranks and micro-batches: nothing lost, nothing twice, even by cost, never over the budget."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_async.trainer.megatron.model.model_flops import ModelFlops
from roll_async.trainer.megatron.model.partition import balanced_parts, plan_rows
from roll_async.trainer.megatron.model.shapes import padded_length
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes

FLOPS = ModelFlops(per_token=24 * 64 * 64, per_pair=4 * 64, backward=2)
"""Of a layer of 64 numbers a token."""
LENGTHS = [3, 97, 12, 45, 45, 8, 64, 1, 30, 77, 5, 19, 120, 33, 2, 60, 60]


def megatron(**fields):
    sizes = fields.pop("parallel", {})
    return MegatronSettings(model_folder="", parallel=ParallelSizes(**sizes), **fields)


def spread(costs, parts):
    sums = [sum(costs[i] for i in part) for part in parts]
    return max(sums) - min(sums)


def best_spread(costs, num_parts):
    """By trying every assignment."""
    found = []
    for choice in itertools.product(range(num_parts), repeat=len(costs)):
        sums = [0] * num_parts
        for cost, part in zip(costs, choice, strict=True):
            sums[part] += cost
        found.append(max(sums) - min(sums))
    return min(found)


def test_the_documented_example_of_largest_differencing():
    assert balanced_parts([8, 7, 6, 5, 4], 2, equal_size=False) == [[1, 3, 4], [0, 2]]


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 20])
def test_every_row_is_in_one_part(num_parts, equal_size):
    parts = balanced_parts(LENGTHS, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(LENGTHS)))
    if equal_size:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_parts_are_close_to_the_best_there_is_and_closer_than_taking_turns():
    for seed in range(20):
        costs = [(seed * 7919 + i * 104729) % 97 + 3 for i in range(8)]
        found = spread(costs, balanced_parts(costs, 3, equal_size=False))
        assert found <= best_spread(costs, 3) + 0.15 * sum(costs) / 3
    costs = [FLOPS.forward([length]) for length in LENGTHS]
    turns = [list(range(rank, len(LENGTHS), 4)) for rank in range(4)]
    assert spread(costs, balanced_parts(costs, 4, equal_size=False)) < 0.2 * spread(costs, turns)


@pytest.mark.parametrize("mode", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_plan_holds_every_row_once_and_gives_all_ranks_the_same_number_of_turns(mode, num_ranks):
    chosen = megatron(micro_batching=mode, max_tokens_per_microbatch=128)
    plan = plan_rows(LENGTHS, chosen, rows_per_batch=3, num_ranks=num_ranks, flops=FLOPS)
    assert sorted(row for rank in plan.ranks for part in rank for row in part) == list(range(len(LENGTHS)))
    assert {len(rank) for rank in plan.ranks} == {len(plan.ranks[0])}
    for part in (part for rank in plan.ranks for part in rank if part):
        padded = [padded_length(LENGTHS[row], chosen) for row in part]
        if mode == "fixed":
            assert len(part) <= 3
        elif mode == "dynamic":
            assert len(part) * max(padded) <= 128
        else:
            assert sum(padded) <= 128


def test_packing_needs_fewer_turns_than_padding():
    turns = {}
    for mode in ("dynamic", "packed"):
        chosen = megatron(micro_batching=mode, max_tokens_per_microbatch=128)
        plan = plan_rows(LENGTHS, chosen, rows_per_batch=1, num_ranks=1, flops=FLOPS)
        turns[mode] = len(plan.ranks[0])
    assert turns["packed"] < turns["dynamic"]
    assert turns["packed"] <= -(-sum(LENGTHS) // 128) + 1


def test_an_interleaved_pipeline_gets_a_multiple_of_its_ranks():
    chosen = megatron(parallel={"pipeline": 4, "virtual_pipeline": 2})
    plan = plan_rows(LENGTHS[:7], chosen, rows_per_batch=3, num_ranks=2, flops=FLOPS)
    assert len(plan.ranks[0]) % 4 == 0
    assert any(not part for rank in plan.ranks for part in rank)


def cost_of(part, lengths):
    """What a padded micro-batch costs: each of its rows as much as the longest."""
    return len(part) * FLOPS.forward([max(padded_length(lengths[row], megatron()) for row in part)])


def cheapest_costliest(lengths, most_parts, fits):
    """By trying every way to cut the rows, longest first, into so many parts that fit: the least cost of the costliest
    part. A row alone always fits.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found = []
    for num_cuts in range(min(most_parts, len(order))):
        for cuts in itertools.combinations(range(1, len(order)), num_cuts):
            parts = [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)]
            if all(len(part) == 1 or fits(part) for part in parts):
                found.append(max(cost_of(part, lengths) for part in parts))
    return min(found)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    num_ranks=st.integers(1, 3),
    mode=st.sampled_from(["fixed", "dynamic"]),
    data=st.data(),
)
def test_the_costliest_micro_batch_is_as_cheap_as_any_plan_of_so_many_allows(lengths, num_ranks, mode, data):
    rows_per_batch, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(400, 2000))
    chosen = megatron(micro_batching=mode, max_tokens_per_microbatch=budget)

    def fits(part):
        widest = max(padded_length(lengths[row], chosen) for row in part)
        return len(part) <= rows_per_batch if mode == "fixed" else len(part) * widest <= budget

    plan = plan_rows(lengths, chosen, rows_per_batch=rows_per_batch, num_ranks=num_ranks, flops=FLOPS)
    parts = [part for rank in plan.ranks for part in rank if part]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or fits(part) for part in parts)
    assert len(parts) >= min(num_ranks, len(lengths)), "no rank without rows while another could give it some"
    costs = [cost_of(part, lengths) for part in parts]
    assert max(costs) == cheapest_costliest(lengths, num_ranks * len(plan.ranks[0]), fits)
    of_ranks = [sum(cost_of(part, lengths) for part in rank if part) for rank in plan.ranks]
    assert max(of_ranks) - min(of_ranks) <= max(costs)


@settings(deadline=None)
@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=7), num_parts=st.integers(2, 3))
def test_parts_are_within_the_bounds_known_of_largest_differencing(costs, num_parts):
    best = min(
        max(sum(c for c, own in zip(costs, choice, strict=True) if own == part) for part in range(num_parts))
        for choice in itertools.product(range(num_parts), repeat=len(costs))
    )
    found = balanced_parts(costs, num_parts, equal_size=False)
    # Michiels, Korst, Aarts, van Leeuwen: Performance ratios for the differencing method, 2003.
    assert max(sum(costs[i] for i in part) for part in found) <= (4 / 3 - 1 / (3 * num_parts)) * best + 1e-9
    for equal_size in (False, True):
        assert spread(costs, balanced_parts(costs, num_parts, equal_size=equal_size)) <= max(costs)


def test_rows_are_spread_by_cost_and_not_by_tokens():
    """By tokens the long row would share its rank with one of the six others, 5,000 tokens each."""
    quadratic = ModelFlops(per_token=1, per_pair=100, backward=2)
    lengths = [4000, *[1000] * 6]
    chosen = megatron(micro_batching="packed", max_tokens_per_microbatch=8000)
    plan = plan_rows(lengths, chosen, rows_per_batch=1, num_ranks=2, flops=quadratic)
    assert sorted(plan.ranks) == [[[0]], [[1, 2, 3, 4, 5, 6]]]
    linear = ModelFlops(per_token=1, per_pair=0, backward=2)
    plan = plan_rows(lengths, chosen, rows_per_batch=1, num_ranks=2, flops=linear)
    assert sorted(sum(lengths[row] for row in rank[0]) for rank in plan.ranks) == [5000, 5000]


def test_the_documented_example_of_micro_batches_of_like_cost():
    chosen = megatron(micro_batching="dynamic", max_tokens_per_microbatch=4000)
    plan = plan_rows([1000, *[100] * 9], chosen, rows_per_batch=1, num_ranks=1, flops=FLOPS)
    assert plan.ranks == [[[0], list(range(1, 10))]]


def test_micro_batches_of_one_shape_stay_within_the_budget():
    """All are fed as wide as the longest row: many short rows beside a long one would be as many long ones."""
    chosen = megatron(micro_batching="dynamic", max_tokens_per_microbatch=2000)
    lengths = [1000, *[100] * 9]
    plan = plan_rows(lengths, chosen, rows_per_batch=1, num_ranks=1, flops=FLOPS, common_shape=True)
    assert max(len(part) for rank in plan.ranks for part in rank) == 2


def test_no_rows_at_all_still_give_every_rank_a_turn():
    plan = plan_rows([], megatron(), rows_per_batch=3, num_ranks=2, flops=FLOPS)
    assert plan.ranks == [[[]], [[]]]


def test_lengths_fit_zigzag_blocks_and_sequence_parallel_shares():
    layout = {"tensor": 3, "context": 2, "sequence_parallel": True}
    assert padded_length(13, megatron(parallel=layout)) == 24
    assert padded_length(13, megatron()) == 16
    packed = megatron(parallel=layout, micro_batching="packed", max_tokens_per_microbatch=99)
    assert padded_length(13, packed) == 16
