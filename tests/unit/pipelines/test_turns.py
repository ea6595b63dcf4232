"""Trainer and engines on the same devices: the order in which memory changes hands, and what is booked of it."""

import asyncio

import pytest

from roll_async.inference.protocol import EngineMemory
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS, SleepRules
from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.turns import (
    DROP_WEIGHTS,
    KEEP_WEIGHTS,
    DeviceMemory,
    DevicePhase,
    MemoryNotGivenBack,
    PhasedLearner,
    PhasedRollout,
    PhaseSwitcher,
)
from roll_async.trainer.protocol import STATE_KINDS, StateMemory, StepReport

RANK = {"weights": 3, "optimizer": 4, "gradients": 2}
CAPACITY = 9
"""The trainer alone takes 9, an engine alone 3 + 5; the weights of both 6. No two phases fit together."""


class Ranks:
    """Two ranks, each on a device of its own."""

    def __init__(self, log, name="actor_train", keeps=()):
        self.log, self.name, self.keeps, self.away = log, name, keeps, set()

    async def _changed(self):
        await asyncio.sleep(1)
        there = {k: 0 if k in self.away else size for k, size in RANK.items()}
        host = {k: size if k in self.away else 0 for k, size in RANK.items()}
        return [StateMemory(device_bytes=there, host_bytes=host, allocated_bytes=None)] * 2

    async def offload_states(self, kinds=STATE_KINDS):
        self.log.append(f"{self.name} offloads {'+'.join(kinds)}")
        self.away |= set(kinds) - set(self.keeps)
        return await self._changed()

    async def load_states(self, kinds=STATE_KINDS):
        self.log.append(f"{self.name} loads {'+'.join(kinds)}")
        self.away -= set(kinds)
        return await self._changed()


class Replica:
    """A replica on both devices, by the rules of the real ones."""

    def __init__(self, log, name="actor_infer-0", keeps=()):
        self.log, self.name, self.keeps, self.rules = log, name, keeps, SleepRules((1, 2))
        self.there = {WEIGHTS, KV_CACHE}

    def _memory(self):
        weights, cache = 6 * (WEIGHTS in self.there), 10 * (KV_CACHE in self.there)
        return EngineMemory(weights_bytes=weights, kv_cache_bytes=cache)

    async def sleep(self, level):
        self.log.append(f"{self.name} sleeps {level}")
        assert self.rules.may_sleep(level, paused=True, num_running=0)
        self.rules.fell_asleep(level)
        self.there &= set(self.keeps)
        await asyncio.sleep(1)
        return self._memory()

    async def wake(self, tags):
        self.log.append(f"{self.name} wakes {'+'.join(tags)}")
        self.rules.woke(self.rules.to_wake(tags))
        self.there |= set(tags)
        await asyncio.sleep(1)
        return self._memory()


def shared(capacity=CAPACITY, ranks_keep=(), replica_keeps=(), groups=("actor_train",)):
    log = []
    replica = Replica(log, keeps=replica_keeps)
    ranks = {name: Ranks(log, name, keeps=ranks_keep) for name in groups}
    devices = {name: (0, 1) for name in (*groups, replica.name)}
    memory = DeviceMemory(devices_of=devices, capacity_bytes=capacity)
    turns = PhaseSwitcher(lambda: [replica], memory)
    return turns, ranks, log


async def started(turns, ranks):
    """As the launcher starts: engines first, then they sleep, then the ranks."""
    await turns.to_trainer(DROP_WEIGHTS)
    await turns.add_groups(ranks)


def test_one_step_takes_its_turns_in_this_order_and_no_device_ever_holds_two_phases(run):
    turns, ranks, log = shared()

    async def scenario():
        await started(turns, ranks)
        await turns.to_both()
        assert turns.turn is DevicePhase.BOTH
        await turns.to_engines()
        assert turns.turn is DevicePhase.ENGINES
        await turns.to_trainer()
        assert turns.turn is DevicePhase.TRAINER

    run(scenario())
    assert log == [
        "actor_infer-0 sleeps 2",
        "actor_train loads weights+optimizer+gradients",
        "actor_train offloads optimizer+gradients",
        "actor_infer-0 wakes weights",
        "actor_train offloads weights+optimizer+gradients",
        "actor_infer-0 wakes kv_cache",
        "actor_infer-0 sleeps 1",
        "actor_train loads weights+optimizer+gradients",
    ]
    assert turns.memory.peak_bytes == CAPACITY and turns.changes == 4 and turns.seconds == 7


