"""A stop ends in bounded time whatever the groups are waiting for, and loses none of them."""

import asyncio

import pytest

from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.rollouter import Rollouter
from roll_async.schema import SamplingParams


class HangsInTheUsersCode(Rollouter):
    async def _custom_generation_logic(self, batch):
        if batch.slot.prompt_index % 2:
            await asyncio.sleep(1e9)


class SwallowsOneCancel(Rollouter):
    async def _custom_generation_logic(self, batch):
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            await asyncio.sleep(1e9)


async def stopped_at(seconds, rollouter_class, managed, replica, scorer, build):
    """What the queue says after a stop, what a later run would begin with, and the seconds of the stop."""
    queue = MessageQueue(QueueOptions(groups_per_batch=4, async_generation_ratio=1.0), MemoryLedger())
    async with managed(replica) as manager:
        options = SchedulerOptions(samples_per_group=2, sampling=SamplingParams(max_new_tokens=10))
        scheduler = ChatCompletionScheduler(manager, scorer, options)

        class Prompts:
            def at(self, index):
                return build.prompt(row_id=str(index))

        rollouter = rollouter_class(queue, scheduler, manager, Prompts(), stop_timeout_s=7.0)
        queue.weights_held(0)
        loop, running = asyncio.get_running_loop(), asyncio.create_task(rollouter.run())
        await asyncio.sleep(seconds)
        began = loop.time()
        await rollouter.stop()
        await running
        return queue.stats(), await queue.checkpoint_state(0), loop.time() - began


@pytest.mark.parametrize("seconds", [1.0, 30.0])
@pytest.mark.parametrize("rollouter_class", [HangsInTheUsersCode, SwallowsOneCancel])
def test_a_hook_that_never_returns_is_cut_short_and_its_prompt_comes_again(
    run, build, replica_class, scorer_class, managed, rollouter_class, seconds
):
    work = stopped_at(seconds, rollouter_class, managed, replica_class("a"), scorer_class(), build)
    stats, position, took_s = run(work)
    assert stats.in_flight == 0 and stats.admitted == stats.dropped + stats.buffered and stats.late_results == 0
    assert stats.dropped >= 4 and set(range(1, 8, 2)) <= set(position["open"])
    assert 7.0 <= took_s <= 8.5


@pytest.mark.parametrize("score_s", [0.5, 1e9])
def test_scores_that_do_not_come_hold_a_stop_up_for_its_deadline_only(
    run, build, replica_class, scorer_class, managed, score_s
):
    scorer = scorer_class(score_s=score_s)
    stats, position, took_s = run(stopped_at(15.0, Rollouter, managed, replica_class("a"), scorer, build))
    assert stats.in_flight == 0 and stats.admitted == stats.dropped + stats.buffered
    assert took_s <= (7.1 if score_s > 1 else 2.0) and set(position["open"]) == set(range(position["next_index"]))
