"""Rollouter, queue and trainer together: nothing lost, nothing twice, nothing older than the bound."""

import asyncio
import random
from dataclasses import replace
from math import ceil

import pytest

from roll_async.buffer.errors import EndOfData, RaisesAlways, TooManyFailures
from roll_async.buffer.ledger import MemoryLedger
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.config.staleness import StalenessPolicy
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions, FilterBudget, GeneratedTooMany
from roll_async.rollout.filters.first_batch import FirstBatch
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate, GroupOutcome
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.scoring import ScoringOptions
from roll_async.schema import Reward, RewardStatus, SamplingParams


class Prompts:
    def __init__(self, build, size):
        self.build, self.size = build, size

    def at(self, index):
        if index >= self.size:
            return None
        return self.build.prompt(row_id=str(index), ids=range(1, 2 + index % 7))


class World:
    """A whole run on fakes: replicas of different speed, scores by rule, a trainer that takes `train_s` per step."""

    def __init__(
        self, build, replicas, scorer, *, size=10**9, train_s=7.0, mode="resume", parts=1, budget=None,
        scheduler=None, rollouter=Rollouter, **queue
    ):  # fmt: skip
        self.replicas, self.train_s, self.mode, self.parts = replicas, train_s, mode, parts
        self.options = QueueOptions(**{"groups_per_batch": 4, **queue})
        self.queue = MessageQueue(self.options, MemoryLedger())
        self.manager = EnginePool(replicas, ManagerOptions(max_concurrent_per_server=6, silence_s=1e6))
        options = {"samples_per_group": 2, "sampling": SamplingParams(max_new_tokens=20)}
        options["scoring"] = ScoringOptions(outage_patience_s=0)
        self.scheduler = ChatCompletionScheduler(
            self.manager, scorer, SchedulerOptions(**{**options, **(scheduler or {})})
        )
        self.rollouter = rollouter(self.queue, self.scheduler, self.manager, Prompts(build, size), budget=budget)
        self.trained, self.ages, self.checks = [], [], 0

    def check(self):
        s = self.queue.stats()
        parts = (s.trained, s.filtered, s.dropped, s.failed, s.training, s.buffered, s.in_flight)
        assert s.admitted == sum(parts), s
        self.checks += 1

    async def watch(self):
        while True:
            self.check()
            await asyncio.sleep(1.1)

    async def push(self, version):
        await self.rollouter.interrupt(self.mode, 1000.0)
        for replica in self.replicas:
            replica.version = version
        await self.rollouter.release()
        self.queue.weights_held(version)

    async def train(self, steps):
        for step in range(1, steps + 1):
            groups = []
            for _ in range(self.parts):
                groups += await self.queue.take_batch(step, self.options.groups_per_batch // self.parts)
                await asyncio.sleep(self.train_s / self.parts)
            self.ages.append(await self.queue.freshness(step))
            await self.queue.step_trained(step)
            self.trained.append(groups)
            if step % self.options.trigger_parameter_sync_step == 0:
                await self.push(step)

    async def go(self, steps):
        await self.manager.start()
        watch = asyncio.create_task(self.watch())
        try:
            await self.push(0)
            async with asyncio.TaskGroup() as tasks:
                rollout = tasks.create_task(self.rollouter.run())
                try:
                    await self.train(steps)
                    self.trained_s = asyncio.get_running_loop().time()
                finally:
                    await self.rollouter.stop()
                await rollout
        finally:
            watch.cancel()
            await self.manager.close()
            self.check()
            self.seconds = asyncio.get_running_loop().time()
            self.end = self.queue.stats()
            self.end_rollout, self.end_servers = self.rollouter.stats(), self.manager.stats()
        return self

    @property
    def rows(self):
        return [int(g.prompt.row_id) for groups in self.trained for g in groups]

    @property
    def stalest(self):
        return max(age.max_versions for age in self.ages)


@pytest.fixture
def world(build, replica_class, scorer_class):
    def make(rule=lambda prompt, sample: 1.0, speeds=(1.0, 2.3), **options):
        replicas = [replica_class(f"engine-{i}", token_s=s) for i, s in enumerate(speeds)]
        return World(build, replicas, scorer_class(rule), **options)

    return make


def test_with_ratio_zero_nothing_is_stale_and_no_prompt_is_skipped(run, world):
    done = run(world(async_generation_ratio=0.0).go(10))
    assert done.stalest == 0 and sorted(done.rows) == list(range(40))
    assert all(len(groups) == 4 for groups in done.trained)
    assert done.checks > 50


def test_with_ratio_one_training_overlaps_generation_and_staleness_stays_at_one(run, world):
    done = run(world(async_generation_ratio=1.0).go(10))
    assert done.stalest == 1 and len(set(done.rows)) == 40
    assert any(age.mean_versions > 0 for age in done.ages)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_ratio_keeps_its_bound_and_reaches_no_prompt_twice(run, world, ratio, every):
    options = {"async_generation_ratio": ratio, "trigger_parameter_sync_step": every}
    done = run(world(**options).go(6))
    assert done.stalest <= ceil((1 + ratio) * every) - 1
    assert len(done.rows) == len(set(done.rows)) == 24


@pytest.mark.parametrize("mode", ["resume", "abort", "wait", "keep"])
@pytest.mark.parametrize("train_s", [0.5, 60.0])
def test_no_way_to_interrupt_loses_a_group_or_breaks_the_bound(run, world, mode, train_s):
    done = run(world(async_generation_ratio=2.0, mode=mode, train_s=train_s, speeds=(1.0, 1.3, 9.0)).go(6))
    assert done.stalest <= 2 and len(set(done.rows)) == 24
    stats = done.end
    assert stats.late_results == 0 and stats.failed == 0


def test_the_same_run_twice_trains_the_same_groups_in_the_same_order(run, world):
    first, second = (run(world(async_generation_ratio=1.5).go(8)) for _ in range(2))
    assert first.rows == second.rows
    assert [a.tokens_by_versions for a in first.ages] == [a.tokens_by_versions for a in second.ages]


def test_filtered_and_failed_groups_free_their_slots_and_do_not_come_again(run, world):
    def rule(prompt, sample):
        number = int(prompt.row_id)
        if number % 7 == 5:
            return ConnectionError("judge is down")
        return float(sample.sample_id.endswith("0")) if number % 3 else 0.0

    done = run(world(rule, async_generation_ratio=1.0, scheduler={"filter": GroupFilter()}).go(10))
    stats, rows = done.end, done.rows
    assert len(set(rows)) == 40 and all(r % 3 and r % 7 != 5 for r in rows)
    assert stats.filtered > 10 and stats.failed > 5
    assert done.end_rollout.filtered_groups == stats.filtered
    assert done.end_rollout.generation_errors == stats.failed
    assert done.stalest <= 1
    expected = [i for i in range(max(rows) + 1) if i % 3 and i % 7 != 5]
    assert set(expected[: 40 - 8]) <= set(rows), "only the last few may be younger than one left behind"


def test_what_the_filter_says_is_counted_by_reason(run, world):
    def rule(prompt, sample):
        number = int(prompt.row_id)
        if number % 7 == 5:
            return Reward(score=0.0, status=RewardStatus.TIMEOUT, reason="too slow")
        return float(sample.sample_id.endswith("0")) if number % 3 else 0.0

    done = run(world(rule, async_generation_ratio=1.0, scheduler={"filter": GroupFilter()}).go(10))
    judged, stats = done.end_rollout.judged, done.end
    assert judged["seen"] == judged["kept"] + judged["dropped_equal"] + judged["dropped_invalid"]
    assert judged["dropped_equal"] > 5 and judged["dropped_invalid"] > 3
    assert judged["dropped_equal"] + judged["dropped_invalid"] == stats.filtered and stats.failed == 0
    assert judged["singletons"] == judged["dropped_singleton"] == 0 and all(r % 7 != 5 for r in done.rows)


def test_answers_that_are_copies_of_each_other_are_counted(run, world):
    done = run(world(async_generation_ratio=1.0).go(2))
    assert done.end_rollout.duplicate_share == 1.0, "these replicas answer alike"


def test_too_many_failed_groups_end_the_run_with_their_reasons(run, world):
    broken = world(lambda p, s: ConnectionError("judge is down"), max_failed_groups=3)
    with pytest.raises(BaseExceptionGroup) as raised:
        run(broken.go(2))
    assert raised.group_contains(TooManyFailures, match="max_failed_groups=3.*judge is down")


def test_the_death_of_one_replica_costs_no_group(run, world):
    hit = world(async_generation_ratio=1.0, speeds=(1.0, 1.0, 1.0))

    async def go():
        async def kill():
            await asyncio.sleep(33.3)
            hit.replicas[1].die()

        killing = asyncio.create_task(kill())
        await hit.go(8)
        await killing
        hit.replicas.pop(1)

    run(go())
    assert sorted(hit.rows) == list(range(32)) and hit.stalest <= 1
    assert hit.end_servers.lost_servers == 1 and hit.end.failed == 0


def test_the_death_of_the_last_replica_ends_the_run(run, world):
    hit = world(speeds=(1.0,))

    async def go():
        async def kill():
            await asyncio.sleep(5)
            hit.replicas[0].die("SIGKILL")

        killing = asyncio.create_task(kill())
        try:
            await hit.go(3)
        finally:
            await killing

    with pytest.raises(BaseExceptionGroup) as raised:
        run(go())
    assert raised.group_contains(ConnectionError, match="SIGKILL")


@pytest.mark.parametrize(("size", "steps", "leftovers"), [(16, 4, 0), (18, 4, 2), (3, 0, 3)])
def test_the_end_of_the_data_trains_every_full_batch_and_counts_the_rest(run, world, size, steps, leftovers):
    short = world(size=size, async_generation_ratio=1.0)
    with pytest.raises(BaseExceptionGroup) as raised:
        run(short.go(100))
    ends = raised.value.subgroup(EndOfData) if isinstance(raised.value, BaseExceptionGroup) else None
    assert ends is not None and ends.exceptions[0].leftovers == leftovers
    assert len(short.trained) == steps and short.end.in_flight == 0
    assert len(set(short.rows)) == 4 * steps


def test_a_stop_gives_every_slot_back(run, world):
    stopped = world(async_generation_ratio=3.0)

    async def go():
        await stopped.go(2)
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    run(go())
    stats = stopped.end
    assert stats.in_flight == 0 and stopped.end_rollout.running_groups == 0
    assert stats.dropped == stats.requeued_prompts > 0


def test_a_stop_while_the_engines_stand_still_ends(run, world):
    stopped = world(async_generation_ratio=1.0)

    async def go():
        await stopped.manager.start()
        await stopped.push(0)
        rollout = asyncio.create_task(stopped.rollouter.run())
        await asyncio.sleep(3)
        await stopped.rollouter.interrupt("resume", 100.0)
        await stopped.rollouter.stop()
        await rollout
        await stopped.manager.close()
        assert stopped.queue.stats().in_flight == 0

    run(go())


def test_a_stop_during_a_validation_ends(run, world):
    stopped = world(async_generation_ratio=1.0)

    async def go():
        await stopped.manager.start()
        await stopped.push(0)
        await stopped.rollouter.pause()
        rollout = asyncio.create_task(stopped.rollouter.run())
        await asyncio.sleep(3)
        async with asyncio.timeout(100):
            await stopped.rollouter.stop()
            await rollout
        await stopped.manager.close()
        assert stopped.queue.stats().in_flight == 0

    run(go())


def test_nothing_is_generated_before_the_first_weights(run, world):
    cold = world()

    async def go():
        await cold.manager.start()
        rollout = asyncio.create_task(cold.rollouter.run())
        await asyncio.sleep(100)
        assert cold.queue.stats().admitted == 0
        await cold.push(0)
        await asyncio.sleep(1)
        assert cold.queue.stats().admitted == 4
        await cold.rollouter.stop()
        await rollout
        await cold.manager.close()

    run(go())


def test_training_stands_still_during_validation_and_loses_nothing(run, world, build):
    busy = world(async_generation_ratio=1.0)

    async def go():
        await busy.manager.start()
        await busy.push(0)
        rollout = asyncio.create_task(busy.rollouter.run())
        await asyncio.sleep(5.5)
        await busy.rollouter.pause()
        before = busy.queue.stats()
        samples = await busy.scheduler.validate([build.prompt()] * 3, SamplingParams(max_new_tokens=30), name="v")
        assert len(samples) == 3
        after = busy.queue.stats()
        assert (after.admitted, after.buffered) == (before.admitted, before.buffered)
        await busy.rollouter.resume()
        groups = await busy.queue.take_batch(1)
        assert all(len(s.response_token_ids) == 20 for g in groups for s in g.samples)
        await busy.queue.step_trained(1)
        await busy.rollouter.stop()
        await rollout
        await busy.manager.close()

    run(go())


@pytest.mark.parametrize("seed", range(5))
def test_random_worlds_keep_every_promise(run, world, seed):
    rng = random.Random(seed)
    ratio, every = rng.choice((0.0, 0.3, 1.0, 1.7, 2.5)), rng.randint(1, 3)
    fail, equal = rng.random() * 0.1, rng.random() * 0.4

    def rule(prompt, sample):
        dice = random.Random(f"{seed}/{prompt.row_id}")
        if dice.random() < fail:
            return ConnectionError("down")
        return float(sample.sample_id.endswith("0")) if dice.random() > equal else 1.0

    done = run(
        world(
            rule,
            speeds=[rng.uniform(0.2, 4) for _ in range(rng.randint(1, 4))],
            train_s=rng.uniform(0.1, 60),
            mode=rng.choice(("resume", "abort", "wait", "keep")),
            groups_per_batch=rng.randint(1, 6),
            async_generation_ratio=ratio,
            trigger_parameter_sync_step=every,
            scheduler={"filter": GroupFilter()},
        ).go(6)
    )
    assert done.stalest <= ceil((1 + ratio) * every) - 1
    assert len(done.rows) == len(set(done.rows)) == 6 * done.options.groups_per_batch


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1.5])
def test_over_sampling_keeps_the_first_to_finish_and_stops_the_rest_early(run, world, ratio):
    """gen_batch_size 10 for 4 groups: filtered groups do not make the batch wait for another round."""

    def rule(prompt, sample):
        return float(sample.sample_id.endswith("0")) if int(prompt.row_id) % 2 else 1.0

    def go(extra):
        options = {"async_generation_ratio": ratio, "scheduler": {"filter": GroupFilter()}, "speeds": (1.0, 1.0, 5.0)}
        return run(world(rule, oversample_groups=extra, train_s=0.1, **options).go(8))

    plain, ahead = go(0), go(6)
    assert (
        ahead.stalest <= ahead.options.bound_versions
        and len(set(ahead.rows)) == 32
        and all(row % 2 for row in ahead.rows)
    )
    stats = ahead.end
    assert stats.admitted == stats.trained + stats.filtered + stats.dropped + stats.failed + stats.buffered
    assert stats.dropped >= 4, "early stop gave prompts back"
    # Prompts that gave way come again: nothing below the newest trained one is lost for good.
    open_prompts = stats.requeued_prompts + stats.buffered
    assert max(ahead.rows) + 1 <= 32 + stats.filtered + open_prompts
    assert ahead.seconds < 0.95 * plain.seconds or ratio > 0
    judged = stats.trained + stats.filtered + stats.buffered
    assert stats.admitted <= judged + 8 * 6 + 10, "what gave way is not begun again under the same weights"


