"""Trainer and engines on the same devices: the order in which memory changes hands, and what is recorded of it."""

import asyncio

import pytest

from roll_async.inference.protocol import EngineMemory
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS, SleepRules
from roll_async.pipelines.colocation import DeviceMemory, MemoryNotGivenBack, PhaseSwitcher
from roll_async.pipelines.protocol import RunEnd, RunPlan
from roll_async.trainer.protocol import STATE_KINDS, StateMemory
from roll_async.weight_sync.protocol import DevicePhase

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


class Engines:
    """All replicas, which `interrupt` pauses."""

    def __init__(self, log):
        self.log = log

    async def interrupt(self, mode, timeout_s):
        self.log.append("engines are paused")

    async def resume(self):
        self.log.append("engines run")


def shared(capacity=CAPACITY, ranks_keep=(), replica_keeps=(), groups=("actor_train",)):
    log = []
    replica = Replica(log, keeps=replica_keeps)
    ranks = {name: Ranks(log, name, keeps=ranks_keep) for name in groups}
    names = {name: (0, 1) for name in (*groups, replica.name)}
    memory = DeviceMemory(devices_of=names, capacity_bytes=capacity)
    return PhaseSwitcher(Engines(log), lambda: [replica], memory, pause_timeout_s=1.0), ranks, log


async def started(devices, ranks):
    """As the launcher starts: engines first, then they sleep, then the ranks."""
    await devices.phase(DevicePhase.TRAIN, drop_engine_weights=True)
    await devices.add_groups(ranks)


def test_one_step_goes_through_its_phases_in_this_order_and_no_device_ever_holds_two(run):
    devices, ranks, log = shared()
    seconds = []

    async def scenario():
        await started(devices, ranks)
        for phase in (DevicePhase.PUSH, DevicePhase.GENERATE, DevicePhase.TRAIN):
            seconds.append(await devices.phase(phase))
            assert devices.current is phase

    run(scenario())
    assert log == [
        "engines are paused",
        "actor_infer-0 sleeps 2",
        "actor_train loads weights+optimizer+gradients",
        "actor_train offloads optimizer+gradients",
        "actor_infer-0 wakes weights",
        "actor_train offloads weights+optimizer+gradients",
        "actor_infer-0 wakes kv_cache",
        "engines run",
        "engines are paused",
        "actor_infer-0 sleeps 1",
        "actor_train loads weights+optimizer+gradients",
    ]
    assert devices.memory.peak_bytes == CAPACITY and seconds == [2.0, 2.0, 2.0]


def test_without_a_push_both_changes_come_at_once_and_the_current_phase_costs_nothing(run):
    devices, ranks, log = shared()

    async def scenario():
        await started(devices, ranks)
        for phase in (DevicePhase.GENERATE, DevicePhase.TRAIN):
            await devices.phase(phase)
            before = len(log)
            assert await devices.phase(phase) == 0.0 and len(log) == before and devices.current is phase

    run(scenario())
    assert log.count("actor_infer-0 wakes weights") == 1
    assert log.count("actor_train loads weights+optimizer+gradients") == 1 + 1, "at the start, and once again"


def test_a_push_pauses_no_engine_that_its_phase_has_paused_and_releases_all(run):
    devices, ranks, log = shared()

    async def scenario():
        await started(devices, ranks)
        await devices.phase(DevicePhase.PUSH)
        await devices.interrupt("resume", 1.0)
        await devices.release()
        assert devices.current is DevicePhase.GENERATE
        await devices.interrupt("resume", 1.0)

    run(scenario())
    assert log.count("engines are paused") == 2 and log.count("engines run") == 1


def test_a_push_that_failed_half_way_ends_in_phase_train_with_all_of_its_state(run):
    devices, ranks, log = shared()

    async def scenario():
        await started(devices, ranks)
        await devices.phase(DevicePhase.PUSH)
        await devices.phase(DevicePhase.TRAIN)
        assert devices.current is DevicePhase.TRAIN and not ranks["actor_train"].away

    run(scenario())
    assert devices.memory.peak_bytes == CAPACITY and "engines run" not in log


