"""The queue alone: who gets a slot, what makes a batch, what a late or repeated result does."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from roll_async.buffer.errors import EndOfData, LedgerError, QueueClosed, StallError, TooManyFailures
from roll_async.buffer.fingerprint import same_or_regenerate, stream_fingerprint
from roll_async.buffer.ledger import MemoryLedger, SqliteLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions, ReleaseReason
from roll_async.config.api import load
from roll_async.config.staleness import StalenessPolicy
from roll_async.schema import FinishReason, Prompt


def make_queue(held=0, ledger=None, **options):
    queue = MessageQueue(QueueOptions(**{"groups_per_batch": 2, **options}), ledger or MemoryLedger())
    if held is not None:
        queue.weights_held(held)
    return queue


async def soon(work):
    """The result of `work` when it is there at once, else None."""
    task = asyncio.ensure_future(work)
    for _ in range(10):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


@pytest.fixture
def finish(build):
    async def put(queue, *slots, version=None, **fields):
        for slot in slots:
            admitted = slot.admitted_version if version is None else version
            await queue.put(build.group(slot.group_id, admitted, **fields))

    return put


def test_slots_are_given_out_in_order_up_to_the_admission_limit(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=0.5)
        slots = await queue.reserve(10)
        assert [(s.group_id, s.prompt_index, s.admitted_version, s.attempt) for s in slots] == [
            (i, i, 0, 0) for i in range(3)
        ]
        await finish(queue, *slots)
        await queue.take_batch(1)
        await queue.step_trained(1)
        assert await soon(queue.reserve(1)) is None, "training frees no slot; engines holding its weights do"
        queue.weights_held(1)
        assert [(s.prompt_index, s.admitted_version) for s in await queue.reserve(10)] == [(3, 1), (4, 1)]

    run(go())


def test_no_slot_before_the_first_weights(run):
    async def go():
        queue = make_queue(held=None)
        assert await soon(queue.reserve(1)) is None
        queue.weights_held(0)
        assert len(await queue.reserve(1)) == 1

    run(go())


def test_a_batch_is_the_oldest_finished_groups_and_waits_until_it_is_full(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=1.0)
        slots = await queue.reserve(4)
        await finish(queue, slots[3])
        assert await soon(queue.take_batch(1)) is None
        await finish(queue, slots[1], slots[0])
        assert [g.group_id for g in await queue.take_batch(1)] == [0, 1]

    run(go())


def test_younger_groups_are_not_taken_when_an_older_one_would_then_be_too_late(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=1.0)
        slots = await queue.reserve(4)
        await finish(queue, *slots[:2])
        await queue.take_batch(1)
        await queue.step_trained(1)
        queue.weights_held(1)
        younger = await queue.reserve(4)
        await finish(queue, *younger)
        assert await soon(queue.take_batch(2)) is None, "groups 2 and 3 are due at step 2"
        await finish(queue, *slots[2:])
        assert [g.group_id for g in await queue.take_batch(2)] == [2, 3]

    run(go())


def test_a_result_of_a_released_or_unknown_group_is_refused_and_counted(run, finish, build):
    async def go():
        queue = make_queue()
        first, second = await queue.reserve(2)
        await queue.release(first.group_id, ReleaseReason.REQUEUED)
        await finish(queue, first)
        await finish(queue, second, second)
        await queue.put(build.group(99))
        await queue.release(second.group_id, ReleaseReason.FAILED, "twice")
        stats = queue.stats()
        assert (stats.late_results, stats.buffered, stats.dropped, stats.failed) == (4, 1, 1, 0)

    run(go())


def test_a_requeued_prompt_comes_again_first_with_its_attempt_counted(run):
    async def go():
        queue = make_queue(groups_per_batch=3)
        slots = await queue.reserve(3)
        for slot in (slots[2], slots[0]):
            await queue.release(slot.group_id, ReleaseReason.REQUEUED, "interrupted")
        again = await queue.reserve(3)
        assert [(s.prompt_index, s.attempt, s.group_id) for s in again] == [(0, 1, 3), (2, 1, 4)]

    run(go())


@pytest.mark.parametrize("outcome", [ReleaseReason.FILTERED, ReleaseReason.FAILED])
def test_a_filtered_or_failed_prompt_frees_its_slot_for_the_next_prompt(run, outcome):
    async def go():
        queue = make_queue()
        slots = await queue.reserve(2)
        assert await soon(queue.reserve(1)) is None
        await queue.release(slots[0].group_id, outcome, "why")
        assert [s.prompt_index for s in await queue.reserve(5)] == [2]

    run(go())


def test_one_failure_too_many_ends_the_run_with_the_last_reasons(run):
    async def go():
        queue = make_queue(groups_per_batch=8, max_failed_groups=2)
        slots = await queue.reserve(8)
        await queue.release(slots[0].group_id, ReleaseReason.FAILED, "first")
        await queue.release(slots[1].group_id, ReleaseReason.FAILED, "second")
        with pytest.raises(TooManyFailures, match="3 groups.*max_failed_groups=2.*prompt 1: second; prompt 2: third"):
            await queue.release(slots[2].group_id, ReleaseReason.FAILED, "third")

    run(go())


def test_a_half_group_never_enters(run, finish):
    async def go():
        queue = make_queue(samples_per_group=2)
        (slot, other) = await queue.reserve(2)
        await finish(queue, slot)
        with pytest.raises(AssertionError, match="not whole"):
            await finish(queue, other, scores=(1.0,))

    run(go())


def test_the_one_answer_of_a_supervised_row_is_a_whole_group(run, build):
    async def go():
        queue = make_queue(samples_per_group=2)
        (slot,) = await queue.reserve(1)
        group = build.group(slot.group_id, slot.admitted_version, scores=(0.0,))
        given = replace(group, prompt=replace(group.prompt, answer_ids=group.samples[0].response_token_ids))
        assert await queue.put(given) is not False

    run(go())


def test_what_is_too_old_is_dropped_under_policy_drop_and_its_prompt_comes_again(run, finish):
    async def go():
        options = {"async_generation_ratio": 2.0, "max_versions": 0, "policy": StalenessPolicy.DROP}
        queue = make_queue(**options)
        slots = await queue.reserve(6)
        await finish(queue, *slots[:4], length=5)
        assert [g.group_id for g in await queue.take_batch(1)] == [0, 1]
        await queue.step_trained(1)
        queue.weights_held(1)
        assert await soon(queue.take_batch(2)) is None
        stats = queue.stats()
        assert (stats.dropped_stale, stats.dropped, stats.requeued_prompts) == (2, 2, 2)
        assert stats.dropped_by_length == {8: 4}, "lengths 5 count in (4, 8], two samples per group"
        again = await queue.reserve(2)
        assert [(s.prompt_index, s.attempt) for s in again] == [(2, 1), (3, 1)]
        await finish(queue, *again)
        assert [g.prompt.row_id for g in await queue.take_batch(2)] == [f"row{s.group_id}" for s in again]

    run(go())


@pytest.mark.parametrize("policy", list(StalenessPolicy))
def test_what_is_too_old_by_time_is_dropped_under_every_policy_and_its_prompt_comes_again(run, build, caplog, policy):
    """The data ended: its slots are those of the dropped groups alone. The second batch comes while the step waits."""

    async def put(queue, slots):
        for slot in slots:
            await queue.put(build.group(slot.group_id, 0, admitted_s=asyncio.get_running_loop().time()))

    async def go():
        queue = make_queue(async_generation_ratio=1.0, policy=policy, max_age_s=60.0, batch_timeout_s=30.0)
        await put(queue, await queue.reserve(4))
        queue.end_of_data()
        await asyncio.sleep(60)
        assert [g.group_id for g in await queue.take_batch(1)] == [0, 1], "60 s are within the bound"
        await queue.step_trained(1)
        await asyncio.sleep(1)
        step = asyncio.create_task(queue.take_batch(2))
        again = await queue.reserve(2)
        assert [(s.prompt_index, s.attempt) for s in again] == [(2, 1), (3, 1)]
        stats = queue.stats()
        assert (stats.dropped_stale, stats.dropped, stats.dropped_by_length) == (2, 2, {2: 4})
        await asyncio.sleep(40)
        await put(queue, again)
        assert [g.group_id for g in await step] == [s.group_id for s in again]

    run(go())
    assert "2 groups older than staleness.max_age_s=60 were dropped meanwhile" in caplog.text


def test_what_finishes_too_late_is_counted_by_length_and_what_was_cut_short_as_censored(run, finish, build):
    async def go():
        queue = make_queue(oversample_groups=3)
        slots = await queue.reserve(10)
        assert len(slots) == 5
        await finish(queue, *slots[:2], length=3)
        await queue.take_batch(1)
        assert not await queue.put(build.group(slots[2].group_id, length=100))
        prompt = build.prompt()
        whole, cut = build.sample(prompt, range(6)), build.sample(prompt, range(50), finish_reason=FinishReason.ABORT)
        await queue.release(
            slots[3].group_id,
            ReleaseReason.REQUEUED,
            "aborted",
            group=build.group(slots[3].group_id, samples=(whole, cut)),
        )
        await queue.step_trained(1)
        stats = queue.stats()
        assert (stats.dropped, stats.dropped_surplus, stats.dropped_stale) == (2, 1, 0)
        assert stats.dropped_by_length == {128: 2}
        assert (stats.generated_samples, stats.generated_tokens) == (4 + 2 + 1, 4 * 3 + 2 * 100 + 6)
        # Of 8 answers 4 end at 3, 1 at 6; of the 3 longer ones one is cut at 50, the other two reach 100.
        model = 3 + 1 / 2 * 3 + 3 / 8 * 94
        assert stats.mean_generated_length == pytest.approx(model)
        assert stats.length_bias == pytest.approx(3 / model), "the batch is shorter than what the model answers"

    run(go())


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_a_synchronous_batch_makes_the_rest_surplus_under_every_policy_and_none_of_it_a_head_start(run, finish, policy):
    async def go():
        queue = make_queue(oversample_groups=2, policy=policy, max_versions=4)
        slots = await queue.reserve(10)
        assert await soon(queue.early_stop()) is None
        await finish(queue, slots[3], slots[1])
        assert await soon(queue.early_stop()) is None, "the trainer has not come for the batch"
        assert [g.group_id for g in await queue.take_batch(1)] == [1, 3]
        assert await soon(queue.early_stop()) == [0, 2]
        assert await soon(queue.early_stop([0])) == [0, 2] and await soon(queue.early_stop([0, 2])) is None
        await queue.release(0, ReleaseReason.REQUEUED)
        assert await soon(queue.early_stop()) == [2]

    run(go())


def test_slot_and_prompt_of_a_surplus_group_stay_closed_until_the_next_push(run, finish):
    async def go():
        queue = make_queue(oversample_groups=2)
        slots = await queue.reserve(10)
        await finish(queue, *slots[:2])
        await queue.take_batch(1)
        for group_id in await queue.early_stop():
            await queue.release(group_id, ReleaseReason.REQUEUED)
        assert await soon(queue.reserve(10)) is None, "under the same weights they would be surplus once more"
        assert queue.stats().requeued_prompts == 2 and (await queue.checkpoint_state(1))["open"] == [2, 3]
        await queue.step_trained(1)
        assert await soon(queue.reserve(10)) is None
        queue.weights_held(1)
        again = await queue.reserve(10)
        assert [(s.prompt_index, s.attempt) for s in again] == [(2, 1), (3, 1), (4, 0), (5, 0)]

    run(go())


def test_closed_prompts_come_again_at_once_when_the_trainer_has_nothing_else_to_wait_for(run, finish):
    async def go():
        queue = make_queue(oversample_groups=2)
        slots = await queue.reserve(10)
        await finish(queue, *slots[:2])
        await queue.take_batch(1, 1)
        queue.end_of_data()
        for group_id in await queue.early_stop():
            await queue.release(group_id, ReleaseReason.REQUEUED)
        await queue.take_batch(1, 1)
        await queue.step_trained(1)  # its push fails, or comes later: the data is not over yet
        taking = asyncio.ensure_future(queue.take_batch(2))
        await asyncio.sleep(0)
        assert not taking.done() and queue.stats().requeued_prompts == 2
        queue.weights_held(1)
        await finish(queue, *await queue.reserve(10))
        assert [g.group_id for g in await taking] == [4, 5]

    run(go())


@pytest.mark.parametrize("policy", [StalenessPolicy.DROP, StalenessPolicy.TOKEN_MASK])
def test_what_a_later_step_can_still_train_is_its_head_start_and_no_surplus(run, finish, policy):
    async def go():
        queue = make_queue(oversample_groups=1, async_generation_ratio=1.0, policy=policy, max_versions=1)
        slots = await queue.reserve(10)
        await finish(queue, *slots[:2])
        await queue.take_batch(1)
        assert await soon(queue.early_stop()) is None, "two of the three in flight are the next batch"
        await queue.step_trained(1)
        await finish(queue, *slots[2:4])
        await queue.take_batch(2)
        assert await soon(queue.early_stop()) == [4], "nothing more fits, and at step 3 it would be too old"

    run(go())


def test_under_policy_token_mask_groups_stay_as_long_as_one_of_their_trained_tokens_is_within_the_bound(run, build):
    async def go():
        options = {"async_generation_ratio": 2.0, "max_versions": 0, "policy": StalenessPolicy.TOKEN_MASK}
        queue = make_queue(**options)
        slots = await queue.reserve(6)
        old, mixed = ((0, 4),), ((0, 1), (1, 3))
        tool_tokens_at_the_end = b"\x01\x00\x00\x00"
        queue.weights_held(1)
        for slot, runs, mask in zip(
            slots, (old, old, old, mixed, mixed, mixed), [b"\x01" * 4] * 5 + [b""], strict=True
        ):
            sample = build.sample(build.prompt(), range(4), runs, loss_mask=mask or tool_tokens_at_the_end)
            await queue.put(build.group(slot.group_id, samples=(sample,)))
        await queue.take_batch(1)
        await queue.step_trained(1)
        assert [g.group_id for g in await queue.take_batch(2)] == [3, 4]
        fresh = await queue.freshness(2)
        assert fresh.max_versions == 1 and fresh.tokens_by_versions == {0: 6, 1: 2}
        assert queue.stats().dropped_stale == 2, "groups 2 and 5 have no token left to train"

    run(go())


def test_the_bound_of_a_running_queue_is_moved_and_less_than_a_batch_is_refused(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=3.0, max_queue_size=2)
        slots = await queue.reserve(9)
        assert len(slots) == 2
        waiting = asyncio.create_task(queue.reserve(9))
        await asyncio.sleep(1)
        queue.resize(5)
        slots += await waiting
        assert len(slots) == 5, "who waits for a slot gets it at once"
        with pytest.raises(ValueError, match="max_queue_size 1 cannot hold the 2 groups of one batch; give at least 2"):
            queue.resize(1)
        queue.resize(3)
        await finish(queue, *slots)
        assert queue.stats().buffered == 5, "nothing is evicted"
        await queue.take_batch(1)
        assert await soon(queue.reserve(9)) is None
        queue.resize(5)
        assert len(await queue.reserve(9)) == 2

    run(go())


def test_no_new_group_starts_while_a_finished_one_is_older_than_soft_versions(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=3.0, soft_versions=0)
        slots = await queue.reserve(8)
        await finish(queue, *slots[:4])
        await queue.take_batch(1)
        await queue.step_trained(1)
        queue.weights_held(1)
        assert queue.stats().stale_waiting == 2 and await soon(queue.reserve(1)) is None
        await queue.take_batch(2)
        assert queue.stats().stale_waiting == 0 and len(await queue.reserve(9)) == 2

    run(go())


def test_the_size_of_the_queue_and_oversampling_bound_what_is_under_way(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=3.0, max_queue_size=3, oversample_groups=1)
        slots = await queue.reserve(99)
        assert len(slots) == 4
        await finish(queue, *slots[:2])
        assert await soon(queue.reserve(1)) is None
        await queue.take_batch(1)
        assert len(await queue.reserve(99)) == 2

    run(go())


def test_the_data_ends_when_no_full_batch_can_come(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=1.0)
        slots = await queue.reserve(4)
        await queue.release(slots[3].group_id, ReleaseReason.UNUSED)
        queue.end_of_data()
        await finish(queue, slots[0], slots[1])
        await queue.take_batch(1)
        await queue.step_trained(1)
        waiting = asyncio.ensure_future(queue.take_batch(2))
        assert await soon(asyncio.shield(waiting)) is None, "group 2 is still in flight"
        await finish(queue, slots[2])
        with pytest.raises(EndOfData, match="1 finished groups, fewer than the 2") as raised:
            await waiting
        assert raised.value.leftovers == 1 and await queue.reserve(1) == []
        assert queue.stats().admitted == 3, "an unused slot was never admitted"

    run(go())


def test_a_checkpoint_after_the_end_of_the_data_counts_no_prompt_that_is_not_there(run, finish):
    async def go():
        queue = make_queue()
        first, *beyond = await queue.reserve(4)
        for slot in beyond:
            await queue.release(slot.group_id, ReleaseReason.UNUSED)
            queue.end_of_data()
        state = await queue.checkpoint_state(1)
        assert (state["next_index"], state["open"]) == (first.prompt_index + 1, [first.prompt_index])

    run(go())


def test_a_requeued_prompt_still_comes_after_the_end_of_the_data(run, finish):
    async def go():
        queue = make_queue()
        slots = await queue.reserve(2)
        queue.end_of_data()
        await queue.release(slots[0].group_id, ReleaseReason.REQUEUED)
        (again,) = await queue.reserve(5)
        await finish(queue, slots[1], again)
        assert len(await queue.take_batch(1)) == 2

    run(go())


def test_closing_wakes_everyone_who_waits(run, finish):
    async def go():
        queue = make_queue()
        slots = await queue.reserve(2)
        await finish(queue, slots[0])
        reserving, taking = asyncio.ensure_future(queue.reserve(1)), asyncio.ensure_future(queue.take_batch(1))
        await asyncio.sleep(1)
        queue.close()
        assert await reserving == []
        with pytest.raises(QueueClosed) as raised:
            await taking
        assert raised.value.leftovers == 1

    run(go())


def test_a_stall_says_who_waits_for_what_and_progress_puts_it_off(run, finish):
    async def go():
        queue = make_queue(batch_timeout_s=10.0, stall_timeout_s=60.0)
        slots = await queue.reserve(2)
        loop = asyncio.get_running_loop()
        taking = asyncio.ensure_future(queue.take_batch(1))
        await asyncio.sleep(50)
        await finish(queue, slots[0])
        with pytest.raises(
            StallError,
            match="nothing moved for 60 s.*step 1: 1 of 2 groups are finished; groups 1 .110 s. in flight, 1 of",
        ):
            await taking
        assert loop.time() == pytest.approx(110)

    run(go())


def test_the_counts_add_up_after_every_call(run, finish):
    async def go():
        queue = make_queue(async_generation_ratio=2.0, groups_per_batch=2)

        def check(**wanted):
            s = queue.stats()
            assert s.admitted == s.trained + s.filtered + s.dropped + s.failed + s.training + s.buffered + s.in_flight
            assert {key: getattr(s, key) for key in wanted} == wanted

        slots = await queue.reserve(6)
        check(admitted=6, in_flight=6)
        await finish(queue, *slots[:3])
        check(buffered=3, in_flight=3, generated_samples=6, generated_tokens=12)
        await queue.take_batch(1)
        check(training=2, buffered=1)
        await queue.release(slots[3].group_id, ReleaseReason.FILTERED)
        await queue.release(slots[4].group_id, ReleaseReason.FAILED, "x")
        await queue.release(slots[5].group_id, ReleaseReason.REQUEUED)
        check(filtered=1, failed=1, dropped=1, in_flight=0, requeued_prompts=1)
        await queue.step_trained(1)
        check(trained=2, training=0, trained_samples=4, trained_tokens=8, memory_bytes=queue.stats().memory_bytes)
        assert queue.stats().length_bias == 1.0

    run(go())


def test_memory_counts_the_arrays_of_groups_that_wait(run, finish):
    async def go():
        queue = make_queue()
        slots = await queue.reserve(2)
        await finish(queue, *slots, length=100)
        one = 4 * 2 + 2 * 9 * 100  # prompt of 2 tokens shared by 2 samples of 100 tokens: ids, log-probs, mask
        assert queue.stats().memory_bytes == 2 * one
        await queue.take_batch(1)
        await queue.step_trained(1)
        assert queue.stats().memory_bytes == 0

    run(go())


def test_ages_are_told_apart_by_where_they_arose(run, finish, build):
    async def go():
        queue = make_queue(async_generation_ratio=3.0, held=None)
        queue.restore(2, {"next_index": 4, "open": []})
        queue.weights_held(0)
        slots = await queue.reserve(2)
        mixed = build.sample(build.prompt(), range(4), ((0, 1), (1, 3)))
        queue.weights_held(1)
        for slot in slots:
            await queue.put(build.group(slot.group_id, samples=(mixed,)))
        queue.weights_held(2)
        await asyncio.sleep(9)
        await queue.take_batch(3)
        await asyncio.sleep(5)  # of training: it makes no sample older
        fresh = await queue.freshness(3)
        assert fresh.stale_group_share == 1, "without soft_versions every group older than the freshest weights counts"
        assert fresh.tokens_by_versions == {1: 6, 2: 2} and fresh.mean_versions == pytest.approx(10 / 8)
        assert fresh.max_versions == 2
        assert fresh.queue_share == pytest.approx(8 / 10) and fresh.in_flight_share == pytest.approx(2 / 10)
        assert fresh.mean_age_s == fresh.max_age_s == pytest.approx(9)

    run(go())


@pytest.mark.parametrize(("soft", "share"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_a_group_is_stale_from_soft_versions_on(run, build, soft, share):
    async def go():
        queue = make_queue(async_generation_ratio=3.0, soft_versions=soft, held=None)
        queue.restore(2, {"next_index": 4, "open": []})
        for version in (0, 1):
            queue.weights_held(version)
            (slot,) = await queue.reserve(1)
            await queue.put(build.group(slot.group_id, version))
        queue.weights_held(2)
        await queue.take_batch(3)
        assert (await queue.freshness(3)).stale_group_share == share

    run(go())


def test_the_options_of_the_queue_are_those_of_the_config():
    overrides = (
        "async_generation_ratio=2",
        "async_training={trigger_parameter_sync_step: 2, max_queue_size: 40, batch_timeout: 7}",
        "async_training.staleness={max_versions: 9, policy: token_mask, soft_versions: 3, allow_above_8: true}",
        "async_training.staleness.max_age_s=90",
        "fault={stall_timeout: 77, max_failed_groups: 5}",
    )
    config = load("configs/rlvr_config_async_cpu.yaml", overrides, "rlvr")
    assert QueueOptions.of(config) == QueueOptions(
        groups_per_batch=config.groups_per_batch,
        async_generation_ratio=2.0,
        trigger_parameter_sync_step=2,
        max_versions=9,
        policy=StalenessPolicy.TOKEN_MASK,
        soft_versions=3,
        max_age_s=90.0,
        max_queue_size=40,
        samples_per_group=config.samples_per_group,
        fingerprint=QueueOptions.of(config).fingerprint,
        batch_timeout_s=7.0,
        stall_timeout_s=77.0,
        max_failed_groups=5,
    )


BEFORE = {"seed": "1", "samples per group": "2", "filter_groups": "off"}


def kept_by(tmp_path, fingerprint):
    """A queue that goes on with the ledger of a run that finished two groups."""
    queue = MessageQueue(QueueOptions(groups_per_batch=2), SqliteLedger(tmp_path / "ledger.sqlite", fsync="step"))
    queue.restore(0, None, fingerprint)
    return queue


def test_finished_groups_of_another_configuration_are_not_trained_and_what_changed_is_named(
    run, finish, tmp_path, caplog
):
    async def go():
        first = kept_by(tmp_path, BEFORE)
        first.weights_held(0)
        await finish(first, *await first.reserve(2))
        assert (await first.checkpoint_state(0))["fingerprint"] == BEFORE
        first.close()
        same = kept_by(tmp_path, BEFORE)
        assert same.stats().buffered == 2
        same.close()
        other = kept_by(tmp_path, {**BEFORE, "samples per group": "4"})
        assert other.stats().buffered == 0 and other.stats().requeued_prompts == 2
        assert "samples per group from 2 to 4: finished groups of the earlier run cannot be used" in caplog.text
        other.close()
        with pytest.raises(LedgerError, match="seed from 1 to 2"):
            kept_by(tmp_path, {**BEFORE, "seed": "2"})

    run(go())


def test_the_ledger_of_another_run_is_refused_and_one_of_an_earlier_version_taken(tmp_path):
    kept_by(tmp_path, {**BEFORE, "run id": "theirs"})._ledger.close()
    other = SqliteLedger(tmp_path / "ledger.sqlite", fsync="step")
    queue = MessageQueue(QueueOptions(groups_per_batch=2), other)
    with pytest.raises(LedgerError, match="the ledger is of run theirs, and this is run ours: set ledger.path"):
        queue.restore(0, None, {**BEFORE, "run id": "ours"})
    other.close()
    kept_by(tmp_path, {**BEFORE, "run id": "theirs"})._ledger.close()
    (tmp_path / "older").mkdir()
    kept_by(tmp_path / "older", BEFORE)._ledger.close()
    kept_by(tmp_path / "older", {**BEFORE, "run id": "ours"})._ledger.close()


def stream(*texts, ids=(1, 2)):
    prompts = [
        Prompt(row_id=str(i), token_ids=array("i", ids), domain="d", ground_truth="", text=text, content=text)
        for i, text in enumerate(texts)
    ]
    return lambda index: prompts[index] if index < len(prompts) else None


def test_rows_are_the_same_however_they_are_rendered_and_wherever_their_file_lies(caplog):
    before, moved = stream("2+2", "3+3"), stream("2+2", "3+3", ids=(7, 8, 9))
    assert same_or_regenerate(stream_fingerprint(before), stream_fingerprint(moved), step=4, at=moved)
    said = "rendered to other tokens than before (tokenizer or chat template): the prompt at position 0 is row 0, '2+2'"
    assert said in caplog.text
    caplog.clear()
    assert same_or_regenerate(stream_fingerprint(before), stream_fingerprint(stream("2+2", "3+3")), step=4)
    assert not caplog.messages


@pytest.mark.parametrize("now", [("2+2", "3+4"), ("2+2",), ("2+2", "x", "3+3")])
def test_data_that_changed_is_refused_as_an_error_of_the_user_and_the_first_prompt_that_differs_is_named(now):
    before, changed = stream("2+2", "3+3"), stream(*now)
    refusal = "the prompt at position 1.*a new run: leave out checkpoint.resume_from"
    with pytest.raises(ValueError, match=refusal) as error:
        same_or_regenerate(stream_fingerprint(before), stream_fingerprint(changed), step=4, at=changed)
    assert len(now) < 2 or f"is row 1, {now[1]!r}" in str(error.value)


def test_groups_of_prompts_with_other_variables_of_the_template_are_generated_again(caplog):
    thinking, silent = (
        {"template_kwargs": text} for text in ('{"enable_thinking": true}', '{"enable_thinking": false}')
    )
    assert same_or_regenerate(thinking, thinking, step=4) and not caplog.messages
    assert not same_or_regenerate(thinking, silent, step=4)
    assert (
        'template_kwargs from {"enable_thinking": true} to {"enable_thinking": false}: finished groups' in caplog.text
    )
    assert same_or_regenerate({}, silent, step=4), "an earlier version said nothing of them"


def test_the_fingerprint_of_an_earlier_version_compares_with_nothing():
    now = stream_fingerprint(stream("2+2"))
    assert same_or_regenerate({"prompts": "0a1b2c3d, 2 prompts", "seed": "1"}, {**now, "seed": "1"}, step=4)


def test_a_starved_trainer_says_why_by_its_own_clock_though_groups_come_and_go(run, caplog):
    async def go():
        queue = make_queue(batch_timeout_s=30.0)
        queue.stall_diagnosis = lambda: "no engine is there"
        taking = asyncio.ensure_future(queue.take_batch(1))
        for _ in range(100):  # every few seconds a group is filtered: something always moves
            (slot, *_) = await queue.reserve(1)
            await asyncio.sleep(3)
            await queue.release(slot.group_id, ReleaseReason.FILTERED, "dropped_equal")
        taking.cancel()
        said = [r.message for r in caplog.records if "the trainer has waited" in r.message]
        assert len(said) == 9 and "waited 270 s for step 1" in said[-1]
        assert "groups without reward variance were filtered meanwhile; no engine is there" in said[-1]

    run(go())


def test_the_data_may_end_inside_of_a_step_that_is_taken_in_parts(run, finish):
    async def go():
        queue = make_queue()
        slots = await queue.reserve(2)
        await finish(queue, slots[0])
        assert len(await queue.take_batch(1, 1)) == 1
        await queue.release(slots[1].group_id, ReleaseReason.FILTERED)
        queue.end_of_data()
        with pytest.raises(EndOfData):
            await queue.take_batch(1, 1)
        await queue.step_trained(1)
        assert queue.stats().trained == 1, "what was learned of it is the step"

    run(go())


class Ticking(asyncio.SelectorEventLoop):
    """Its clock moves between any two looks at it, as a real one does."""

    looks = 0

    def time(self):
        self.looks += 1
        return super().time() + 1e-5 * self.looks


def test_the_wait_for_scores_is_told_from_that_for_answers_on_a_clock_that_never_stands_still(build):
    """The last answer of the batch is there half a second after the trainer asked, its score at once."""

    async def go():
        queue, loop = make_queue(groups_per_batch=4), asyncio.get_running_loop()
        slots = await queue.reserve(4)
        taking = asyncio.create_task(queue.take_batch(1))
        for slot in slots:
            await asyncio.sleep(0.5 if slot is slots[-1] else 0.0)
            await queue.put(build.group(slot.group_id, generated_s=loop.time()))
        await taking
        return (await queue.freshness(1)).reward_wait_s

    with asyncio.Runner(loop_factory=Ticking) as runner:
        assert runner.run(go()) < 0.25
