"""Ranks that do not answer are named long before the deadline of their call."""

import asyncio
import logging

import pytest

pytest.importorskip("ray")

from roll_async.buffer.errors import StallError
from roll_async.cluster.roles.trainer_group import RankCalls, RayTrainerGroup


class Rank:
    """Its calls take as long as their argument says."""

    async def takes(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    update_policy = start = save = takes


def asked(run, caplog, *rounds, call=RankCalls.update_policy):
    """What is told of rounds of calls, each with the seconds that the ranks take."""
    group = RayTrainerGroup("actor_train", [], bucket_bytes=1, rpc_timeout_s=600.0)
    group._ranks = [Rank(), Rank()]

    async def go():
        for seconds in rounds:
            assert await group._each(call, [(s,) for s in seconds]) == list(seconds)

    with caplog.at_level(logging.WARNING, logger="roll_async"):
        run(go())
    return caplog.messages


def test_a_rank_that_is_silent_for_a_minute_is_named_once_and_waited_for(run, caplog):
    (told,) = asked(run, caplog, (1.0, 130.0))
    assert told.startswith("actor_train rank 1: update_policy, begun at ")
    assert "has not returned for 60 s; the run waits until 600 s (fault.rpc_timeout)" in told


def test_a_step_that_takes_as_long_as_the_last_one_is_not_told(run, caplog):
    assert len(asked(run, caplog, (1.0, 20.0), (90.0, 90.0), (130.0, 90.0))) == 1


def test_the_start_of_a_large_model_is_not_told(run, caplog):
    assert asked(run, caplog, (300.0, 300.0), call=RankCalls.start) == []


def test_the_deadline_stays_what_it_was(run, caplog):
    with pytest.raises(StallError, match="ranks 0, 1: save did not return within 600 s"):
        asked(run, caplog, (700.0, 700.0), call=RankCalls.save)
    assert len(caplog.messages) == 1 and "ranks 0, 1: save" in caplog.messages[0]
