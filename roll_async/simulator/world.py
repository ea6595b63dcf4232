"""A simulated run: the real pipeline, rollout, queue and synchronizer over fakes, on one virtual clock.

outcome = simulate(random_scenario(17))
assert outcome.findings == ()
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from roll_async.buffer.errors import LedgerError, first_cause
from roll_async.buffer.ledger import Ledger, MemoryLedger, SqliteLedger
from roll_async.buffer.states import QueueStats
from roll_async.inference.engine_host import EngineHost
from roll_async.pipelines.protocol import PipelineParts, RunEnd
from roll_async.pipelines.rlvr import RLVRPipeline
from roll_async.pipelines.wire import RolloutParts, RolloutSide, UserHooks, build_engines, build_pipeline, build_rollout
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.engine_supervisor import EngineSupervisor
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.dispatch.server_counts import ServerStats
from roll_async.rollout.filters.filter_budget import GeneratedTooMany
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.remote_side import RolloutClient
from roll_async.simulator.clock import Killed, VirtualLoop, run_virtual
from roll_async.simulator.invariants import Watch
from roll_async.simulator.lineage import CheckpointStore
from roll_async.simulator.parts.engine import SimEngine
from roll_async.simulator.parts.models import EngineFaults
from roll_async.simulator.parts.process import SimProcess
from roll_async.simulator.parts.replica import SimReplica
from roll_async.simulator.parts.roles import SimCheckpoint, SimTrainer
from roll_async.simulator.parts.starter import SimStarter
from roll_async.simulator.parts.tasks import ChatTasks
from roll_async.simulator.scenario import Scenario
from roll_async.simulator.watched import CheckedQueue, Observer, SeenManager, SeenRollouter

if TYPE_CHECKING:
    from roll_async.simulator.agents.groups import AgentTasks

_MAX_ROUNDS = 40_000
_START_TIMEOUT_S = 60.0


@dataclass(kw_only=True, slots=True)
class SimOutcome:
    """What came of a run."""

    scenario: Scenario
    end: str = ""
    """A RunEnd, or type and message of the error that ended it."""
    ended_s: float = 0.0
    rounds: int = 0
    steps: list[Mapping[str, float]] = field(default_factory=list)
    """Published metrics of each step since the last kill."""
    spans: list[tuple[str, str, float, float, dict[str, float | str]]] = field(default_factory=list)
    """(track, name, start, end, arguments)."""
    queue: QueueStats | None = None
    servers: ServerStats | None = None
    engine_busy: dict[str, float] = field(default_factory=dict)
    """Share of each replica's slots that generated, over the whole run."""
    masked_share: float = 0.0
    """Of all tokens of trained groups, what policy token_mask took out of the loss."""
    group_lags: list[tuple[int, int]] = field(default_factory=list)
    """(step, versions since admission), one per trained group."""
    findings: tuple[str, ...] = ()
    """Broken invariants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyParts:
    """Parts that `pipelines/wire.py: UserHooks` does not name, or broken ones that a test must find out."""

    scheduler: type[ChatCompletionScheduler] = ChatCompletionScheduler
    host: type[EngineHost] = EngineHost
    groups: type[GroupRunner] = GroupRunner
    """Of trajectories in worlds."""
    worlds: type | None = None
    """A sub-class of `agents/worlds.py: WorldRunner`, which needs the gateway; None = itself."""
    store: type[CheckpointStore] = CheckpointStore
    learner: type | None = None
    """A sub-class of `trainer/learner.py: Learner`, which needs torch; None = itself, where a world wants one."""


class _Found(BaseException):  # no Exception, which the parts under test could catch
    """An invariant is broken: what comes after it says nothing."""


class SimulatedRun:
    """One process of a run: from a checkpoint to its end or a kill."""

    def __init__(
        self,
        scenario: Scenario,
        watch: Watch,
        outcome: SimOutcome,
        ledger: Ledger,
        store: CheckpointStore,
        hooks: UserHooks,
        others: FaultyParts,
    ) -> None:
        self._others = others
        self._scenario, self.watch, self.outcome, self.store = scenario, watch, outcome, store
        self._ledger, self._hooks = ledger, hooks
        self.replicas: list[SimReplica] = []
        """All replicas since the start, those that have ended included."""
        self._stopped_s: float | None = None
        """When Ctrl-C was pressed."""
        self.ending_s: float | None = None
        """When the training had ended and the rollout was asked to stop."""
        self.manager: EnginePool
        self.managers: list[EnginePool] = []
        """That of training, and that of validation where it has replicas of its own."""
        self.supervisor: EngineSupervisor
        self.trainer: SimTrainer
        self.queue: CheckedQueue | None = None
        self._looked_at: object = None
        self.process: SimProcess | None = None
        self._tasks = self._make_tasks()
        self.on_death: Callable[[], None] = lambda: None
        """Called when the rollout process dies, before anything else of it ends."""

    def serving(self) -> list[SimReplica]:
        """Replicas that requests go to."""
        own = {id(replica): replica for replica in self.replicas}
        return [own[id(client)] for client in self.manager.clients]

    def instant(self) -> None:
        """All work of an instant is done; the clock is about to move. The first finding ends the run."""
        if self.queue is not None and not self.died:
            now, change = asyncio.get_running_loop().time(), self.queue.last_change
            if change is not self._looked_at:  # only after a change: this looks at every group
                self.watch.instant(self.queue)
                self._looked_at = change
            self.watch.dispatch(self.managers, now)
            self.watch.progressing(now)
        if self.watch.findings and not self.outcome.end:  # what is found at the end does not hide how it ended
            raise _Found

    async def run(self) -> None:
        """Run to the end. Errors of roles are written into the outcome, not raised."""
        outcome, loop = self.outcome, asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            pipeline = await self._build(stack)
            try:
                outcome.end = (await pipeline.run()).value
            except* (ConnectionError, RuntimeError, TimeoutError, AssertionError, GeneratedTooMany) as errors:
                first = first_cause(errors)
                outcome.end = f"{type(first).__name__}: {first}"
            outcome.ended_s = loop.time()
            self._collect()

    @property
    def died(self) -> bool:
        """The rollout process is gone."""
        return self.process is not None and self.process.dead

    async def _build(self, stack: AsyncExitStack) -> RLVRPipeline:
        scenario = self._scenario
        hooks = self._watched()
        stack.push_async_callback(self._close)  # first in, last out: replicas end after their managers
        starter = SimStarter(scenario, self.watch, self._new_replica, self.replicas)
        replicas = [starter.first(faults) for faults in scenario.engines]
        build = partial(
            build_engines,
            starter=starter,
            options=self._manager_options(),
            max_restarts=scenario.max_restarts,
            start_timeout_s=_START_TIMEOUT_S,
            hooks=hooks,
        )
        engines = build(replicas)  # pyright: ignore[reportArgumentType]  # never scores
        await engines.start(stack)
        self.managers.append(engines.manager)
        self.manager, self.supervisor = engines.manager, engines.supervisor
        validators = None
        if of_validation := [starter.first(faults) for faults in scenario.validation_engines]:
            validators = build(of_validation)  # pyright: ignore[reportArgumentType]
            await validators.start(stack)
            self.managers.append(validators.manager)
        step = self.watch.restored_step
        self.trainer = self._trainer()
        tasks = self._tasks
        parts = RolloutParts(
            engines=engines,
            groups=tasks.source,
            prompts=tasks.prompts,
            weights=self.trainer,  # pyright: ignore[reportArgumentType]  # never scores
            ledger=self._ledger,
            queue=scenario.queue,
            sync=scenario.sync,
            stop_timeout_s=scenario.manager.interrupt_timeout_s,
            budget=scenario.budget,
            held_out=scenario.held_out(tasks.held_out),
            validation_mode=scenario.validation_mode,
            validators=validators,
            restored=step,
            position=self.store.position_of(step),
        )
        side = build_rollout(parts, hooks)
        self.watch.restored(side.queue)
        plan = replace(scenario.plan, first_step=step + 1, measures_restored=step > 0)
        pipeline = build_pipeline(self._parts(side), plan, hooks)
        self._set_fault_timers(pipeline)
        assert isinstance(side.queue, CheckedQueue)
        self.queue = side.queue
        return pipeline

    def _trainer(self) -> SimTrainer:
        scenario = self._scenario
        masks = scenario.queue.bound_versions if scenario.queue.policy.value == "token_mask" else None
        learner = None
        if scenario.by_value:
            from roll_async.simulator.parts.learner import real_learner  # needs torch, which other worlds do without

            learner = real_learner(scenario, self.watch, self._others.learner)
        return SimTrainer(scenario.seed, scenario.train, mask_older_than=masks, watch=self.watch, learner=learner)

    def _make_tasks(self) -> ChatTasks | AgentTasks:
        if self._scenario.worlds is None:
            return ChatTasks(self._scenario, self.watch, self._others.scheduler)
        from roll_async.simulator.agents.groups import AgentTasks  # needs the gateway, which other worlds do without

        return AgentTasks(self._scenario, self.watch, self._others.groups, self._others.worlds)

    def _parts(self, side: RolloutSide) -> PipelineParts:
        """The objects of the generating side, or their clients when it is in a process of its own."""
        scenario, observer = self._scenario, Observer(self)
        ends: RolloutSide | RolloutClient = side
        if scenario.process is not None:
            self.process = SimProcess(side, scenario.seed, scenario.process)
            ends = RolloutClient(self.process, validates=side.validate is not None)
        return PipelineParts(
            queue=ends.queue,
            rollouter=ends.rollouter,
            learner=self.trainer,
            synchronizer=ends.synchronizer,
            checkpoint=SimCheckpoint(ends.queue, self.store, scenario.train, self.watch.lineage.saved),
            observer=observer,
            validate=ends.validate,
        )

    def _watched(self) -> UserHooks:
        """The classes of the run, with those at whose seams the invariants are checked."""
        seen = {"watch": self.watch, "world": self}
        return replace(
            self._hooks,
            manager=type("Manager", (SeenManager, self._hooks.manager), seen),
            queue=type("Queue", (CheckedQueue, self._hooks.queue), seen),
            rollouter=type("Rollouter", (SeenRollouter, self._hooks.rollouter), seen),
        )

    def _manager_options(self) -> ManagerOptions:
        """A world that is not checked saves the time to tell what running requests have generated; then silence says
        nothing.
        """
        options = self._scenario.manager
        return options if self.watch.every_token else replace(options, silence_s=1e9)

    def _new_replica(self, name: str, faults: EngineFaults) -> SimReplica:
        """A new process without state. Raises ConnectionError when the rollout process is gone."""
        if self.died:
            raise ConnectionError("the rollout process is gone")
        scenario = self._scenario
        slots = scenario.manager.max_concurrent_per_server
        engine = SimEngine(name, scenario.seed, scenario.texts, scenario.speed, slots=slots, faults=faults)
        engine.tells_progress = self.watch.every_token
        return SimReplica(  # pyright: ignore[reportAbstractUsage]  # Proxy defines all calls
            engine,
            scenario.seed,
            faults,
            swap_s=scenario.train.swap_s,
            submitted=self.watch.submitted,
            host=self._others.host,
        )

    def _scale(self, num_replicas: int) -> None:
        if not self.died:
            join, leave = self.supervisor.scale(num_replicas)
            now = asyncio.get_running_loop().time()
            self.outcome.spans.append(("faults", f"join {join}, leave {leave}", now, now, {}))
            if len(there := self.supervisor.names) != num_replicas:
                self.watch.report(21, f"{num_replicas} replicas were asked for, and there will be {there}")

    def _set_fault_timers(self, pipeline: RLVRPipeline) -> None:
        """Set the timers of all faults that have a time."""
        loop = asyncio.get_running_loop()
        for replica, faults in zip(list(self.replicas), self._scenario.all_engines, strict=True):
            if faults.crash_at_s is not None:
                loop.call_later(faults.crash_at_s, self._crash, replica)
        for at_s, num_replicas in self._scenario.scales:
            loop.call_later(at_s, self._scale, num_replicas)
        if self._scenario.stop_at_s is not None:
            loop.call_later(self._scenario.stop_at_s, self._stop, pipeline)
        process = self._scenario.process
        if process is not None and process.dies_at_s is not None:
            loop.call_later(process.dies_at_s, self._die)

    def _die(self) -> None:
        """The rollout process is killed; its engines die with it."""
        assert self.process is not None
        now = asyncio.get_running_loop().time()
        self.outcome.spans.append(("faults", "the rollout process died", now, now, {}))
        self.on_death()
        self.process.die()
        for replica in self.replicas:
            replica.crash("its process is gone")

    def _crash(self, replica: SimReplica) -> None:
        now = asyncio.get_running_loop().time()
        self.outcome.spans.append(("faults", f"{replica.name} crashed", now, now, {}))
        self.watch.died(replica.engine)  # first: the crash takes its tokens
        replica.crash()

    def _stop(self, pipeline: RLVRPipeline) -> None:
        self._stopped_s = asyncio.get_running_loop().time()
        self.watch.stopping = True
        pipeline.request_stop()

    async def _close(self) -> None:
        for replica in self.replicas:
            await replica.close()
        await self._tasks.close()

    def _collect(self) -> None:
        """Figures and the last checks."""
        outcome, scenario, queue, trainer = self.outcome, self._scenario, self.queue, self.trainer
        assert queue is not None
        if not self.died:
            self.watch.instant(queue)
        outcome.queue, outcome.servers = queue.stats(), self.manager.stats()
        slots = scenario.manager.max_concurrent_per_server
        total = slots * max(outcome.ended_s, 1e-9)  # a run may end at 0 s
        outcome.engine_busy = {r.name: r.engine.busy_s / total for r in self.replicas}
        outcome.group_lags = trainer.group_lags
        outcome.masked_share = trainer.masked_tokens / max(1, trainer.trained_tokens)
        self._check_end()
        self._check_in_time()
        if self._tasks.num_left and not self.died:
            self.watch.report(20, f"{self._tasks.num_left} worlds are open at the end")

    def _check_end(self) -> None:
        """Invariants 6 and 9: the run ended as it should, and in time."""
        outcome, scenario, watch = self.outcome, self._scenario, self.watch
        allowed = {RunEnd.FINISHED.value}
        if self.died:
            allowed.add("ConnectionError: rollout process: process is gone")
            watch.died_after(self.store.latest(), trainer_failed=self.trainer.failed_s is not None)
        if watch.budget_is_used:
            allowed = {outcome.end} if outcome.end.startswith("GeneratedTooMany: ") else set()
        if scenario.num_prompts is not None:
            allowed.add(RunEnd.END_OF_DATA.value)
        if scenario.stop_at_s is not None:
            allowed.add(RunEnd.INTERRUPTED.value)
        if scenario.train.fails_at_step is not None:
            allowed.add(f"TrainerDied: the trainer died in step {scenario.train.fails_at_step}")
        if (step := scenario.train.hangs_at_step) is not None:
            within = f"within {scenario.train.rpc_timeout_s:g} s"
            allowed.add(f"StallError: trainer: step {step} did not return {within}")
        if outcome.end not in allowed:
            watch.report(6, f"the run ended with {outcome.end!r} and not with one of {sorted(allowed)}")
        if outcome.end in (RunEnd.FINISHED.value, RunEnd.END_OF_DATA.value):
            watch.validations_over()
        if outcome.end == RunEnd.FINISHED.value and watch.steps_done != scenario.plan.max_steps:
            watch.report(9, f"finished after step {watch.steps_done} of {scenario.plan.max_steps}")
        if outcome.end == RunEnd.END_OF_DATA.value:
            assert scenario.num_prompts is not None
            waiting = {prompt for prompt, _ in watch.finished.values()}
            lost = set(range(scenario.num_prompts)) - watch.fates().keys() - waiting
            if lost:
                watch.report(6, f"the data ended, and prompts {sorted(lost)} were never decided")

    def _check_in_time(self) -> None:
        """Invariant 9: the time from the cause of the end to the end. An error ends the run without a wait."""
        scenario, failed_s = self._scenario, self.trainer.failed_s
        waits = {
            "lost its trainer": (failed_s, 0.1),
            "was told to": (self._stopped_s if failed_s is None else None, scenario.patience_s),
            "stopped the rollout": (self.ending_s, scenario.ending_s),
        }
        for why, (since_s, patience_s) in waits.items():
            late_s = 0.0 if since_s is None else self.outcome.ended_s - since_s
            if late_s > patience_s:
                self.watch.report(9, f"ended {late_s:.1f} s after it {why}, more than {patience_s:.1f} s")


def simulate(
    scenario: Scenario,
    hooks: UserHooks | None = None,
    *,
    check: bool = True,
    others: FaultyParts = FaultyParts(),
) -> SimOutcome:
    """Run a scenario to its end, through all its kills. `check`: look at every instant and token, else only at the
    seams, which a large world can afford.
    """
    hooks = hooks or UserHooks()
    if not (check and scenario.keeps_ledger):
        watch, outcome = Watch(scenario, every_token=check), SimOutcome(scenario=scenario)
        world = SimulatedRun(scenario, watch, outcome, MemoryLedger(), CheckpointStore(), hooks, others)
        _live(world, outcome, check=check)
        outcome.findings = tuple(watch.findings)
        return outcome
    with TemporaryDirectory(prefix="roll_async_sim_") as folder:
        return _lives(scenario, hooks, others, Path(folder))


def _live(
    world: SimulatedRun,
    outcome: SimOutcome,
    *,
    check: bool = True,
    kill: int | None = None,
    on_kill: Callable[[], None] | None = None,
) -> bool:
    """Run one process; True if it was killed."""
    loop = VirtualLoop(
        max_rounds=_MAX_ROUNDS if check else None,
        kill_in_round=kill,
        on_kill=on_kill,
        on_advance=world.instant if check else None,
        threads_inline=outcome.scenario.by_value,
    )
    killed = False

    async def main() -> None:
        await world.run()  # then only the clean-up is left, which is not killed
        loop.disarm()

    try:
        run_virtual(main(), loop)
    except Killed:
        killed = True
    except _Found:
        outcome.end = "an invariant was broken"
    except RuntimeError as error:  # Deadlock, OutOfEvents
        outcome.end = f"{type(error).__name__}: {error}"
        world.watch.report(6, outcome.end)
    outcome.rounds += loop.rounds
    return killed


def _lives(scenario: Scenario, hooks: UserHooks, others: FaultyParts, folder: Path) -> SimOutcome:
    """Start processes until one is not killed, and no other start is to come. The ledger of the next is what is left on
    the disk.
    """
    store, watch, number = others.store(scenario.keep), Watch(scenario), 0
    while True:
        here, after = folder / f"life{number}", folder / f"life{number + 1}"
        here.mkdir(exist_ok=True)
        outcome = SimOutcome(scenario=scenario)
        # A killed process loses nothing that it has written: that takes a crash of the machine.
        ledger = SqliteLedger(here / "ledger.sqlite", fsync="never")
        world = SimulatedRun(scenario, watch, outcome, ledger, store, hooks, others)
        kill = scenario.kills[number] if number < len(scenario.kills) else None
        leave = partial(_leave_behind, world, here, after)
        world.on_death = leave
        killed = _live(world, outcome, kill=kill, on_kill=leave)
        if not (killed or world.died or watch.findings):
            _check_ledger(watch, here, outcome)
            if number < len(scenario.starts):
                leave()
        if watch.findings or not after.exists():
            break
        # Of a run whose rollout process died, the trainer may have saved a step since then.
        store, start = world.store.next_life(), scenario.starts[number] if number < len(scenario.starts) else "latest"
        # It dies once: the next process of the run has the generating side in itself.
        scenario = replace(scenario, process=None) if world.died else scenario
        step, number = watch.lineage.begin(store, start), number + 1
        watch = watch.other_run() if start == "fresh" else watch.rewind(step)
        if start == "fresh":
            shutil.rmtree(after)  # another run does not begin with the ledger of this one
    outcome.findings = tuple(watch.findings)
    return outcome


def _leave_behind(world: SimulatedRun, here: Path, after: Path) -> None:
    """What a kill leaves: the files of the ledger as they are. Complete checkpoints stay, and our books of now."""
    if after.exists():  # the rollout process died before
        return
    shutil.copytree(here, after)
    if world.queue is not None:
        world.watch.follow_drops(world.queue)
    world.watch.closed()


def _check_ledger(watch: Watch, folder: Path, outcome: SimOutcome) -> None:
    """Invariants 8 (after kills) and 9 at the end of the run: every prompt has one fate, the ledger says the same
    and has every finished group.
    """
    fates, number = watch.fates(), 8 if outcome.scenario.kills else 9
    several = {row: fate for row, fate in fates.items() if len(fate) != 1}
    if several:
        watch.report(number, f"prompts with more than one fate: {several}")
    if outcome.queue is None:
        return
    try:
        ledger = SqliteLedger(folder / "ledger.sqlite", fsync="never")
        recovered = ledger.restore(watch.steps_done)
        ledger.close()
    except LedgerError as error:
        watch.report(number, str(error))
        return
    if recovered.done != fates.keys():
        watch.report(number, f"the ledger is done with {sorted(recovered.done)}, the run with {sorted(fates)}")
    finished = {prompt for prompt, _ in watch.finished.values()}
    lost = finished - recovered.done - {s.prompt_index for s in recovered.buffered}
    if lost:
        watch.report(number, f"finished prompts {sorted(lost)} are not in the ledger")