def test_surplus_groups_are_aborted_at_the_servers_before_they_finish(run, world):
    whole = {"spread_samples": False}  # a group is on one replica
    done = run(world(oversample_groups=4, speeds=(1.0, 30.0), train_s=0.1, scheduler=whole).go(5))
    slow = done.replicas[1]
    assert len(slow.aborted) >= 5 and done.end_servers.aborted >= 5
    assert done.seconds < 5 * 60, "no batch waited 600 s for the slow replica"
    servers, audit = done.end_servers, done.end
    assert servers.aborted_tokens == servers.generated_tokens - audit.generated_tokens > 0, "each token is counted once"


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_a_synchronous_run_stops_early_under_every_policy_instead_of_generating_what_it_drops(run, world, policy):
    options = {"policy": policy, "max_versions": 3, "scheduler": {"spread_samples": False}}
    done = run(world(oversample_groups=4, speeds=(1.0, 30.0), train_s=100.0, **options).go(5))
    assert done.stalest == 0 and done.end.dropped_stale == 0 and len(set(done.rows)) == 20
    assert done.end.dropped >= 5 * 4 and len(done.replicas[1].aborted) >= 5
    assert done.end_servers.aborted_tokens <= 5 * 8 * 20, "nothing went on through a step of training"


def test_a_surplus_group_that_is_being_scored_does_not_hold_up_the_abort_of_later_ones(run, world, build):
    done = world(oversample_groups=4, speeds=(1.0, 30.0), train_s=0.1, scheduler={"spread_samples": False})
    score, hung = done.scheduler.runner.scoring._scorer.score, []

    async def stuck(prompt, sample):
        if prompt.row_id == "0":
            hung.append(sample.sample_id)
            await asyncio.sleep(5000)
        return await score(prompt, sample)

    done.scheduler.runner.scoring._scorer.score = stuck
    run(done.go(5))
    assert hung and done.end.dropped == 5 * 3 + 1, "the slow replica's groups, in every step; the hung one at the end"
    assert done.trained_s < 5 * 60, "no batch waited 600 s for the slow replica"


