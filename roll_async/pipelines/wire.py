"""Builds the objects of a run, each once: launcher, rollout process, simulator and tests all call these functions.
Nothing runs yet when they return; functions that start processes begin with `start_`.

    build_engines   replicas --> server manager, supervisor                   \\ where the clients of the engines are:
    build_rollout   prompts, group source --> rollouter <--> queue <-- ledger  | the driver, or the rollout process of
                    weight source --> synchronizer --> replicas, queue        /  the fully asynchronous mode
    build_pipeline  these, learner, checkpoint, observer --> pipeline            the driver

`RolloutRoles.groups` decides which kind of task is trained; loop, buffer, ledger and weight push are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from roll_async.buffer.fingerprint import RUN, stream_fingerprint
from roll_async.buffer.ledger import Ledger
from roll_async.buffer.message_queue import POOL, MessageQueue
from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import PipelineConfig, roles_on_engine_devices
from roll_async.pipelines.colocation import PhaseSwitcher
from roll_async.pipelines.health import CustomMonitor, HealthMonitor
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.rlvr import RLVRPipeline, TrainLoop
from roll_async.pipelines.validation import HeldOut, ReplicaValidation, SetSampling, Validation
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.engine_supervisor import EngineSupervisor, Starter
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions, FilterBudget
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.protocol import PromptPool, PromptSource, Replica, ValidationMeasure
from roll_async.rollout.rollouter import Rollouter
from roll_async.schema import Prompt
from roll_async.weight_sync.canary import Canary, CanaryOptions, canary_rows
from roll_async.weight_sync.protocol import OWN_DEVICES, SyncOptions, WeightSource
from roll_async.weight_sync.push import ParameterSynchronizer

_MOST_TEXTS = 1024
"""Prompts that the canary's rows are looked for in: data that repeats itself would be read without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentTypes:
    """The classes to build: the usual ones, a user's sub-classes, or a test's faulty sub-classes."""

    manager: type[EnginePool] = EnginePool
    queue: type[MessageQueue] = MessageQueue
    rollouter: type[Rollouter] = Rollouter
    synchronizer: type[ParameterSynchronizer[Replica]] = ParameterSynchronizer
    trainer: type[TrainLoop] = TrainLoop


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How requests reach the replicas, and what happens when one is lost."""

    manager: ManagerOptions
    max_restarts: int
    """Restarts per replica."""
    start_timeout_s: float
    """Seconds a replica may take to start."""

    @classmethod
    def of(cls, config: PipelineConfig) -> EngineOptions:
        """As the config has it."""
        fault = config.fault
        return cls(
            manager=ManagerOptions.of(config),
            # A replica that starts takes its KV cache from the free memory, and in phase TRAIN there is none.
            max_restarts=0 if roles_on_engine_devices(config) else fault.max_engine_restarts,
            start_timeout_s=fault.rpc_timeout,
        )


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
    replicas: Sequence[Replica], starter: Starter, options: EngineOptions, classes: ComponentTypes = ComponentTypes()
) -> Engines:
    """The manager of the replicas and its supervisor. `starter` starts lost replicas again, and new ones."""
    manager = classes.manager(replicas, options.manager)
    supervisor = EngineSupervisor(
        manager,
        starter,
        max_restarts=options.max_restarts,
        start_timeout_s=options.start_timeout_s,
    )
    return Engines(manager=manager, supervisor=supervisor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """Options of the rollout side."""

    queue: QueueOptions
    sync: SyncOptions
    stop_timeout_s: float
    """How long the end of a run waits for groups before it cancels them."""
    budget: BudgetOptions | None = None
    """None = without dynamic sampling."""
    validation: Mapping[str, SetSampling] = field(default_factory=dict)
    """How each held-out set is sampled, by name."""
    validation_mode: str = "pause"
    """What waits for a validation: `ValidationConfig.mode`."""
    canary: CanaryOptions | None = None
    """The check after each push that engines compute the same log-probs as the trainer; None = no check."""

    @classmethod
    def of(cls, config: PipelineConfig, transport: str) -> RolloutOptions:
        """As the config has it. `transport`: what `choose_transport` chose."""
        return cls(
            queue=QueueOptions.of(config),
            sync=SyncOptions.of(config, transport),
            stop_timeout_s=config.async_training.interrupt.timeout,
            budget=BudgetOptions.of(config),
            validation={name: SetSampling.of(args) for name, args in config.validation_sampling.items()},
            validation_mode=config.validation_mode,
            canary=CanaryOptions.of(config),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRoles:
    """The parts from which the rollout side of a run is built."""

    engines: Engines
    groups: Callable[[EnginePool], GroupRunner]
    """Makes the source that turns prompts into groups on these replicas."""
    prompts: PromptSource
    """The prompt stream; with a pool, the stream that it draws from."""
    weights: WeightSource
    """The trainer's ranks."""
    ledger: Ledger
    validation: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Held-out prompts by set; none = no validation."""
    validators: Engines | None = None
    """Replicas that run validations and nothing else; None = validations run on `engines`."""
    restored: int = 0
    """Step of the checkpoint from which the run is resumed; 0 = a fresh run."""
    run_id: str = ""
    """Of the run whose ledger this is; empty = it has none."""
    position: Mapping[str, object] | None = None
    """Position of that checkpoint in the prompt stream (`MessageQueue.checkpoint_state`)."""
    devices: PhaseSwitcher | None = None
    """Devices that training roles and engines share; None = they share none."""
    pool: PromptPool | None = None
    """Chooses prompts by past pass rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSide:
    """The connected rollout side of a run."""

    queue: MessageQueue
    rollouter: Rollouter
    synchronizer: ParameterSynchronizer[Replica]
    validate: ValidationMeasure | None


