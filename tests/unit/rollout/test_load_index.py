"""The least busy key, against a search over all of them."""

import random

from roll_async.rollout.load_index import LoadIndex


def test_least_is_a_key_of_the_lowest_load_whatever_happened_before():
    rng, index, loads = random.Random(3), LoadIndex(), {}
    for _ in range(5000):
        key = rng.randrange(12)
        if rng.random() < 0.1:
            index.remove(key)
            loads.pop(key, None)
        else:
            loads[key] = max(0, loads.get(key, 0) + rng.choice((-3, -1, 1, 1, 5)))
            index.set(key, loads[key])
        found = index.least()
        assert (found is None) == (not loads)
        assert found is None or loads[found] == min(loads.values())
        assert all((k in index) == (k in loads) for k in range(12))
        assert all(index.load(k) == load for k, load in loads.items())


def test_among_equally_busy_keys_the_one_that_waits_longest_comes_first():
    index = LoadIndex()
    for key in "abc":
        index.set(key, 0)
    dealt = []
    for _ in range(6):
        key = index.least()
        dealt.append(key)
        index.set(key, index.load(key) + 1)
    assert "".join(dealt) == "abcabc"


def test_an_empty_index_has_no_least_and_forgetting_a_stranger_is_nothing():
    index = LoadIndex()
    index.remove("nobody")
    assert index.least() is None
    index.set("a", 7)
    assert index.least() == "a"
    index.remove("a")
    assert index.least() is None and "a" not in index


def test_a_key_to_avoid_comes_only_when_it_is_the_only_one():
    index = LoadIndex()
    index.set("silent", 0)
    assert index.least(but="silent") == "silent" and index.least(but="stranger") == "silent"
    index.set("busy", 9)
    index.set("busier", 10)
    assert index.least(but="silent") == "busy" and index.least() == "silent"
    index.remove("silent")
    assert index.least(but="silent") == "busy"
