"""A push reaches every replica or says which one it did not reach; nothing is called held that was not proved."""

import asyncio

import pytest

from roll_async.config.api import load
from roll_async.weight_sync.bucket import Block, Bucket
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.protocol import SyncFailed, SyncOptions, SyncState
from roll_async.weight_sync.push import ParameterSynchronizer


class FakeTrainer:
    """Exports three buckets of 100 bytes; the digest names the version and the buckets."""

    def __init__(self):
        self.plans, self.open, self.gather_s = [], 0, 0.0

    async def export_weights(self, plan):
        self.plans.append(plan)
        self.open += 1
        try:
            yield plan
            for index in range(3):
                await asyncio.sleep(self.gather_s)
                block = Block(source=0, slots=(), num_bytes=100, location=f"v{plan.version}/{index}")
                yield Bucket(index=index, blocks=(block,))
            yield digest_of(plan.version, range(3))
        finally:
            self.open -= 1


def digest_of(version, indexes):
    return f"{version}:{','.join(map(str, indexes))}"


class FakeReplica:
    """Takes buckets in; `script` holds what goes wrong at each call: {"load_bucket": [None, error, ...]}; of a commit
    also its seconds."""

    def __init__(self, name, log, load_s=1.0, **script):
        self.name, self.log, self.load_s = name, log, load_s
        self.script = {key: list(value) for key, value in script.items()}
        self.serves, self.plan, self.loaded = 0, None, []

    def _step(self, call):
        self.log.append((self.name, call))
        wrong = self.script.get(call)
        trouble = wrong.pop(0) if wrong else None
        if isinstance(trouble, Exception):
            raise trouble
        return trouble

    async def begin_update(self, plan):
        self._step("begin_update")
        self.plan, self.loaded = plan, []

    async def load_bucket(self, bucket):
        if self._step("load_bucket") == "hang":
            await asyncio.sleep(1e6)
        await asyncio.sleep(self.load_s)
        self.loaded.append(bucket.index)

    async def finish_update(self):
        return self._step("finish_update") or digest_of(self.plan.version, self.loaded)

    async def commit(self, version):
        wait = self._step("commit")
        await asyncio.sleep(1e6 if wait == "hang" else wait or 0.0)
        self.serves = version


class FakeRollout:
    """`stubborn`: replicas that do not pause, so that they are gone when `interrupt` returns."""

    def __init__(self, log, removed, stubborn=()):
        self.log, self.removed, self.stubborn = log, removed, stubborn

    async def interrupt(self, mode, timeout_s):
        self.log.append(("rollout", f"interrupt {mode}"))
        self.removed.update(dict.fromkeys(self.stubborn, "did not pause"))
        if len(self.removed) == 2:
            raise ConnectionError("no engine is left")

    async def release(self):
        self.log.append(("rollout", "release"))


class World:
    """A synchronizer between fakes, and what it told the others."""

    def __init__(self, *scripts, stubborn=(), load_s=(1.0, 1.0), **options):
        self.log, self.trainer, self.removed, self.held = [], FakeTrainer(), {}, []
        self.replicas = [
            FakeReplica(f"engine-{i}", self.log, load_s[i], **script) for i, script in enumerate(scripts or ({}, {}))
        ]
        self.rollout = FakeRollout(self.log, self.removed, stubborn)
        options = {"transport": "shm", "max_retries": 2, "timeout_s": 60.0, "retry_delay_s": 1.0, **options}
        self.sync = ParameterSynchronizer(
            self.trainer,
            self.rollout,
            self,
            SyncOptions(**options),
            weights_held=self._weights_held,
        )

    def _weights_held(self, version):
        self.held.append((version, [r.serves for r in self.replicas if r.name not in self.removed]))

    holding, expects_return = {}, False

    @property
    def clients(self):
        return [r for r in self.replicas if r.name not in self.removed]

    def attach(self, held):
        pass

    async def reject(self, replica, reason):
        self.removed[replica.name] = reason

    def calls(self, name):
        return [call for who, call in self.log if who == name]