def test_without_a_push_both_steps_are_taken_at_once_and_a_turn_that_is_held_costs_nothing(run):
    turns, ranks, log = shared()

    async def scenario():
        await started(turns, ranks)
        await asyncio.gather(turns.to_engines(), turns.to_engines())
        before = len(log)
        await turns.to_engines()
        assert len(log) == before and turns.turn is DevicePhase.ENGINES
        await asyncio.gather(turns.to_trainer(), turns.to_trainer())

    run(scenario())
    assert log.count("actor_infer-0 wakes weights") == 1
    assert log.count("actor_train loads weights+optimizer+gradients") == 1 + 1, "at the start, and once again"


def test_a_push_that_failed_half_way_ends_in_the_trainers_turn_with_all_of_its_state(run):
    turns, ranks, log = shared()

    async def scenario():
        await started(turns, ranks)
        await turns.to_both()
        await turns.to_trainer()
        assert turns.turn is DevicePhase.TRAINER and not ranks["actor_train"].away

    run(scenario())
    assert turns.memory.peak_bytes == CAPACITY


def test_a_reference_on_the_same_devices_goes_with_the_trainer_and_gives_its_weights_back_before_a_push(run):
    turns, ranks, log = shared(capacity=2 * CAPACITY, groups=("actor_train", "reference"))

    async def scenario():
        await started(turns, ranks)
        await turns.to_both()

    run(scenario())
    assert "reference offloads weights+optimizer+gradients" in log
    assert "actor_train offloads optimizer+gradients" in log


@pytest.mark.parametrize(("keeps_frozen", "level"), [(False, DROP_WEIGHTS), (True, KEEP_WEIGHTS)])
def test_engines_keep_the_weights_below_adapters_that_are_pushed_alone(run, keeps_frozen, level):
    turns, ranks, log = shared()

    class Learner:
        async def learn(self, groups, step):
            log.append(f"step {step}")
            return StepReport(metrics={}, logprobs_s=0, train_s=0, collation_s=0, num_samples=0, num_tokens=0)

    class Running:
        async def interrupt(self, mode, timeout_s):
            pass

        async def release(self):
            pass

    async def scenario():
        await started(turns, ranks)
        rollout = PhasedRollout(Running(), turns, timeout_s=1.0, keeps_frozen=keeps_frozen)
        await rollout.to_engines()
        del log[:]
        learner = PhasedLearner(Learner(), rollout, lambda step: step == 2)
        for step in (1, 2):
            await learner.learn([], step)
            await rollout.to_engines()

    run(scenario())
    sleeps = [line for line in log if "sleeps" in line]
    assert sleeps == [f"actor_infer-0 sleeps {KEEP_WEIGHTS}", f"actor_infer-0 sleeps {level}"]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"replica_keeps": (KV_CACHE,)}, "actor_infer-0 should have freed its device memory and holds 10 bytes"),
        ({"replica_keeps": (WEIGHTS,)}, "actor_infer-0 should have freed its device memory and holds 6 bytes"),
        ({"ranks_keep": ("optimizer",)}, "device 0 has 9 bytes and its roles hold 10: {'actor_infer-0': 3"),
        ({"ranks_keep": ("weights",), "capacity": None}, "actor_train should have freed its device memory and holds 6"),
    ],
)
def test_memory_that_was_kept_is_found_by_name_at_once(run, faults, message):
    """A sleep that frees nothing, and an offload that forgets a kind, end elsewhere as an out-of-memory error."""
    turns, ranks, _ = shared(**faults)

    async def scenario():
        await started(turns, ranks)
        await turns.to_engines()

    with pytest.raises(MemoryNotGivenBack) as error:
        run(scenario())
    assert message in str(error.value)