def build_rollout(
    roles: RolloutRoles, options: RolloutOptions, classes: ComponentTypes = ComponentTypes()
) -> RolloutSide:
    """Queue, rollouter, synchronizer and validation of one run."""
    manager = roles.engines.manager
    source, queue = roles.groups(manager), _build_queue(roles, options, classes)
    rollouter = classes.rollouter(
        queue,
        source,
        manager,
        roles.prompts,
        budget=None if options.budget is None else FilterBudget(options.budget),
        pool=roles.pool,
        stop_timeout_s=options.stop_timeout_s,
    )
    queue.stall_diagnosis = (
        rollouter.stall_diagnosis
    )  # the queue is there first, and names in its time-outs what keeps it empty
    canary = None
    if options.canary is not None:
        canary = Canary(canary_rows(_texts(roles.prompts), options.canary), roles.weights, options.canary)
        queue.taken = canary.taken  # where there are no prompts before the first batch, it gives the rows
    sets = [HeldOut(name, prompts, options.validation[name]) for name, prompts in roles.validation.items()]
    own = None if roles.validators is None else _build_own_validation(sets, roles, roles.validators, options)

    synchronizer = classes.synchronizer(
        roles.weights,
        rollouter if roles.devices is None else roles.devices,  # which know whether a phase has paused the engines
        manager.returning,
        options.sync,
        weights_held=queue.weights_held,  # a push raises the admission limit
        validators=None if roles.validators is None else roles.validators.manager.returning,
        canary=canary,
        devices=OWN_DEVICES if roles.devices is None else roles.devices,
    )
    validation: Validation | None = own
    if own is None and sets:
        yields = options.validation_mode == "share"
        validation = Validation(sets, source, manager, lambda: synchronizer.version, yields=yields)
    return RolloutSide(queue=queue, rollouter=rollouter, synchronizer=synchronizer, validate=validation)


def _build_queue(roles: RolloutRoles, options: RolloutOptions, classes: ComponentTypes) -> MessageQueue:
    """With what the restored checkpoint and the ledger know; only then the pool, which goes on from that position."""
    queue = classes.queue(options.queue, roles.ledger)
    fingerprint = {**options.queue.fingerprint, **stream_fingerprint(roles.prompts.at)}
    if roles.run_id:
        fingerprint[RUN] = roles.run_id
    queue.restore(roles.restored, roles.position, fingerprint, roles.prompts.at)
    if roles.pool is not None:
        queue.choices = roles.pool.state
        if roles.position is not None and POOL in roles.position:
            kept = roles.position[POOL]
            assert isinstance(kept, Mapping)
            roles.pool.restore(kept)
    return queue


def _build_own_validation(
    sets: Sequence[HeldOut], roles: RolloutRoles, engines: Engines, options: RolloutOptions
) -> ReplicaValidation:
    source, pause_timeout_s = roles.groups(engines.manager), options.sync.interrupt_timeout_s
    return ReplicaValidation(sets, source, engines.manager, pause_timeout_s=pause_timeout_s)


def _texts(prompts: PromptSource) -> Iterator[Sequence[int]]:
    """Token ids of the first prompts, empty where a world gives the first observation, not the data."""
    for index in range(_MOST_TEXTS):
        prompt = prompts.at(index)
        if prompt is None:
            return
        yield prompt.token_ids


def build_pipeline(
    parts: PipelineParts,
    plan: RunPlan,
    *,
    trainer: type[TrainLoop] = TrainLoop,
    monitor_interval_s: float | None = None,
    custom_monitor: CustomMonitor | None = None,
) -> RLVRPipeline:
    """The pipeline of one run. `parts` holds the objects of the rollout side that `build_rollout` made, or clients of
    them. `monitor_interval_s`: seconds between two reports of the health of all components; None = no monitor.
    """
    loop = trainer(parts, plan)
    monitor = HealthMonitor(loop, parts, interval_s=monitor_interval_s or 0.0, custom_monitor=custom_monitor)
    watch = None if monitor_interval_s is None else monitor.run
    return RLVRPipeline(parts, plan, loop, watch=watch, states=monitor.lines)