def test_a_push_brings_every_replica_to_the_version_and_reports_what_it_moved(run):
    world = World(interrupt_mode="keep")
    report = run(world.sync.push(7))
    assert [r.serves for r in world.replicas] == [7, 7]
    assert all(r.plan.transport == "shm" and r.loaded == [0, 1, 2] for r in world.replicas)
    assert (report.version, report.num_bytes, report.attempts, report.replicas) == (7, 300, 1, 2)
    assert world.calls("rollout") == ["interrupt keep", "release"]
    assert world.held == [(7, [7, 7])]
    assert (world.sync.param_sync_count, world.sync.sync_failures, world.sync.version) == (1, 0, 7)
    assert world.sync.status().state is SyncState.IDLE and world.trainer.open == 0


def test_weights_count_as_held_only_after_every_commit_and_generation_goes_on_only_then(run):
    world = World()
    run(world.sync.push(1))
    last_commit = max(i for i, (_, call) in enumerate(world.log) if call == "commit")
    assert world.log.index(("rollout", "release")) > last_commit
    for replica in world.replicas:
        calls = world.calls(replica.name)
        assert calls.index("finish_update") < calls.index("commit")


def test_replicas_load_a_bucket_at_the_same_time(run):
    world = World(load_s=(1.0, 2.0))
    report = run(world.sync.push(1))
    assert report.transfer_s == pytest.approx(3 * 2.0)


def test_a_replica_that_fails_once_is_tried_again_alone(run):
    world = World({"load_bucket": [None, UpdateFailed("shm is full")]}, {})
    report = run(world.sync.push(2))
    assert [r.serves for r in world.replicas] == [2, 2] and not world.removed
    assert report.attempts == 2 and world.sync.sync_failures == 1 and len(world.trainer.plans) == 2
    assert world.calls("engine-1").count("begin_update") == 1, "a replica that has the version is left alone"


@pytest.mark.parametrize(("call", "told"), [("load_bucket", [False, True]), ("commit", [False, False])])
def test_the_trainer_is_told_of_replicas_that_have_proved_and_not_swapped_yet(run, call, told):
    world = World({call: [UpdateFailed("broken")]}, {})
    run(world.sync.push(2))
    assert [plan.others_proved for plan in world.trainer.plans] == told


@pytest.mark.parametrize("call", ["begin_update", "load_bucket", "finish_update", "commit"])
@pytest.mark.parametrize("error", [ConnectionError("gone"), UpdateFailed("broken"), TimeoutError("late")])
def test_a_replica_that_keeps_failing_is_taken_out_with_its_reason_and_the_run_goes_on(run, call, error):
    world = World({call: [error] * 3}, {})
    report = run(world.sync.push(3))
    assert world.removed == {"engine-0": f"{type(error).__name__}: {error}"}
    assert world.held == [(3, [3])] and report.replicas == 1 and world.sync.sync_failures == 3
    assert world.trainer.open == 0


def test_a_replica_with_another_digest_never_commits_and_is_taken_out(run):
    world = World({"finish_update": ["somebody else's"] * 3}, {})
    run(world.sync.push(4))
    assert "commit" not in world.calls("engine-0") and world.replicas[0].serves == 0
    reason = world.removed["engine-0"]
    assert "somebody else's" in reason and digest_of(4, range(3)) in reason


def test_a_hanging_replica_costs_its_time_out_and_not_the_run(run):
    world = World({"load_bucket": ["hang"] * 3}, {}, timeout_s=10.0)

    async def go():
        loop = asyncio.get_running_loop()
        started = loop.time()
        await world.sync.push(5)
        return loop.time() - started

    assert run(go()) == pytest.approx(10 + 3, abs=1), "a time-out is not retried inside the push"
    assert list(world.removed) == ["engine-0"] and "sync_timeout 10 s" in world.removed["engine-0"]
    assert world.replicas[1].serves == 5 and world.held == [(5, [5])]


@pytest.mark.parametrize("hung", [(1,), (1, 2)])
def test_hung_loads_of_four_do_not_hold_the_proven_ones(run, hung):
    """With the defaults: 3 retries of 300 s. Over files no replica waits for the one before it."""
    scripts = [{"load_bucket": ["hang"] * 9} if i in hung else {} for i in range(4)]
    world = World(*scripts, load_s=(1.0,) * 4, max_retries=3, timeout_s=300.0)

    async def go():
        loop = asyncio.get_running_loop()
        started = loop.time()
        report = await world.sync.push(5)
        return report, loop.time() - started

    report, seconds = run(go())
    assert seconds < 45 and report.replicas == 4 - len(hung) and report.attempts == 1
    assert list(world.removed) == [f"engine-{i}" for i in hung]
    assert all("30 s after half of the replicas" in reason for reason in world.removed.values())
    assert [r.serves for r in world.replicas] == [0 if i in hung else 5 for i in range(4)]