def test_a_group_whose_requests_did_not_exist_yet_when_it_became_surplus_is_aborted_when_they_do(
    run, build, replica_class, scorer_class
):
    class Late(Rollouter):
        async def _custom_generation_logic(self, batch):
            await asyncio.sleep(50 if batch.slot.prompt_index >= 4 else 0)

    replicas = [replica_class("engine-0")]
    slow = World(build, replicas, scorer_class(), oversample_groups=2, train_s=2000.0, rollouter=Late)
    done = run(slow.go(1))
    assert done.end_servers.aborted == 4 and done.end_servers.completed == 8, "two samples of two groups"
    assert done.end_servers.aborted_tokens <= 4, "asked for again after a second"


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(("ratio", "every"), [(0.0, 1), (0.0, 3), (0.5, 2), (1.0, 1), (2.5, 2)])
def test_a_batch_taken_in_parts_keeps_bound_and_counts(run, world, parts, ratio, every):
    options = {"async_generation_ratio": ratio, "trigger_parameter_sync_step": every}
    options["scheduler"] = {"spread_samples": False}  # groups of the slow replica finish later
    whole, streamed = (run(world(parts=n, **options).go(6)) for n in (1, parts))
    assert streamed.stalest <= ceil((1 + ratio) * every) - 1
    assert len(set(streamed.rows)) == 24 and all(len(groups) == 4 for groups in streamed.trained)
    assert streamed.seconds <= whole.seconds + 1e-6
    if ratio == 0 and every == 1:
        assert streamed.seconds < whole.seconds, "training overlapped with the rest of its own batch"


