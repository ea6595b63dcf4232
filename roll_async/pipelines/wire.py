"""Builds the objects of a run, each once: launcher, rollout process, simulator and tests all call these functions.
Nothing runs yet when they return; functions that start processes begin with `start_`.

    build_engines   replicas --> server manager, supervisor                   \\ where the clients of the engines are:
    build_rollout   prompts, group source --> rollouter <--> queue <-- ledger  | the driver, or the rollout process of
                    weight source --> synchronizer --> replicas, queue        /  the fully asynchronous mode
    build_pipeline  these, learner, checkpoint, observer --> pipeline            the driver

`RolloutParts.groups` decides which kind of task is trained; loop, buffer, ledger and weight push are the same for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from roll_async.buffer.fingerprint import RUN, stream_fingerprint
from roll_async.buffer.ledger import Ledger
from roll_async.buffer.message_queue import POOL, MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.pipelines.colocation import PhaseSwitcher
from roll_async.pipelines.health import CustomMonitor, HealthMonitor
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.rlvr import RLVRPipeline, TrainLoop
from roll_async.pipelines.validation import HeldOut, ReplicaValidation, Validation
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.engine_supervisor import EngineSupervisor, Starter
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions, FilterBudget
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.protocol import PromptPool, PromptSource, Replica, ValidationMeasure
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.weight_sync.canary import Canary, CanaryOptions, canary_rows
from roll_async.weight_sync.protocol import OWN_DEVICES, SyncOptions, WeightSource
from roll_async.weight_sync.push import ParameterSynchronizer

_MOST_TEXTS = 1024
"""Prompts that the canary's rows are looked for in: data that repeats itself would be read without end."""

