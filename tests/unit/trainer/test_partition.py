"""Rows to ranks and micro-batches: nothing lost, nothing twice, even by cost, never over the budget."""

import itertools

import pytest

from roll_async.trainer.megatron.partition import balanced_parts, plan_rows, row_cost
from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes
from roll_async.trainer.megatron.shapes import padded_length

LENGTHS = [3, 97, 12, 45, 45, 8, 64, 1, 30, 77, 5, 19, 120, 33, 2, 60, 60]


def settings(**fields):
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
    costs = [row_cost(length, 64) for length in LENGTHS]
    turns = [list(range(rank, len(LENGTHS), 4)) for rank in range(4)]
    assert spread(costs, balanced_parts(costs, 4, equal_size=False)) < 0.2 * spread(costs, turns)


@pytest.mark.parametrize("mode", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_plan_holds_every_row_once_and_gives_all_ranks_the_same_number_of_turns(mode, num_ranks):
    chosen = settings(micro_batching=mode, max_tokens_per_microbatch=128)
    plan = plan_rows(LENGTHS, chosen, rows_per_batch=3, num_ranks=num_ranks, hidden_size=64)
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
        chosen = settings(micro_batching=mode, max_tokens_per_microbatch=128)
        plan = plan_rows(LENGTHS, chosen, rows_per_batch=1, num_ranks=1, hidden_size=64)
        turns[mode] = len(plan.ranks[0])
    assert turns["packed"] < turns["dynamic"]
    assert turns["packed"] <= -(-sum(LENGTHS) // 128) + 1


def test_an_interleaved_pipeline_gets_a_multiple_of_its_ranks():
    chosen = settings(parallel={"pipeline": 4, "virtual_pipeline": 2})
    plan = plan_rows(LENGTHS, chosen, rows_per_batch=3, num_ranks=2, hidden_size=64)
    assert len(plan.ranks[0]) % 4 == 0
    assert any(not part for rank in plan.ranks for part in rank)


def test_no_rows_at_all_still_give_every_rank_a_turn():
    plan = plan_rows([], settings(), rows_per_batch=3, num_ranks=2, hidden_size=64)
    assert plan.ranks == [[[]], [[]]]


def test_lengths_fit_zigzag_blocks_and_sequence_parallel_shares():
    layout = {"tensor": 3, "context": 2, "sequence_parallel": True}
    assert padded_length(13, settings(parallel=layout)) == 24
    assert padded_length(13, settings()) == 16
    packed = settings(parallel=layout, micro_batching="packed", max_tokens_per_microbatch=99)
    assert padded_length(13, packed) == 16
