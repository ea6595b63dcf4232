"""The prompt stream: random access, whole epochs, exact shares."""

import random
from array import array
from collections import Counter

import pytest

from roll_async.prompts.stream import ShuffledPrompts
from roll_async.schema import Prompt


def prompts(domain, count):
    return [
        Prompt(row_id=f"{domain}{i}", token_ids=array("i", [1]), domain=domain, ground_truth="") for i in range(count)
    ]


def ids(stream, start, stop):
    return [stream.at(i).row_id for i in range(start, stop)]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    stream = ShuffledPrompts({"a": prompts("a", 50)}, seed=1)
    epochs = [ids(stream, 50 * e, 50 * (e + 1)) for e in range(4)]
    rows = {f"a{i}" for i in range(50)}
    assert all(set(epoch) == rows for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_position_means_the_same_prompt_in_any_order_of_asking_and_after_a_restart():
    by_domain = {"a": prompts("a", 17), "b": prompts("b", 5)}
    forward = ids(ShuffledPrompts(by_domain, seed=3), 0, 200)
    restarted = ShuffledPrompts(by_domain, seed=3)
    positions = list(range(200))
    random.Random(0).shuffle(positions)
    assert {i: restarted.at(i).row_id for i in positions} == dict(enumerate(forward))


def test_another_seed_is_another_order():
    rows = {"a": prompts("a", 50)}
    assert ids(ShuffledPrompts(rows, seed=1), 0, 50) != ids(ShuffledPrompts(rows, seed=2), 0, 50)


def test_without_probabilities_one_epoch_over_all_domains_is_every_row_once():
    by_domain = {"a": prompts("a", 31), "b": prompts("b", 7), "c": prompts("c", 1)}
    stream = ShuffledPrompts(by_domain, seed=5, num_epochs=2)
    for epoch in range(2):
        found = ids(stream, 39 * epoch, 39 * (epoch + 1))
        assert len(set(found)) == 39


@pytest.mark.parametrize(
    "probabilities",
    [{"a": 0.9, "b": 0.1}, {"a": 0.25, "b": 0.75}, {"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.25, "c": 0.25}],
)
def test_every_prefix_holds_each_domain_within_one_of_its_share(probabilities):
    stream = ShuffledPrompts({d: prompts(d, 3) for d in probabilities}, seed=0, probabilities=probabilities)
    seen = dict.fromkeys(probabilities, 0)
    for position in range(1, 500):
        seen[stream.at(position - 1).domain] += 1
        assert all(abs(seen[d] - probabilities[d] * position) <= 1 for d in seen)


def test_a_small_domain_with_a_large_share_repeats_its_rows_evenly():
    by_domain = {"a": prompts("a", 4), "b": prompts("b", 96)}
    counts = Counter(ids(ShuffledPrompts(by_domain, seed=1, probabilities={"a": 0.5, "b": 0.5}), 0, 200))
    assert {counts[f"a{i}"] for i in range(4)} == {25}


def test_the_end_of_the_data_is_none_from_there_on():
    stream = ShuffledPrompts({"a": prompts("a", 4)}, seed=0, num_epochs=2)
    assert [stream.at(i) is None for i in (0, 7, 8, 9, 1000)] == [False, False, True, True, True]


def test_without_an_end_the_stream_goes_on():
    assert ShuffledPrompts({"a": prompts("a", 3)}, seed=0).at(10**9) is not None


def test_a_requeued_prompt_of_the_epoch_before_costs_no_new_shuffle():
    stream = ShuffledPrompts({"a": prompts("a", 1000)}, seed=0)
    first = stream.at(999).row_id
    stream.at(1001)
    before = stream._orders[0, 0]
    assert stream.at(999).row_id == first and stream._orders[0, 0] is before
    stream.at(5000)
    assert set(stream._orders) == {(0, 5)}
