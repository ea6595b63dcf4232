"""In which order a push goes, what it says about itself meanwhile, and how a lost replica comes back."""

import asyncio
from array import array

import pytest

from roll_async.weight_sync.bucket import Block, Bucket
from roll_async.weight_sync.canary import Canary, CanaryOptions, EngineMismatch
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.protocol import SyncFailed, SyncOptions, SyncState
from roll_async.weight_sync.push import ParameterSynchronizer

BUCKETS, LOAD_S, COMMIT_S, PAUSE_S = 4, 1.0, 0.5, 0.25


class Engine:
    """Takes buckets in and checks the order of the calls: nothing is committed on a running engine."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.serves, self.got, self.wrong, self.differs = 0, None, {}, 0.0

    def _step(self, call):
        self.world.calls.append((self.name, call, asyncio.get_running_loop().time()))
        trouble = self.wrong.get(call)
        if trouble:
            raise trouble.pop(0)

    async def begin_update(self, plan):
        self._step("begin")
        assert plan.transport == "shm" or self.world.stopped
        self.version, self.got = plan.version, []

    async def load_bucket(self, bucket):
        self._step("load")
        self.world.states.append(self.world.sync.status())
        await asyncio.sleep(LOAD_S)
        self.got.append(bucket.index)

    async def finish_update(self):
        self._step("finish")
        return f"{self.version}:{self.got}"

    async def commit(self, version):
        self._step("commit")
        assert (
            (self.world.stopped or self.name in self.world.out)
            and self.got == list(range(BUCKETS))
            and version == self.version
        )
        await asyncio.sleep(COMMIT_S)
        self.serves = version

    async def score(self, rows):
        self._step("score")
        assert self.name not in self.world.out
        return [array("f", [-1.0 * self.serves + self.differs]) for _ in rows]


class World:
    """A trainer, a rollout and engines around one synchronizer, on the virtual clock."""

    def __init__(self, num_engines=2, canary=None, **options):
        self.calls, self.states, self.held, self.back, self.stopped = [], [], [], [], False
        self.engines = [Engine(self, f"engine-{i}") for i in range(num_engines)]
        self.out, self.trained, self.holding, self.expects_return = {}, 1, {}, False
        options = {"transport": "shm", "max_retries": 1, "timeout_s": 20.0, "retry_delay_s": 3.0, **options}
        self.sync = ParameterSynchronizer(
            self,
            self,
            self,
            SyncOptions(**options),
            weights_held=self.held.append,
            canary=None if canary is None else Canary([[1, 2]], self, canary),
        )

    async def score(self, rows):
        return [array("f", [-1.0 * self.trained]) for _ in rows]

    async def export_weights(self, plan):
        yield plan
        for index in range(BUCKETS):
            yield Bucket(index=index, blocks=(Block(source=0, slots=(), num_bytes=10, location=""),))
        yield f"{plan.version}:{list(range(BUCKETS))}"

    async def interrupt(self, mode, timeout_s):
        self.states.append(self.sync.status())
        self.calls.append(("rollout", "interrupt", asyncio.get_running_loop().time()))
        await asyncio.sleep(PAUSE_S)
        self.stopped = True

    async def release(self):
        self.calls.append(("rollout", "release", asyncio.get_running_loop().time()))
        self.stopped = False

    @property
    def clients(self):
        return [e for e in self.engines if e.name not in self.out]

    def attach(self, event):
        self.event = event

    def hold(self, replica):
        self.holding[replica.name] = replica
        self.event.set()

    async def reject(self, replica, reason):
        self.holding.pop(replica.name, None)
        self.out[replica.name] = reason

    async def rejoin(self, replica):
        self.back.append((replica.name, replica.serves))
        del self.out[replica.name], self.holding[replica.name]

    def order(self, *wanted):
        return [call for _, call, _ in self.calls if call in wanted]


def test_engines_generate_while_weights_travel_and_stop_for_the_swap_only(run):
    world = World()
    report = run(world.sync.push(1))
    assert world.order("load", "interrupt", "commit", "release") == (
        ["load"] * 2 * BUCKETS + ["interrupt", "commit", "commit", "release"]
    )
    assert report.transfer_s == pytest.approx(BUCKETS * LOAD_S)
    assert report.pause_s == pytest.approx(PAUSE_S)
    assert report.stopped_s == pytest.approx(PAUSE_S + COMMIT_S)
    assert report.total_s == pytest.approx(BUCKETS * LOAD_S + PAUSE_S + COMMIT_S)


def test_a_transport_into_the_served_weights_stops_the_engines_first(run):
    world = World(transport="nccl")
    report = run(world.sync.push(1))
    assert world.order("interrupt", "begin", "release") == ["interrupt", "begin", "begin", "release"]
    assert report.stopped_s == report.total_s


@pytest.mark.parametrize("delay_s", [3.0, 17.5])
def test_a_failed_transfer_is_retried_without_stopping_any_engine(run, delay_s):
    world = World(retry_delay_s=delay_s)
    world.engines[1].wrong = {"load": [UpdateFailed("lost a packet")]}
    report = run(world.sync.push(1))
    begins = [t for _, call, t in world.calls if call == "begin"]
    (interrupted,) = [t for _, call, t in world.calls if call == "interrupt"]
    assert len(begins) == 3 and max(begins) < interrupted
    assert begins[2] - begins[0] == pytest.approx(BUCKETS * LOAD_S + delay_s)
    assert report.attempts == 2 and [e.serves for e in world.engines] == [1, 1]
    assert report.stopped_s == pytest.approx(PAUSE_S + COMMIT_S)


def test_when_every_transfer_fails_the_engines_were_never_stopped(run):
    world = World(num_engines=1)
    world.engines[0].wrong = {"finish": [UpdateFailed("no")] * 2}
    with pytest.raises(SyncFailed, match="version 3 reached no engine after 1 retries.*engine-0.*no"):
        run(world.sync.push(3))
    assert world.order("interrupt", "commit") == [] and world.held == [] and world.sync.version is None


def test_a_failed_swap_is_transferred_again_before_the_engines_run(run):
    world = World()
    world.engines[0].wrong = {"commit": [UpdateFailed("out of memory")]}
    report = run(world.sync.push(1))
    assert [e.serves for e in world.engines] == [1, 1] and report.attempts == 2
    assert world.order("interrupt", "release") == ["interrupt", "release"]
    assert world.held == [1]


def test_the_status_tells_what_a_push_is_doing(run):
    world = World(num_engines=1)
    world.engines[0].wrong = {"begin": [UpdateFailed("no such file")]}

    async def go():
        pushing = asyncio.create_task(world.sync.push(7))
        await asyncio.sleep(1.0)
        waiting = world.sync.status()
        await pushing
        return waiting

    waiting = run(go())
    assert waiting.state is SyncState.WAITING_TO_RETRY and waiting.target == 7 and waiting.version is None
    assert waiting.failures == {"engine-0": "UpdateFailed: no such file"} and waiting.sync_failures == 1
    transferring = [s for s in world.states if s.state is SyncState.TRANSFERRING]
    assert [s.attempt for s in transferring] == [2] * BUCKETS
    assert [s.state for s in world.states] == [SyncState.TRANSFERRING] * BUCKETS + [SyncState.PAUSING]
    idle = world.sync.status()
    assert (idle.state, idle.version, idle.target, idle.param_sync_count) == (SyncState.IDLE, 7, None, 1)


def test_a_replica_taken_out_comes_back_with_the_next_push_and_serves_only_then(run):
    world = World()
    lost = world.engines[0]
    lost.wrong = {"load": [ConnectionError("gone")] * 2}

    async def go():
        await world.sync.push(1)
        assert world.out == {"engine-0": "ConnectionError: gone"} and world.sync.status().removed == ("engine-0",)
        lost.wrong = {}
        world.hold(lost)
        assert lost.serves == 0 and world.back == []
        report = await world.sync.push(2)
        assert report.replicas == 2
        await world.sync.push(3)

    run(go())
    assert world.back == [("engine-0", 2)] and world.sync.status().removed == ()
    assert [e.serves for e in world.engines] == [3, 3] and world.held == [1, 2, 3]


def test_a_returning_replica_that_fails_again_is_reported_so_that_it_can_be_restarted_once_more(run):
    world = World()
    world.out["engine-0"] = "restarted"
    returning = world.engines[0]
    returning.wrong = {"begin": [ConnectionError("gone")] * 2}

    async def go():
        world.hold(returning)
        return await world.sync.push(1)

    assert run(go()).replicas == 1
    assert world.back == [] and world.out == {"engine-0": "ConnectionError: gone"} and world.held == [1]


def test_a_replica_that_is_back_under_its_name_is_not_taken_for_the_one_that_proved_the_weights(run):
    world = World()
    proved = world.engines[0]

    async def go():
        pushing = asyncio.create_task(world.sync.push(1))
        await asyncio.sleep(BUCKETS * LOAD_S + PAUSE_S / 2)
        world.engines[0] = Engine(world, "engine-0")
        return await pushing

    assert run(go()).replicas == 1 and world.out == {}
    assert proved.serves == 0 and [e.serves for e in world.engines] == [0, 1]


def test_a_replica_that_comes_back_between_pushes_gets_the_present_weights_and_stops_nobody(run):
    world = World()
    world.out["engine-0"] = "restarted"

    async def go():
        await world.sync.push(1)
        world.calls.clear()
        waiting = asyncio.ensure_future(world.sync.wait_for_returned())
        await asyncio.sleep(1)
        assert not waiting.done()
        world.hold(world.engines[0])
        await waiting
        await world.sync.resync_returned(2)

    run(go())
    assert world.back == [("engine-0", 2)] and world.engines[1].serves == 1
    assert world.order("interrupt", "release") == [] and world.held == [1]


def test_a_returning_replica_that_is_slow_to_go_on_holds_neither_the_queue_nor_the_figures(run):
    class Slow(World):
        async def rejoin(self, replica):
            self.told = list(self.held), self.sync.version, self.stopped
            await asyncio.sleep(1000.0)
            await super().rejoin(replica)

    world = Slow()
    world.out["engine-0"] = "restarted"

    async def go():
        world.hold(world.engines[0])
        return await world.sync.push(4)

    report = run(go())
    assert world.told == ([4], 4, False) and world.back == [("engine-0", 4)]
    assert report.stopped_s == pytest.approx(PAUSE_S + COMMIT_S) and report.total_s < 10


@pytest.mark.parametrize("differs", [0.0, 1.0])
def test_with_stop_a_replica_that_returns_between_pushes_is_asked_before_anything_of_it_is_trained(run, differs):
    world = World(canary=CanaryOptions(prompts=1, band=0.1, stop=True))
    world.out["engine-0"] = "restarted"

    async def go():
        await world.sync.push(1)
        before, world.trained = await world.sync.checked(), 2
        world.engines[0].differs = differs
        world.hold(world.engines[0])
        try:
            await world.sync.resync_returned(2)
        finally:
            assert world.back == [("engine-0", 2)] and await world.sync.checked() is before
            assert [name for name, call, _ in world.calls if call == "score"] == ["engine-1", "engine-0"]

    if differs:
        with pytest.raises(EngineMismatch, match="version 2: engine-0, which returned .*by 1 nats.*on_mismatch: stop"):
            run(go())
    else:
        run(go())
    assert world.sync.status().state is SyncState.IDLE


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("score_s", [COMMIT_S / 2, 3 * COMMIT_S])
def test_the_trainer_scores_the_canary_while_the_engines_swap_unless_they_share_its_devices(run, score_s, at_once):
    class Scoring(World):
        async def score(self, rows):
            self.calls.append(("trainer", "scores", asyncio.get_running_loop().time()))
            await asyncio.sleep(score_s)
            return await super().score(rows)

    world = Scoring(canary=CanaryOptions(prompts=1, band=0.1, at_once=at_once))

    async def go():
        report = await world.sync.push(1)
        return report, asyncio.get_running_loop().time()

    report, ended_s = run(go())
    transfer_s = BUCKETS * LOAD_S
    first, *_, last = world.order("scores", "begin", "commit", "release")
    assert (first, last) == (("scores", "release") if at_once else ("begin", "release"))
    assert report.stopped_s == PAUSE_S + COMMIT_S  # the engines do not wait for the trainer's scores
    assert ended_s == transfer_s + PAUSE_S + (score_s + COMMIT_S if at_once else max(score_s, COMMIT_S))
    assert world.sync.status().version == 1


def test_a_swap_that_is_tried_again_asks_the_trainer_once(run):
    world = World(canary=CanaryOptions(prompts=1, band=0.1))
    world.engines[0].wrong["commit"] = [UpdateFailed("no memory")]
    scores = []

    async def score(rows):
        scores.append(rows)
        return [array("f", [-1.0]) for _ in rows]

    world.score = score

    async def go():
        await world.sync.push(1)
        return await world.sync.checked()

    assert set(run(go()).difference) == {"engine-0", "engine-1"} and len(scores) == 1


def test_a_trainer_that_cannot_score_ends_the_push(run):
    world = World(canary=CanaryOptions(prompts=1, band=0.1))

    async def score(rows):
        raise ConnectionError("actor_train rank 0 is gone")

    world.score = score
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        run(world.sync.push(1))
    assert world.sync.status().state is SyncState.IDLE and not world.stopped


def test_a_replica_that_leaves_while_another_one_rejoins_is_let_go(run):
    class Leaving(World):
        async def rejoin(self, replica):
            await super().rejoin(replica)
            self.holding.pop("engine-1")

    world = Leaving()
    world.out.update({"engine-0": "restarted", "engine-1": "restarted"})

    async def go():
        for engine in world.engines:
            world.hold(engine)
        await world.sync.resync_returned(2)

    run(go())
    assert world.back == [("engine-0", 2)]


def test_a_push_without_any_engine_goes_on_if_one_is_on_its_way_back_and_fails_otherwise(run):
    world = World(num_engines=1)
    world.engines[0].wrong = {"load": [ConnectionError("gone")] * 4}
    with pytest.raises(SyncFailed, match="gone"):
        run(world.sync.push(1))
    world.engines, world.expects_return = [], True
    assert run(world.sync.push(1)).replicas == 0 and world.held == [1]


def test_log_lines_say_which_version_and_begin_as_documented(run, caplog):
    world = World()
    world.engines[0].wrong = {"load": [UpdateFailed("torn")] * 2}
    with caplog.at_level("INFO"):
        run(world.sync.push(5))
    lines = [r.message for r in caplog.records if r.name.endswith("weight_sync.push")]
    assert len(lines) == 3 and all(line.startswith("Parameter sync: ") for line in lines)
    assert "version 5 attempt 1 failed" in lines[0] and "engine-0 is removed: UpdateFailed: torn" in lines[1]
    assert "version 5 on 1 replicas" in lines[2]