def test_a_reference_on_the_same_devices_goes_with_the_trainer_and_gives_its_weights_back_before_a_push(run):
    devices, ranks, log = shared(capacity=2 * CAPACITY, groups=("actor_train", "reference"))

    async def scenario():
        await started(devices, ranks)
        await devices.phase(DevicePhase.PUSH)

    run(scenario())
    assert "reference offloads weights+optimizer+gradients" in log
    assert "actor_train offloads optimizer+gradients" in log


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({}, [1, 2, 3]),  # after the last step no push of a next one need follow
        ({"sync_every": 2}, [2]),
        ({"pushes_adapters": True}, []),  # engines need the weights below them
        ({"groups_per_part": 2}, []),  # engines generate between the parts
    ],
)
def test_engines_drop_only_weights_that_a_push_surely_replaces(options, dropped):
    every = {"sync_every": 1, "save_every": 0, "eval_every": 0}
    sizes = {"groups_per_batch": 4, "groups_per_part": 4, "samples_per_group": 2}
    plan = RunPlan(first_step=1, max_steps=4, **{**every, **sizes, **options})
    assert [step for step in range(1, 5) if plan.replaces_weights_after(step)] == dropped


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
    devices, ranks, _ = shared(**faults)

    async def scenario():
        await started(devices, ranks)
        await devices.phase(DevicePhase.GENERATE)

    with pytest.raises(MemoryNotGivenBack) as error:
        run(scenario())
    assert message in str(error.value)


@pytest.fixture
def colocated(a_run):
    def make(**options):
        log, held = [], {}

        def devices_of(manager, replicas):
            for replica in replicas:
                sleeper = Replica(log, replica.name)
                held[replica.name] = sleeper
                replica.sleep, replica.wake = sleeper.sleep, sleeper.wake
            memory = DeviceMemory(devices_of={"actor_train": (0, 1), **{r.name: (i,) for i, r in enumerate(replicas)}})
            return PhaseSwitcher(manager, lambda: replicas, memory, pause_timeout_s=30.0)

        done = a_run(ratio=0.0, devices_of=devices_of, **options)
        done.ranks, done.log, done.sleepers = Ranks(log), log, held
        return done

    return make


async def go(done):
    await started(done.devices, {"actor_train": done.ranks})
    learn, generate = done.learn, [r.submit for r in done.replicas]

    async def learned(groups, step):
        assert done.devices.current is DevicePhase.TRAIN and not done.ranks.away, "trained without its state"
        return await learn(groups, step)

    async def saved(step):
        assert done.devices.current is DevicePhase.TRAIN and not done.ranks.away, "saved without its state"
        done.saved.append(step)

    for replica, submit in zip(done.replicas, generate, strict=True):

        async def submitted(requests, replica=replica, submit=submit):
            sleeper = done.sleepers[replica.name]
            assert sleeper.there == {WEIGHTS, KV_CACHE}, "generates asleep"
            assert done.devices.current is DevicePhase.GENERATE
            assert done.ranks.away == set(STATE_KINDS)
            await submit(requests)

        replica.submit = submitted
    done.learn, done.save = learned, saved
    return await done.go()


def test_a_colocated_run_trains_pushes_validates_and_saves_each_in_its_phase(run, colocated):
    done = colocated(steps=5, save_every=2, eval_every=2)
    assert run(go(done)) is RunEnd.FINISHED
    assert [step for step, _ in done.learned] == [1, 2, 3, 4, 5] and len(set(done.rows)) == 20
    assert all(m["staleness/max"] == 0 for m in done.published)
    assert done.saved == [2, 4, 5]
    assert done.log.count("engine-0 sleeps 1") == 4, "the saves, the last one after the last push"
    assert done.log.count("engine-0 sleeps 2") == 1 + 4


@pytest.mark.parametrize("parts", [1, 2])
def test_the_change_of_phase_before_a_step_is_a_wait_for_rollouts_and_no_work_of_the_ranks(run, colocated, parts):
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


def test_a_stop_in_the_middle_saves_in_phase_train(run, colocated):
    done = colocated(steps=100)

    async def stopped():
        task = asyncio.create_task(go(done))
        await asyncio.sleep(60)
        done.pipeline.request_stop()
        return await task

    assert run(stopped()) is RunEnd.INTERRUPTED
    assert done.saved == [done.trainer.trained]


def test_a_model_that_was_not_pushed_when_the_data_end_is_pushed_from_the_phase_of_the_trainer(run, colocated):
    """Engines have the devices then, because the groups of the next step were waited for."""
    done = colocated(steps=100, sync_every=2, eval_every=100)
    done.size = 12
    assert run(go(done)) is RunEnd.END_OF_DATA
    assert [step for step, _ in done.learned] == [1, 2, 3] and done.saved == [3]
    assert [fields["validation/version"] for name, fields in done.events if name == "validation"] == [3]