@pytest.fixture
def colocated(a_run):
    def make(**options):
        log, held = [], {}

        def turns_of(replicas):
            for replica in replicas:
                sleeper = Replica(log, replica.name)
                held[replica.name] = sleeper
                replica.sleep, replica.wake = sleeper.sleep, sleeper.wake
            memory = DeviceMemory(devices_of={"actor_train": (0, 1), **{r.name: (i,) for i, r in enumerate(replicas)}})
            return PhaseSwitcher(lambda: replicas, memory)

        done = a_run(ratio=0.0, turns_of=turns_of, **options)
        done.ranks, done.log, done.sleepers = Ranks(log), log, held
        return done

    return make


async def go(done):
    await done.turns.to_trainer(DROP_WEIGHTS)
    await done.turns.add_groups({"actor_train": done.ranks})
    learn, generate = done.learn, [r.submit for r in done.replicas]

    async def learned(groups, step):
        assert done.turns.turn is DevicePhase.TRAINER and not done.ranks.away, "trained without its state"
        return await learn(groups, step)

    async def saved(step):
        assert done.turns.turn is DevicePhase.TRAINER and not done.ranks.away, "saved without its state"
        done.saved.append(step)

    for replica, submit in zip(done.replicas, generate, strict=True):

        async def submitted(requests, replica=replica, submit=submit):
            sleeper = done.sleepers[replica.name]
            assert sleeper.there == {WEIGHTS, KV_CACHE} and done.turns.turn is DevicePhase.ENGINES, "generates asleep"
            assert done.ranks.away == set(STATE_KINDS)
            await submit(requests)

        replica.submit = submitted
    done.learn, done.save = learned, saved
    return await done.go()


def test_a_colocated_run_trains_pushes_validates_and_saves_each_in_its_turn(run, colocated):
    done = colocated(steps=5, save_every=2, eval_every=2)
    assert run(go(done)) is RunEnd.FINISHED
    assert [step for step, _ in done.learned] == [1, 2, 3, 4, 5] and len(set(done.rows)) == 20
    assert all(m["staleness/max"] == 0 for m in done.published)
    assert done.saved == [2, 4, 5]
    assert done.log.count("engine-0 sleeps 1") == 4, "the saves, the last one after the last push"
    assert done.log.count("engine-0 sleeps 2") == 1 + 4


@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainers_turn_before_a_step_is_a_wait_for_rollouts_and_no_work_of_the_ranks(run, colocated, parts):
    """8 s of training; before each part engines sleep for a second and ranks load their state for another."""
    done = colocated(steps=4, parts=parts, eval_every=2, save_every=2)
    assert run(go(done)) is RunEnd.FINISHED
    for metrics in done.published:
        step_s, waits = metrics["time/step_s"], {k: v for k, v in metrics.items() if k.startswith("idle/trainer_")}
        assert (1 - sum(waits.values())) * step_s == pytest.approx(8.0)
        before = waits["idle/trainer_rollouts"] + waits["idle/trainer_rewards"]
        assert metrics["idle/trainer"] == pytest.approx(before)
        assert before * step_s - metrics["time/wait_batch_s"] == pytest.approx(2.0 * parts)


def test_several_steps_per_push_and_a_step_in_parts_generate_in_between(run, colocated):
    for options in ({"sync_every": 2}, {"parts": 2}):
        done = colocated(steps=4, **options)
        assert run(go(done)) is RunEnd.FINISHED
        assert sorted(done.rows) == list(range(16))


def test_a_stop_in_the_middle_saves_in_the_trainers_turn(run, colocated):
    done = colocated(steps=100)

    async def stopped():
        task = asyncio.create_task(go(done))
        await asyncio.sleep(60)
        done.pipeline.request_stop()
        return await task

    assert run(stopped()) is RunEnd.INTERRUPTED
    assert done.saved == [done.trainer.trained]
