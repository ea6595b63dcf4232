"""Requests that wait: in order, the foreground first, and each of them can leave at once."""

import itertools

import pytest

from roll_async.rollout.dispatch.requests import PendingRequest
from roll_async.rollout.dispatch.waiting import WaitingRequests


@pytest.fixture
def pending(make):
    ages = itertools.count()
    return lambda name, foreground=False, **more: PendingRequest(
        make(name), None, None, foreground, **{"order": next(ages), **more}
    )


def drain(waiting, **options):
    names = []
    while (first := waiting.pop(**options)) is not None:
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
    assert drain(waiting, foreground_only=False) == ["a", "b", "c", "d"] and len(waiting) == 0


def test_the_foreground_goes_before_all_others_and_alone_when_they_are_set_aside(pending):
    waiting = WaitingRequests()
    waiting.add(pending("a"))
    waiting.add(pending("v", foreground=True))
    assert drain(waiting, foreground_only=True) == ["v"] and len(waiting) == 1
    waiting.add(pending("w", foreground=True))
    assert drain(waiting, foreground_only=False) == ["w", "a"]


def test_later_turns_go_before_what_has_not_begun(pending):
    waiting = WaitingRequests()
    waiting.add(pending("fresh"))
    waiting.add(pending("later", later_turn=True))
    waiting.add(pending("fresh v", foreground=True))
    waiting.add(pending("later v", foreground=True, later_turn=True))
    named = [[p.request.request_id for p in waiting.later_turns(foreground_only=only)] for only in (True, False)]
    assert named == [["later v"], ["later v", "later"]]
    assert drain(waiting, foreground_only=True) == ["later v", "fresh v"]
    assert drain(waiting, foreground_only=False) == ["later", "fresh"]


def test_one_in_the_middle_leaves_and_cannot_leave_twice(pending):
    waiting, middle = WaitingRequests(), pending("b")
    for one in (pending("a"), middle, pending("c")):
        waiting.add(one)
    assert waiting.discard(middle) and not waiting.discard(middle)
    assert drain(waiting, foreground_only=False) == ["a", "c"]
    waiting.add(middle)
    waiting.clear()
    assert len(waiting) == 0 and waiting.pop(foreground_only=False) is None


def test_a_foreground_that_yields_comes_last_until_it_no_longer_yields(pending):
    waiting = WaitingRequests()
    for name, options in {
        "v": {"foreground": True},
        "later v": {"foreground": True, "later_turn": True},
        "a": {},
        "later": {"later_turn": True},
    }.items():
        waiting.add(pending(name, **options))
    waiting.foreground_yields = True
    assert [p.request.request_id for p in waiting] == ["later", "a", "later v", "v"] and waiting.num_background == 2
    assert [p.request.request_id for p in waiting.later_turns(foreground_only=False)] == ["later"]
    waiting.foreground_yields = False
    assert drain(waiting, foreground_only=False) == ["later v", "v", "later", "a"]
