"""Connects the roles of a run: the launcher, the rollout process, the simulator and the tests all call these functions.

    connect       replicas --> server manager, supervisor                   \\ where the clients of the engines are:
    wire_rollout  prompts, group source --> rollouter <--> queue <-- ledger  | the driver, or the rollout process of
                  weight source --> synchronizer --> replicas, queue        /  the fully asynchronous mode
    wire          these, learner, checkpoint, observer --> pipeline            the driver

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
from roll_async.pipelines.health import CustomMonitor, HealthMonitor
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.rlvr import RLVRPipeline, TrainLoop
from roll_async.pipelines.turns import PhasedRollout, PhasedSource, PhaseSwitcher, take_turns
from roll_async.pipelines.validation import AnswersPrompts, HeldOut, SetSampling, Validation, ValidationPlace
from roll_async.pipelines.validators import Validators
from roll_async.rollout.engine_supervisor import EngineSupervisor, Starter
from roll_async.rollout.filter_budget import BudgetOptions, FilterBudget
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.rollout.protocol import PromptPool, PromptSource, Replica, Validator
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import Prompt
from roll_async.weight_sync.canary import Canary, CanaryOptions, canary_rows
from roll_async.weight_sync.protocol import WeightSource
from roll_async.weight_sync.synchronizer import ParameterSynchronizer, SyncOptions

_MOST_TEXTS = 1024
"""Prompts that the canary's rows are looked for in: data that repeats itself would be read without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentTypes:
    """The classes to build: the usual ones, a user's sub-classes, or a test's faulty sub-classes."""

    manager: type[AsyncLLMServerManager] = AsyncLLMServerManager
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
            max_restarts=0 if roles_on_engine_devices(config) else fault.max_engine_restarts,
            start_timeout_s=fault.rpc_timeout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """All replicas, connected."""

    manager: AsyncLLMServerManager
    supervisor: EngineSupervisor

    async def start(self, stack: AsyncExitStack) -> None:
        """Start the manager's traffic with the replicas; it ends when the stack closes."""
        await self.manager.start()
        stack.push_async_callback(self.manager.close)
        stack.push_async_callback(self.supervisor.close)


def connect(
    replicas: Sequence[Replica], starter: Starter, options: EngineOptions, classes: ComponentTypes = ComponentTypes()
) -> Engines:
    """The manager of the replicas and its supervisor. `starter` starts lost replicas again, and new ones."""
    manager = classes.manager(replicas, options.manager)
    supervisor = EngineSupervisor(
        manager,
        starter,
        max_restarts=options.max_restarts,
        start_timeout_s=options.start_timeout_s,
        resume_timeout_s=options.manager.interrupt_timeout_s,
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
    groups: Callable[[AsyncLLMServerManager], GroupRunner]
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
    turns: PhaseSwitcher | None = None
    """The turns of trainer and engines on shared devices; None = they share none."""
    pool: PromptPool | None = None
    """Chooses prompts by past pass rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSide:
    """The connected rollout side of a run."""

    queue: MessageQueue
    rollouter: Rollouter
    synchronizer: ParameterSynchronizer[Replica]
    validate: Validator | None
    turns: PhasedRollout | None = None
    """See `RolloutRoles.turns`."""


def wire_rollout(
    roles: RolloutRoles, options: RolloutOptions, classes: ComponentTypes = ComponentTypes()
) -> RolloutSide:
    """Queue, rollouter, synchronizer and validation of one run. Nothing runs yet."""
    manager, supervisor = roles.engines.manager, roles.engines.supervisor
    source = roles.groups(manager)
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
    rollouter = classes.rollouter(
        queue,
        source,
        manager,
        roles.prompts,
        budget=None if options.budget is None else FilterBudget(options.budget),
        pool=roles.pool,
        stop_timeout_s=options.stop_timeout_s,
    )
    turns, source_of_weights = None, roles.weights
    if roles.turns is not None:
        turns = PhasedRollout(
            rollouter,
            roles.turns,
            timeout_s=options.sync.interrupt_timeout_s,
            keeps_frozen=options.sync.adapters,
        )
        source_of_weights = PhasedSource(roles.weights, roles.turns)
    canary = None
    if options.canary is not None:
        canary = Canary(canary_rows(_texts(roles.prompts), options.canary), source_of_weights, options.canary)
        queue.taken = canary.taken
    queue.trouble = rollouter.trouble
    validators = None
    if roles.validators is not None:
        validators = Validators(roles.validators, pause_timeout_s=options.sync.interrupt_timeout_s)

    def owner(name: str) -> EngineSupervisor | Validators:
        return supervisor if validators is None or not validators.own(name) else validators

    synchronizer = classes.synchronizer(
        source_of_weights,
        rollouter if turns is None else turns,
        lambda: manager.clients,
        options.sync,
        weights_held=queue.weights_held,
        remove_replica=lambda name, reason: owner(name).remove_replica(name, reason),
        readmit=lambda client: owner(client.name).readmit(client),
        expects_return=lambda: manager.expects_return,
        canary=canary,
    )
    supervisor.attach(synchronizer)
    if validators is not None:
        validators.attach(synchronizer)
    validate = None
    if roles.validation:
        if validators is None or roles.validators is None:
            place = ValidationPlace(lambda: synchronizer.version, yields=options.validation_mode == "share")
            validate = wire_validation(source, manager, roles.validation, options.validation, place)
        else:
            own, place = roles.validators.manager, ValidationPlace(lambda: validators.version, validators=validators)
            validate = wire_validation(roles.groups(own), own, roles.validation, options.validation, place)
    return RolloutSide(queue=queue, rollouter=rollouter, synchronizer=synchronizer, validate=validate, turns=turns)


def wire_validation(
    source: AnswersPrompts,
    manager: AsyncLLMServerManager | None,
    held_out: Mapping[str, Sequence[Prompt]],
    sampling: Mapping[str, SetSampling],
    place: ValidationPlace,
) -> Validation:
    """The measurement of held-out sets with a source. `manager`: of the source's replicas; None = it has none."""
    sets = [HeldOut(name, prompts, sampling[name]) for name, prompts in held_out.items()]
    return Validation(sets, source, manager, place)


def _texts(prompts: PromptSource) -> Iterator[Sequence[int]]:
    """Token ids of the first prompts, empty where a world gives the first observation, not the data."""
    for index in range(_MOST_TEXTS):
        prompt = prompts.at(index)
        if prompt is None:
            return
        yield prompt.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The plan of the loop, and its monitor."""

    plan: RunPlan
    monitor_interval_s: float | None = None
    """Seconds between two reports of the health of all components; None = no monitor."""
    custom_monitor: CustomMonitor | None = None


def wire(
    roles: PipelineParts,
    options: RunOptions,
    classes: ComponentTypes = ComponentTypes(),
    turns: PhasedRollout | None = None,
) -> RLVRPipeline:
    """The pipeline of one run. `roles` holds the objects of the rollout side that `wire_rollout` made, or clients of
    them; `turns` is from `wire_rollout`, too.
    """
    if turns is not None:
        roles = take_turns(roles, options.plan, turns)
    trainer = classes.trainer(roles, options.plan)
    interval_s = options.monitor_interval_s
    monitor = HealthMonitor(trainer, roles, interval_s=interval_s or 0.0, custom_monitor=options.custom_monitor)
    watch = None if interval_s is None else monitor.run
    return RLVRPipeline(roles, options.plan, trainer=trainer, watch=watch, states=monitor.lines)
