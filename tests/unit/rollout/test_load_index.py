"""The least busy key, against a search over all of them."""

import random

from roll_async.rollout.load_index import LoadIndex, ReplicaChoice


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


def test_a_full_replica_is_not_chosen_and_a_key_keeps_its_home_while_there_is_room():
    choice = ReplicaChoice(limit=2)
    choice.set("a", 0)
    choice.set("b", 1)
    assert choice.choose("x", None) == "a"
    choice.set("a", 1)
    choice.set("b", 0)
    assert choice.choose("x", None) == "a" and choice.choose("y", None) == "b", "a key stays, a new one goes by load"
    assert choice.choose("x", "a") == "b", "not back to where it failed"
    choice.set("a", 2)
    choice.set("b", 2)
    assert choice.choose("x", None) is None and choice.choose(None, None) is None


def test_a_settled_key_has_its_home_however_busy_until_that_is_gone_or_failed_it():
    choice = ReplicaChoice(limit=1)
    choice.set("a", 7)
    assert not choice.is_settled("talk") and choice.home("talk", None) is None
    choice.settle("talk", "a")
    assert choice.is_settled("talk") and choice.home("talk", None) == "a" and choice.home("talk", "a") is None
    choice.remove("a")
    assert choice.is_settled("talk") and choice.home("talk", None) is None
    choice.forget("talk")
    assert not choice.is_settled("talk")


def test_a_replica_that_is_gone_is_no_home_and_a_forgotten_key_has_none():
    choice = ReplicaChoice(limit=4)
    choice.set("a", 0)
    assert choice.choose("x", None) == "a"
    choice.remove("a")
    assert choice.choose("x", None) is None
    choice.set("b", 0)
    assert choice.choose("x", None) == "b"
    choice.set("c", 0)
    choice.set("b", 1)
    choice.forget("x")
    assert choice.choose("x", None) == "c"