def test_a_step_is_begun_only_if_the_data_can_finish_it(run, world):
    short = world(size=6, parts=4, async_generation_ratio=1.0)
    with pytest.raises(BaseExceptionGroup) as raised:
        run(short.go(3))
    assert raised.value.subgroup(EndOfData) is not None
    assert len(short.trained) == 1 and short.end.training == 0


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_data_without_spread_ends_the_run_with_a_message_and_loses_nothing(run, world, ratio, caplog):
    caplog.set_level("INFO", logger="roll_async")

    def rule(prompt, sample):
        return float(sample.sample_id.endswith("0")) if int(prompt.row_id) < 9 else 1.0

    budget = FilterBudget(BudgetOptions(groups_per_batch=4, gen_batch_size=6, max_num_gen_batches=3))
    options = {"budget": budget, "async_generation_ratio": ratio, "scheduler": {"filter": GroupFilter()}}
    stuck = world(rule, **options)
    with pytest.raises(BaseExceptionGroup) as raised:
        run(stuck.go(10))
    text = r"num_gen_batches=3 >= max_num_gen_batches=3 with 1 of 4 groups kept.*check your data"
    assert raised.group_contains(GeneratedTooMany, match=text)
    rounds = [r.getMessage() for r in caplog.records if "Keep generating" in r.getMessage()]
    assert rounds == [
        f"num_prompt_in_batch=1 < prompt_bsz=4, num_gen_batches={n} < max_num_gen_batches=3. Keep generating..."
        for n in (1, 2)
    ]
    stats = stuck.end
    assert (stats.trained, stats.buffered) == (8, 1)
    assert stats.admitted == stats.trained + stats.filtered + stats.dropped + stats.buffered + stats.in_flight


