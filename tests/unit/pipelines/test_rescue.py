"""When a role fails that is not the trainer, what was trained is saved before the error is raised."""

import asyncio

import pytest

from roll_async.buffer.errors import LedgerError, StallError, TooManyFailures
from roll_async.pipelines.protocol import TrainerState
from roll_async.weight_sync.protocol import SyncFailed


async def broken_at(done, seconds, error):
    """The run, and the rollouter fails then."""
    running = asyncio.create_task(done.go())
    await asyncio.sleep(seconds)
    done.rollouter._manager._failure.set_exception(error)
    with pytest.raises(BaseExceptionGroup) as raised:
        await running
    done.ended_s, done.stats = asyncio.get_running_loop().time(), done.queue.stats()
    return cause(raised.value)


def cause(error):
    return cause(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@pytest.mark.parametrize("seconds", [0.5, 12.5, 20.0, 27.9, 31.0, 36.5, 44.4])
@pytest.mark.parametrize("sync_every", [1, 2])
def test_whenever_the_rollout_fails_the_last_whole_step_is_finished_published_and_saved(
    run, a_run, seconds, sync_every
):
    hit = a_run(steps=50, sync_every=sync_every)
    error = run(broken_at(hit, seconds, TooManyFailures("one too many")))
    assert type(error) is TooManyFailures
    whole = [step for step, _ in hit.learned]
    assert whole == list(range(1, len(whole) + 1)) and len(hit.published) == len(whole)
    assert hit.saved == whole[-1:], "the step that was under way is not lost"
    stats = hit.stats
    assert stats.trained == 4 * len(whole) and stats.training == 0 and len(set(hit.rows)) == 4 * len(whole)
    assert hit.ended_s <= seconds + hit.learn_s
    assert hit.pipeline.rescued == (f"step {len(whole)} is saved" if whole else "no step was trained")


def test_a_step_that_lacks_groups_is_not_waited_for_and_what_the_weights_went_past_is_not_saved(run, a_run):
    hit = a_run(steps=50, parts=2, ratio=0.0)

    async def go():
        running = asyncio.create_task(hit.go())
        while not (len(hit.learned) == 3 and hit.trainer.state is TrainerState.LEARNING):
            await asyncio.sleep(0.1)
        hit.rollouter._manager._failure.set_exception(ConnectionError("no engine is left"))
        with pytest.raises(BaseExceptionGroup):
            await running

    run(go())
    assert [step for step, _ in hit.learned] == [1, 1, 2] and hit.saved == []
    assert hit.pipeline.rescued == "step 1 is not saved: the weights hold a part of the next one"


def test_a_save_that_fails_or_hangs_hides_nothing_and_ends_in_time(run, a_run, caplog):
    hit, slow = a_run(steps=50), a_run(steps=50)

    async def no_space(step):
        raise OSError("no space left on device")

    hit.save = no_space
    assert str(run(broken_at(hit, 30.0, LedgerError("the ledger is corrupt")))) == "the ledger is corrupt"
    assert "could not be saved: no space left on device" in caplog.text
    slow.save_s = 1e6
    error = run(broken_at(slow, 30.0, TooManyFailures("one too many")))
    assert type(error) is TooManyFailures and slow.saved == []
    assert slow.ended_s <= 30.0 + slow.learn_s + slow.plan.rescue_timeout_s


def test_a_save_that_failed_is_not_tried_again_by_the_rescue(run, a_run, caplog):
    """It was the end of the run: what failed once may have written a part, and its reason is the one to read."""
    hit, tried = a_run(steps=50, save_every=2), []

    async def no_space(step):
        tried.append(step)
        raise OSError("no space left on device")

    hit.save = no_space
    with pytest.raises(BaseExceptionGroup) as raised:
        run(hit.go())
    assert raised.group_contains(OSError, match="no space left") and tried == [2]
    assert hit.pipeline.rescued == "step 2 could not be saved"
    assert "step 2 could not be saved: its save failed before" in caplog.text


def test_a_trainer_that_fails_while_its_step_is_finished_is_not_the_first_error_and_is_not_saved(run, a_run):
    hit = a_run(steps=50)
    learn = hit.learn

    async def hangs_in_the_third(groups, step):
        if step == 3:
            await asyncio.sleep(20)
            raise StallError("actor_train rank 0: update_policy did not return")
        return await learn(groups, step)

    hit.learn = hangs_in_the_third

    async def go():
        running = asyncio.create_task(hit.go())
        while not (hit.trainer.trained == 2 and hit.trainer.finishing):
            await asyncio.sleep(0.1)
        hit.rollouter._manager._failure.set_exception(ConnectionError("no engine is left"))
        with pytest.raises(BaseExceptionGroup) as raised:
            await running
        return [type(cause(error)) for error in raised.value.exceptions]

    assert run(go()) == [ConnectionError, StallError] and hit.saved == []


def test_a_push_that_reaches_nobody_is_published_and_saved_and_a_stalled_queue_too(run, a_run):
    hit = a_run(steps=50)
    push = hit.sync.push

    async def reaches_nobody(version):
        if version == 2:
            raise SyncFailed("version 2 reached no engine")
        return await push(version)

    hit.sync.push = reaches_nobody
    with pytest.raises(BaseExceptionGroup) as raised:
        run(hit.go())
    assert raised.group_contains(SyncFailed) and hit.saved == [2] and len(hit.published) == 2

    stalled = a_run(steps=50)
    take = stalled.queue.take_batch

    async def nothing_moves(step, num_groups=None):
        if step == 4:
            raise StallError("nothing moved")
        return await take(step, num_groups)

    stalled.queue.take_batch = nothing_moves
    with pytest.raises(BaseExceptionGroup) as raised:
        run(stalled.go())
    assert raised.group_contains(StallError) and stalled.saved == [3]


def test_a_step_whose_queue_is_lost_after_it_was_learned_is_published_dumped_and_saved(run, a_run):
    hit = a_run(steps=50)
    freshness = hit.queue.freshness

    async def lost(step):
        if step == 3:
            raise ConnectionError("rollout process: process is gone")
        return await freshness(step)

    hit.queue.freshness = lost
    with pytest.raises(BaseExceptionGroup) as raised:
        run(hit.go())
    assert raised.group_contains(ConnectionError)
    assert len(hit.published) == 3 and hit.published[-1]["staleness/max"] >= 0 and hit.saved == [3]