def test_a_replica_that_waited_for_a_hung_one_to_relay_is_tried_again_without_it(run):
    world = World({}, {"load_bucket": ["hang"] * 9}, {"load_bucket": ["hang"]}, {}, load_s=(1.0,) * 4, transport="gloo")
    report = run(world.sync.push(5))
    assert list(world.removed) == ["engine-1"] and (report.replicas, report.attempts) == (3, 2)
    assert world.replicas[2].serves == 5 and world.replicas[2].plan.upstream is None


def test_a_slow_swap_is_not_late_because_another_replica_was_dead_at_once(run):
    """No time of a swap that came to its end is known by which 40 s would be long."""
    world = World({"commit": [ConnectionError("gone")] * 9}, {"commit": [40.0]}, timeout_s=300.0)
    report = run(world.sync.push(5))
    assert list(world.removed) == ["engine-0"] and world.replicas[1].serves == 5 and report.replicas == 1


def test_a_late_commit_leaves_the_others_serving(run):
    world = World({"commit": ["hang"] * 9}, {}, timeout_s=10.0, max_retries=3)
    report = run(world.sync.push(5))
    assert report.replicas == 1 and list(world.removed) == ["engine-0"] and report.attempts == 1


def test_nobody_waits_for_a_hanging_replica_that_was_taken_out_meanwhile(run):
    world = World({"load_bucket": ["hang"]}, {}, timeout_s=300.0)

    async def go():
        loop = asyncio.get_running_loop()
        started = loop.time()
        loop.call_later(20, world.removed.update, {"engine-0": "no sign of life"})
        await world.sync.push(5)
        return loop.time() - started

    assert 20 <= run(go()) < 30
    assert world.removed == {"engine-0": "no sign of life"}
    assert world.replicas[1].serves == 5 and world.held == [(5, [5])]


def test_a_trainer_that_sends_nothing_fails_the_push_after_its_time_out(run):
    world = World(timeout_s=10.0)
    world.trainer.gather_s = 1e6
    with pytest.raises(SyncFailed, match="trainer sent nothing within sync_timeout 10 s"):
        run(world.sync.push(1))
    assert world.trainer.open == 0 and world.held == []


def test_when_no_replica_can_be_reached_the_push_fails_and_nothing_is_called_held(run):
    broken = {"commit": [UpdateFailed("no")] * 3}
    world = World(broken, broken)
    with pytest.raises(SyncFailed, match="version 6 reached no engine after 2 retries.*engine-0"):
        run(world.sync.push(6))
    assert world.held == [] and world.removed == {} and world.sync.version is None
    assert ("rollout", "release") not in world.log and world.sync.status().state is SyncState.IDLE
    assert world.sync.sync_failures == 3 and world.sync.param_sync_count == 0


@pytest.mark.parametrize(("transport", "exports"), [("shm", 1), ("nccl", 0)])
def test_without_an_engine_left_the_push_ends_before_any_served_weight_changes(run, transport, exports):
    world = World(stubborn=("engine-0", "engine-1"), transport=transport)
    with pytest.raises(ConnectionError, match="no engine is left"):
        run(world.sync.push(1))
    assert len(world.trainer.plans) == exports and world.held == [] and world.sync.status().state is SyncState.IDLE
    assert [r.serves for r in world.replicas] == [0, 0]


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_replica_that_does_not_pause_gets_no_new_weights_and_the_others_do(run, transport):
    world = World({"load_bucket": [None, UpdateFailed("late")]}, {}, stubborn=("engine-0",), transport=transport)
    report = run(world.sync.push(1))
    assert report.replicas == 1 and [r.serves for r in world.replicas] == [0, 1]
    assert "commit" not in world.calls("engine-0")
    assert world.removed == {"engine-0": "did not pause"}, "it is lost once: it must not use up two restarts"