def test_a_user_class_may_generate_in_its_own_way_or_only_look_on(run, world):
    class Mine(Rollouter):
        seen = []

        def _custom_generation_logic(self, batch):
            self.seen.append(batch.prompt.row_id)
            return self.twice(batch) if batch.slot.prompt_index % 2 else None

        async def twice(self, batch):
            await asyncio.sleep(2)
            return await self.generate(batch)

    own = world()
    own.rollouter.__class__ = Mine
    run(own.go(3))
    assert sorted(own.rows) == list(range(12)) and len(Mine.seen) >= 12


class Swallows(Rollouter):
    async def custom_generation_logic(self, batch):
        while batch.slot.prompt_index > 4:
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:  # it never lets go
                continue


def test_a_hook_that_swallows_its_cancellation_does_not_keep_a_run_from_its_end(run, world):
    own = world(rollouter=Swallows, async_generation_ratio=1.0)
    run(own.go(1))
    assert sorted(own.rows) == [0, 1, 2, 3] and own.seconds - own.trained_s < 200


@pytest.mark.parametrize(
    ("gives", "reason"),
    [
        (lambda batch, group: replace(group(batch), group_id=batch.slot.group_id + 1), "gave group 1 for group 0"),
        (lambda batch, group: None, "a KEPT outcome without a group"),
        (
            lambda batch, group: replace(
                group(batch), samples=tuple(replace(s, reward=None) for s in group(batch).samples)
            ),
            "a sample that has no reward",
        ),
    ],
    ids=["another's", "none", "no reward"],
)
def test_what_a_hook_gives_is_accounted_to_its_own_prompt_or_to_none(run, world, build, gives, reason):
    class Wrong(Rollouter):
        def custom_generation_logic(self, batch):
            if batch.slot.prompt_index:
                return None
            group = lambda batch: build.group(group_id=batch.slot.group_id, prompt=batch.prompt)  # noqa: E731
            return GroupOutcome(fate=GroupFate.KEPT, group=gives(batch, group))

    own = world(rollouter=Wrong)
    run(own.go(2))
    assert 0 not in own.rows and own.queue.stats().failed == 1 and len(own.rows) == len(set(own.rows))


