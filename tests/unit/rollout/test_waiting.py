"""Requests that wait: in order, the highest priority first, and each of them can leave at once."""

import itertools

import pytest

from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.rollout.dispatch.waiting import VALIDATION_FIRST, VALIDATION_LAST, WaitingRequests


@pytest.fixture
def pending(make):
    ages = itertools.count()
    return lambda name, validation=False, **more: PendingRequest(
        make(name), None, None, validation, **{"order": next(ages), **more}
    )


def drain(waiting, floor=VALIDATION_LAST):
    names = []
    while (first := waiting.pop(floor)) is not None:
        names.append(first.request.request_id)
        assert not waiting.discard(first)
    return names


def test_the_oldest_comes_first_in_whatever_order_they_came(pending):
    waiting, requests = WaitingRequests(), {name: pending(name) for name in "abcd"}
    for name in "cadb":  # replies of a weight push come in any order
        waiting.add(requests[name])
    assert len(waiting) == 4 and [p.request.request_id for p in waiting] == ["a", "b", "c", "d"]
    assert waiting.discard(requests["b"]) and requests["b"] not in waiting
    waiting.add(requests["b"])
    assert drain(waiting) == ["a", "b", "c", "d"] and len(waiting) == 0


def test_a_validation_goes_before_training_and_alone_below_its_floor(pending):
    waiting = WaitingRequests()
    waiting.add(pending("a"))
    waiting.add(pending("v", validation=True))
    assert drain(waiting, VALIDATION_FIRST) == ["v"] and len(waiting) == 1
    waiting.add(pending("w", validation=True))
    assert drain(waiting) == ["w", "a"]


def test_later_turns_go_before_what_has_not_begun(pending):
    waiting = WaitingRequests()
    waiting.add(pending("fresh"))
    waiting.add(pending("later", later_turn=True))
    waiting.add(pending("fresh v", validation=True))
    waiting.add(pending("later v", validation=True, later_turn=True))
    floors = (VALIDATION_FIRST, VALIDATION_LAST)
    named = [[p.request.request_id for p in waiting.later_turns(floor)] for floor in floors]
    assert named == [["later v"], ["later v", "later"]]
    assert drain(waiting, VALIDATION_FIRST) == ["later v", "fresh v"]
    assert drain(waiting) == ["later", "fresh"]


def test_one_in_the_middle_leaves_and_cannot_leave_twice(pending):
    waiting, middle = WaitingRequests(), pending("b")
    for one in (pending("a"), middle, pending("c")):
        waiting.add(one)
    assert waiting.discard(middle) and not waiting.discard(middle)
    assert drain(waiting) == ["a", "c"]
    waiting.add(middle)
    waiting.clear()
    assert len(waiting) == 0 and waiting.pop(VALIDATION_LAST) is None


def test_a_validation_that_yields_comes_last_until_it_no_longer_yields(pending):
    waiting = WaitingRequests()
    for name, options in {
        "v": {"validation": True},
        "later v": {"validation": True, "later_turn": True},
        "a": {},
        "later": {"later_turn": True},
    }.items():
        waiting.add(pending(name, **options))
    waiting.validation_priority = VALIDATION_LAST
    assert [p.request.request_id for p in waiting] == ["later", "a", "later v", "v"] and waiting.num_training == 2
    assert [p.request.request_id for p in waiting.later_turns(VALIDATION_LAST)] == ["later"]
    waiting.validation_priority = VALIDATION_FIRST
    assert drain(waiting) == ["later v", "v", "later", "a"]
