"""Which replica is next: in proportion to what is free, in turn among equals, never a full one."""

import random
from collections import Counter

from roll_async.rollout.dispatch.load_index import ReplicaChoice


def deal(choice, free, count, affinity=None, avoid=()):
    """Names of `count` choices, each taking a slot; `free` is the truth beside it."""
    names = []
    for _ in range(count):
        name = choice.choose(affinity, avoid)
        names.append(name)
        if name is not None:
            free[name] -= 1
            choice.set(name, free[name])
    return names


def made(**free):
    choice = ReplicaChoice()
    for name, slots in free.items():
        choice.set(name, slots)
    return choice, dict(free)


def test_a_burst_is_dealt_out_in_proportion_to_the_free_slots():
    choice, free = made(a=100, b=50, c=10)
    choice.begin_round()
    assert Counter(deal(choice, free, 32)) == {"a": 20, "b": 10, "c": 2}


def test_a_round_that_begins_anew_looks_at_what_is_free_then():
    choice, free = made(a=100, b=50)
    deal(choice, free, 90)
    free.update(a=0, b=40)
    for name, slots in free.items():
        choice.set(name, slots)
    choice.begin_round()
    assert set(deal(choice, free, 40)) == {"b"} and choice.choose(None, ()) is None


def test_a_replica_without_cache_comes_after_those_with_room_and_still_has_its_slots():
    choice = ReplicaChoice()
    choice.set("full cache", 40, kv=0.0)
    choice.set("roomy", 40, kv=1.0)
    free = {"full cache": 40, "roomy": 40}
    dealt = []
    for _ in range(80):
        name = choice.choose(None, ())
        dealt.append(name)
        free[name] -= 1
        choice.set(name, free[name], kv=float(name == "roomy"))
    assert Counter(dealt[:21]) == {"roomy": 20, "full cache": 1}
    assert Counter(dealt) == {"roomy": 40, "full cache": 40} and choice.choose(None, ()) is None


def test_among_equals_the_one_that_waits_longest_comes_first():
    choice, free = made(a=5, b=5, c=5)
    assert "".join(deal(choice, free, 6)) == "abcabc"


def test_no_full_replica_is_chosen_and_no_free_slot_is_overlooked_whatever_happened_before():
    rng, choice, free = random.Random(3), ReplicaChoice(), {}
    for _ in range(5000):
        name, roll = rng.choice("abcdefgh"), rng.random()
        if roll < 0.1:
            choice.remove(name)
            free.pop(name, None)
        elif roll < 0.5:
            free[name] = rng.randint(-2, 6)
            choice.set(name, free[name], kv=rng.random())
        elif roll < 0.6:
            choice.begin_round()
        else:
            avoid = set(rng.sample("abcdefgh", rng.randint(0, 3)))
            if avoid >= free.keys():
                avoid = set()
            (found,) = deal(choice, free, 1, avoid=avoid)
            possible = {n for n in free if free[n] + (n == found) > 0 and n not in avoid}
            assert (found is None) == (not possible) and (found is None or found in possible)
            assert choice.any_free == any(slots > 0 for slots in free.values())


def test_an_index_without_replicas_has_none_and_forgetting_a_stranger_is_nothing():
    choice = ReplicaChoice()
    choice.remove("nobody")
    assert choice.choose(None, ()) is None and not choice.any_free


def test_a_replica_to_avoid_comes_only_when_it_is_the_only_one():
    choice, free = made(silent=9)
    assert deal(choice, free, 1, avoid={"silent"}) == ["silent"]
    choice.set("busy", 1)
    free["busy"] = 1
    assert deal(choice, free, 2, avoid={"silent"}) == ["busy", None], "another one is there, full or not"
    assert deal(choice, free, 1, avoid={"silent", "busy"}) == ["silent"]


def test_a_key_keeps_its_home_while_there_is_room():
    choice, free = made(a=2, b=1)
    assert deal(choice, free, 1, "x") == ["a"]
    choice.set("b", 9)
    free["b"] = 9
    choice.begin_round()
    assert deal(choice, free, 1, "x") == ["a"] and deal(choice, free, 1, "y") == ["b"], "a new one goes by load"
    assert deal(choice, free, 1, "x") == ["b"], "the home is full"
    assert deal(choice, free, 1, "y", avoid={"b"}) == [None]


def test_a_settled_key_has_its_home_however_busy_until_that_is_gone_or_failed_it():
    choice, _ = made(a=0)
    assert not choice.is_settled("talk") and choice.home("talk", ()) is None
    choice.settle("talk", "a")
    assert choice.is_settled("talk") and choice.home("talk", ()) == "a" and choice.home("talk", {"a"}) is None
    choice.remove("a")
    assert choice.is_settled("talk") and choice.home("talk", ()) is None
    choice.forget("talk")
    assert not choice.is_settled("talk")


def test_a_replica_that_is_gone_is_no_home_and_a_forgotten_key_has_none():
    choice, free = made(a=4)
    assert deal(choice, free, 1, "x") == ["a"]
    choice.remove("a")
    assert choice.choose("x", ()) is None
    choice.set("b", 4)
    assert choice.choose("x", ()) == "b"
    choice.set("c", 8)
    choice.forget("x")
    assert choice.choose("x", ()) == "c"