def test_a_replica_that_left_meanwhile_is_not_waited_for(run):
    world = World({"load_bucket": [ConnectionError("gone")]}, {})

    async def leave():
        await asyncio.sleep(3.5)  # while the others are retried
        world.removed["engine-0"] = "restarted"

    async def go():
        leaving = asyncio.create_task(leave())
        report = await world.sync.push(8)
        await leaving
        return report

    assert run(go()).attempts <= 2
    assert world.replicas[1].serves == 8 and world.held == [(8, [8])]


def test_an_error_of_the_trainer_is_raised_and_not_blamed_on_a_replica(run):
    world = World()

    async def broken_export(plan):
        yield plan
        raise RuntimeError("rank 3 died while gathering")

    world.trainer.export_weights = broken_export
    with pytest.raises(RuntimeError, match="rank 3 died"):
        run(world.sync.push(1))
    assert world.removed == {} and world.held == []


def test_versions_follow_each_other_on_one_synchronizer(run):
    world = World()

    async def go():
        for version in range(4):
            await world.sync.push(version)

    run(go())
    assert [version for version, _ in world.held] == [0, 1, 2, 3]
    assert world.sync.param_sync_count == 4 and [r.serves for r in world.replicas] == [3, 3]


def test_a_push_tells_each_replica_which_one_is_ahead_of_it_and_the_first_pulls_from_the_trainer(run):
    world = World()
    run(world.sync.push(1))
    first, second = (replica.plan for replica in world.replicas)
    assert (first.replica, first.upstream) == ("engine-0", None)
    assert (second.replica, second.upstream) == ("engine-1", "engine-0")


def plans_of(world):
    """(export, base) of the plan that each replica saw last."""
    return [(r.plan.export, r.plan.base) for r in world.replicas]


def test_what_changed_is_sent_once_every_replica_holds_what_was_sent_before(run):
    world = World(sparse=True)

    async def go():
        for version, seen in ((1, (1, None)), (2, (2, 1)), (3, (3, 2))):
            await world.sync.push(version)
            assert plans_of(world) == [seen, seen]

    run(go())


@pytest.mark.parametrize("call", ["load_bucket", "commit"])
def test_a_replica_that_missed_a_version_gets_everything_and_so_do_the_others_after_it(run, call):
    """Transfers and commits fail at the second push; the replica is served by the third export."""
    world = World({call: ([None] * (3 if call == "load_bucket" else 1)) + [UpdateFailed("lost")]}, {}, sparse=True)

    async def go():
        await world.sync.push(1)
        await world.sync.push(2)
        assert plans_of(world) == [(3, None), (2, 1)]
        await world.sync.push(3)
        assert plans_of(world) == [(4, None), (4, None)]
        await world.sync.push(4)
        assert plans_of(world) == [(5, 4), (5, 4)]

    run(go())
    assert [r.serves for r in world.replicas] == [4, 4]


def test_a_replica_that_returns_gets_everything_under_the_same_name_too(run):
    world = World(sparse=True)

    async def go():
        await world.sync.push(1)
        world.replicas[1] = FakeReplica("engine-1", world.log)
        await world.sync.push(2)
        assert plans_of(world) == [(2, None), (2, None)]

    run(go())


def test_without_sparse_no_replica_keeps_anything(run):
    world = World()

    async def go():
        await world.sync.push(1)
        await world.sync.push(2)

    run(go())
    assert plans_of(world) == [(0, None), (0, None)]


def options_of(transport, *overrides):
    return SyncOptions.of(load("configs/rlvr_config_async_cpu.yaml", overrides, "rlvr"), transport)


def test_the_options_are_those_of_the_config():
    overrides = (
        "weight_sync.verify=full",
        "async_training.interrupt={mode: keep, timeout: 13}",
        "async_training.max_sync_retries=7",
        "async_training.sync_timeout=17",
        "async_training.sync_retry_delay=0.5",
    )
    assert options_of("gloo", *overrides) == SyncOptions(
        transport="gloo",
        verify="full",
        interrupt_mode="keep",
        interrupt_timeout_s=13.0,
        max_retries=7,
        timeout_s=17.0,
        retry_delay_s=0.5,
        sparse=True,
        adapters=False,
    )
    assert not options_of("shm").sparse and options_of("shm", "weight_sync.sparse=on").sparse
    assert options_of("shm", "actor_train.model_args.lora_rank=4").adapters