def test_a_reward_that_raises_for_every_sample_ends_the_run_with_the_first_batch(run, world, caplog):
    caplog.set_level("INFO", logger="roll_async")

    def rule(prompt, sample):
        reason, place = "KeyError: 'x'", "/home/me/mine.py:7, in score"
        return Reward(score=0.0, status=RewardStatus.ERROR, reason=reason, place=place, traceback="Traceback ...")

    broken = world(rule)
    with pytest.raises(BaseExceptionGroup) as raised:
        run(broken.go(2))
    assert raised.group_contains(
        TooManyFailures, match="domain math raised for every sample of its first 4 groups.*KeyError"
    )
    assert broken.end.failed == 4 and broken.seconds < 60
    told = [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    assert len(told) == 1 and "/home/me/mine.py:7, in score" in told[0].getMessage()
    assert [r.getMessage().endswith("Traceback ...") for r in caplog.records].count(True) == 1


@pytest.mark.parametrize("right", ["2.0/0", "2.0/0 2.0/1"])
def test_a_reward_that_works_for_one_sample_of_the_first_batch_goes_on(run, world, right):
    """Also if its group fails, and if the others have failed before it is generated."""
    raises = Reward(score=0.0, status=RewardStatus.ERROR)

    def rule(prompt, sample):
        return 1.0 if int(prompt.row_id) > 6 or sample.sample_id in right.split() else raises

    done = run(world(rule).go(3))
    assert len(done.trained) == 3 and done.end.failed == 7 - right.count(" ")


@pytest.mark.parametrize(
    "verdict", [OSError(116, "Stale file handle"), Reward(score=0.0, status=RewardStatus.ERROR, reason="KeyError")]
)
def test_a_scorer_that_raises_once_is_asked_again(run, world, verdict):
    raised = []

    def rule(prompt, sample):
        if sample.sample_id in raised or len(raised) == 5:
            return 1.0
        raised.append(sample.sample_id)
        return verdict

    done = run(world(rule).go(2))
    assert len(raised) == 5 and done.end.failed == 0 and done.end_rollout.reward_errors == 5


@pytest.mark.parametrize(("times", "fails"), [(1, False), (4, False), (5, True)])
def test_a_prompt_source_that_cannot_be_read_is_asked_again_a_few_times(run, world, times, fails):
    reads = world()
    at, failures = reads.rollouter._prompts.at, []

    def sometimes(index):
        if index == 6 and len(failures) < times:
            failures.append(index)
            raise OSError(116, "Stale file handle")
        return at(index)

    reads.rollouter._prompts.at = sometimes
    assert set(range(12)) - set(run(reads.go(3)).rows) == ({6} if fails else set())
    assert len(failures) == times and reads.end.failed == fails


def test_a_domain_whose_reward_always_raises_ends_the_run_although_the_others_have_scores():
    """A single row may be at fault; a group that was interrupted is not one of the first batch."""
    first = FirstBatch(4)
    raised = GroupOutcome(fate=GroupFate.FAILED, raised=True, never_scored=True)
    kept, interrupted = GroupOutcome(fate=GroupFate.KEPT), GroupOutcome(fate=GroupFate.REQUEUED)
    for group_id in range(5):
        first.started(group_id)
    first.ended(0, "code", raised)
    first.ended(1, "math", interrupted)
    first.ended(2, "math", kept)
    first.ended(3, "math", kept)
    first.started(5)
    first.ended(4, "math", kept)
    first.ended(5, "math", kept)
    with pytest.raises(RaisesAlways, match="domain code"):
        first.ended(6, "code", raised)
