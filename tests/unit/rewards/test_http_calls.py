"""The attempts of one HTTP call: how many there are, and what is waited for between them."""

import asyncio
from collections.abc import Sequence

import pytest

from roll_async.rewards.serving.http_calls import Backoff, Trouble

AT_ONCE, NEVER = Backoff(first_s=0.0, longest_s=0.0), Backoff(first_s=3600.0, longest_s=3600.0)
BUSY, ASKED_BACK = Trouble(reason="busy"), Trouble(reason="busy", pause_s=0.0)


def called(backoff: Backoff, script: Sequence[str | Trouble | Exception], max_retries: int):
    """(what the call gives, number of attempts)"""
    attempts = []

    async def attempt():
        attempts.append(script[len(attempts)])
        if isinstance(attempts[-1], Exception):
            raise attempts[-1]
        return attempts[-1]

    async def go():
        async with asyncio.timeout(10):
            return await backoff.answer(attempt, max_retries)

    return asyncio.run(go()), len(attempts)


def test_attempts_end_with_the_first_answer():
    assert called(AT_ONCE, ["yes"], 3) == ("yes", 1)
    assert called(AT_ONCE, [BUSY, BUSY, "yes", "no"], 2) == ("yes", 3)


@pytest.mark.parametrize("max_retries", [0, 1, 4])
def test_a_call_without_an_answer_gives_the_trouble_of_every_attempt(max_retries):
    script = [Trouble(reason=str(i), unreadable=i == 1) for i in range(9)]
    assert called(AT_ONCE, script, max_retries) == (script[: max_retries + 1], max_retries + 1)


def test_what_an_attempt_raises_is_not_tried_again():
    with pytest.raises(ConnectionError, match="gone"):
        called(NEVER, [ConnectionError("gone"), "yes"], 3)


def test_the_pause_that_a_server_asks_for_replaces_the_own_one():
    assert called(NEVER, [ASKED_BACK, "yes"], 1) == ("yes", 2)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(NEVER.answer(lambda: asyncio.sleep(0, BUSY), 1), timeout=0.05))


def test_nothing_waits_after_the_last_attempt():
    assert called(NEVER, [ASKED_BACK, BUSY], 1) == ([ASKED_BACK, BUSY], 2)


def test_pauses_double_up_to_the_longest_and_differ_between_callers():
    backoff = Backoff(first_s=1.0, longest_s=5.0)
    for attempt, whole_s in enumerate([1, 2, 4, 5, 5]):
        pauses = [backoff.pause_s(attempt) for _ in range(50)]
        assert whole_s / 2 <= min(pauses) < max(pauses) <= whole_s