_MONITOR_INTERVAL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UserHooks:
    """Classes and callbacks of a run that a start script may replace, or a test by faulty ones; and the launcher's
    options.
    """

    manager: type[EnginePool] = EnginePool
    """Read by `build_engines` alone: the engines of a launcher run before there is a run with hooks."""
    queue: type[MessageQueue] = MessageQueue
    rollouter: type[Rollouter] = Rollouter
    synchronizer: type[ParameterSynchronizer[Replica]] = ParameterSynchronizer
    trainer: type[TrainLoop] = TrainLoop
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """Tools by name; without any, completions are not searched for calls."""
    tool_callback: type[ToolCompletionCallback] = ToolCompletionCallback
    monitor_interval_s: float | None = None
    """Seconds between two reports of the health of all components; None = no monitor, or 10 with one of the user's."""
    custom_monitor: CustomMonitor | None = None
    on_step: Callable[[int, Mapping[str, float]], object] | None = None
    """Called in the driver after each training step, with the step and its metrics."""
    log_name: str | None = None
    """A second log file in the run folder, besides run.log."""
    rollout_process: bool = False
    """Queue, rollouter and synchronizer run in a process of their own, so that the trainer's loop cannot delay them."""

    def __post_init__(self) -> None:
        for name in ("on_step", "custom_monitor"):
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise TypeError(f"{name} is called as a plain function; an async one would never run")

    @property
    def log_names(self) -> list[str]:
        """Log files of the run folder besides run.log."""
        return [] if self.log_name is None else [self.log_name]

    @property
    def modules(self) -> set[str]:
        """Modules whose code runs in the driver: a script's `logging.getLogger(__name__)` has such a name."""
        hooks = [self.trainer] if self.custom_monitor is None else [self.trainer, self.custom_monitor]
        return {hook.__module__ for hook in hooks}

    @property
    def of_rollout(self) -> UserHooks:
        """Without those of the driver, which need not be picklable."""
        return replace(self, trainer=TrainLoop, custom_monitor=None, on_step=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """All replicas, connected."""

    manager: EnginePool
    supervisor: EngineSupervisor

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the manager's traffic with the replicas; it ends when the stack closes."""
        await self.manager.start()
        stack.push_async_callback(self.manager.close)
        stack.push_async_callback(self.supervisor.close)  # closed before the manager: the last in is the first out


def build_engines(
    replicas: Sequence[Replica],
    starter: Starter,
    options: ManagerOptions,
    *,
    max_restarts: int,
    start_timeout_s: float,
    hooks: UserHooks = UserHooks(),
) -> Engines:
    """The manager of the replicas and its supervisor. `starter` starts lost replicas again, each `max_restarts` times
    at most, and new ones; one that takes longer than `start_timeout_s` is lost.
    """
    manager = hooks.manager(replicas, options)
    supervisor = EngineSupervisor(
        manager,
        starter,
        max_restarts=max_restarts,
        start_timeout_s=start_timeout_s,
    )
    return Engines(manager=manager, supervisor=supervisor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """The objects and options from which the rollout side of a run is built."""

    engines: Engines
    groups: Callable[[EnginePool], GroupRunner]
    """Makes the source that turns prompts into groups on these replicas."""
    prompts: PromptSource
    """The prompt stream; with a pool, the stream that it draws from."""
    weights: WeightSource
    """The trainer's ranks."""
    ledger: Ledger
    queue: QueueOptions
    sync: SyncOptions
    stop_timeout_s: float
    """How long the end of a run waits for groups before it cancels them."""
    pool: PromptPool | None = None
    """Chooses prompts by past pass rate."""
    budget: BudgetOptions | None = None
    """None = without dynamic sampling."""
    canary: CanaryOptions | None = None
    """The check after each push that engines compute the same log-probs as the trainer; None = no check."""
    held_out: Sequence[HeldOut] = ()
    """Empty = no validation."""
    validation_mode: str = "pause"
    """What waits for a validation: `ValidationConfig.mode`."""
    validators: Engines | None = None
    """Replicas that run validations and nothing else; None = validations run on `engines`."""
    devices: PhaseSwitcher | None = None
    """Devices that training roles and engines share; None = they share none."""
    run_id: str = ""
    """Of the run whose ledger this is; empty = it has none."""
    restored: int = 0
    """Step of the checkpoint from which the run is resumed; 0 = a fresh run."""
    position: Mapping[str, object] | None = None
    """Position of that checkpoint in the prompt stream (`MessageQueue.checkpoint_state`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSide:
    """The connected rollout side of a run."""

    queue: MessageQueue
    rollouter: Rollouter
    synchronizer: ParameterSynchronizer[Replica]
    validate: ValidationMeasure | None


def build_rollout(parts: RolloutParts, hooks: UserHooks = UserHooks()) -> RolloutSide:
    """Queue, rollouter, synchronizer and validation of one run."""
    manager = parts.engines.manager
    source, queue = parts.groups(manager), _build_queue(parts, hooks)
    rollouter = hooks.rollouter(
        queue,
        source,
        manager,
        parts.prompts,
        budget=None if parts.budget is None else FilterBudget(parts.budget),
        pool=parts.pool,
        stop_timeout_s=parts.stop_timeout_s,
    )
    queue.stall_diagnosis = (
        rollouter.stall_diagnosis
    )  # the queue is there first, and names in its time-outs what keeps it empty
    canary = None
    if parts.canary is not None:
        canary = Canary(canary_rows(_texts(parts.prompts), parts.canary), parts.weights, parts.canary)
        queue.taken = canary.taken  # where there are no prompts before the first batch, it gives the rows
    own = None if parts.validators is None else _build_own_validation(parts, parts.validators)

    synchronizer = hooks.synchronizer(
        parts.weights,
        rollouter if parts.devices is None else parts.devices,  # which know whether a phase has paused the engines
        manager.returning,
        parts.sync,
        weights_held=queue.weights_held,  # a push raises the admission limit
        validators=None if parts.validators is None else parts.validators.manager.returning,
        canary=canary,
        devices=OWN_DEVICES if parts.devices is None else parts.devices,
    )
    validation: Validation | None = own
    if own is None and parts.held_out:
        yields = parts.validation_mode == "share"
        validation = Validation(parts.held_out, source, manager, lambda: synchronizer.version, yields=yields)
    return RolloutSide(queue=queue, rollouter=rollouter, synchronizer=synchronizer, validate=validation)


def _build_queue(parts: RolloutParts, hooks: UserHooks) -> MessageQueue:
    """With what the restored checkpoint and the ledger know; only then the pool, which goes on from that position."""
    queue = hooks.queue(parts.queue, parts.ledger)
    fingerprint = {**parts.queue.fingerprint, **stream_fingerprint(parts.prompts.at)}
    if parts.run_id:
        fingerprint[RUN] = parts.run_id
    queue.restore(parts.restored, parts.position, fingerprint, parts.prompts.at)
    if parts.pool is not None:
        queue.choices = parts.pool.state
        if parts.position is not None and POOL in parts.position:
            kept = parts.position[POOL]
            assert isinstance(kept, Mapping)
            parts.pool.restore(kept)
    return queue


def _build_own_validation(parts: RolloutParts, engines: Engines) -> ReplicaValidation:
    source, pause_timeout_s = parts.groups(engines.manager), parts.sync.interrupt_timeout_s
    return ReplicaValidation(parts.held_out, source, engines.manager, pause_timeout_s=pause_timeout_s)


def _texts(prompts: PromptSource) -> Iterator[Sequence[int]]:
    """Token ids of the first prompts, empty where a world gives the first observation, not the data."""
    for index in range(_MOST_TEXTS):
        prompt = prompts.at(index)
        if prompt is None:
            return
        yield prompt.token_ids


def build_pipeline(parts: PipelineParts, plan: RunPlan, hooks: UserHooks = UserHooks()) -> RLVRPipeline:
    """The pipeline of one run. `parts` holds the objects of the rollout side that `build_rollout` made, or clients of
    them.
    """
    loop, interval_s = hooks.trainer(parts, plan), hooks.monitor_interval_s
    if interval_s is None and hooks.custom_monitor is not None:
        interval_s = _MONITOR_INTERVAL_S
    monitor = HealthMonitor(loop, parts, interval_s=interval_s or 0.0, custom_monitor=hooks.custom_monitor)
    return RLVRPipeline(parts, plan, loop, watch=None if interval_s is None else monitor.run, states=monitor.lines)
