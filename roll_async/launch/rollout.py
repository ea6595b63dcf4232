"""The rollout side of a run: engines, rewards, prompts; then queue, rollouter and synchronizer on them.

Both parts run where they are called: in the driver, or in the rollout process of the fully asynchronous mode
(`cluster/roles/rollout_process.py`), which is why a spec can be pickled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.worlds import WorldRunner
from roll_async.buffer.ledger import Ledger, MemoryLedger, SqliteLedger, move_to_previous
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.roles.reward_group import HostPlan, RayScorer
from roll_async.cluster.runtime import pretended_gpus
from roll_async.config.schema import AgenticConfig, DataArguments, PipelineConfig, RLVRConfig
from roll_async.launch.agents import agent_parts, group_options, training_tasks, validation_tasks
from roll_async.launch.engines import ReplicaStarter
from roll_async.launch.scaling import follow_requests
from roll_async.pipelines.colocation import PhaseSwitcher
from roll_async.pipelines.wire import (
    ComponentTypes,
    EngineOptions,
    Engines,
    RolloutOptions,
    RolloutRoles,
    RolloutSide,
    build_engines,
    build_rollout,
)
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.load import DataOptions, judged, load_prompts
from roll_async.prompts.pool import PooledPrompts, PromptPoolOptions
from roll_async.prompts.stream import ShuffledPrompts
from roll_async.prompts.tokenizer import load_tokenizer, told
from roll_async.rewards.row_checks import REFERENCE_COLUMNS, row_checks
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.protocol import PromptPool, PromptSource
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.schema import Prompt
from roll_async.weight_sync.protocol import WeightSource
from roll_async.weight_sync.transport.transports import ONE_HOST, choose_transport, needs_front_end

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSpec:
    """All that is needed to couple the started roles: the other roles, and the position of a resumed run."""

    config: PipelineConfig
    source: WeightSource
    """The trainer's ranks."""
    run_id: str = ""
    """Of the run that is coupled; empty = it has none."""
    restored: int = 0
    """Step of the checkpoint; 0 = a fresh run."""
    position: Mapping[str, object] | None = None
    """Position of that checkpoint in the prompt stream."""
    rollouter: type[Rollouter] = Rollouter
    tools: Mapping[str, Tool] = field(default_factory=dict)
    tool_callback: type[ToolCompletionCallback] = ToolCompletionCallback
    devices: PhaseSwitcher | None = None
    """Devices that training roles and engines share; None = they share none."""
    trainer_hosts: frozenset[str] = frozenset()
    """Addresses of the trainer's nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedTasks:
    """Prompts, and the source that makes groups of them."""

    prompts: PromptSource
    source: Callable[[RolloutSpec], Callable[[EnginePool], GroupRunner]]
    validation: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    pool: Callable[[], PromptPool] | None = None
    """Makes the pool over the stream, one for each run; None = no pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRollout:
    """The running engines and tasks of the rollout side."""

    engines: Engines
    tasks: StartedTasks
    starter: ReplicaStarter
    stack: AsyncExitStack
    validators: Engines | None = None
    """Replicas that run validations and nothing else; None = there are none."""

    async def couple(self, spec: RolloutSpec) -> RolloutSide:
        """Build queue, rollouter and synchronizer of one run."""
        config = spec.config
        all_engines = [self.engines, *([] if self.validators is None else [self.validators])]
        clients = [client for engines in all_engines for client in engines.manager.clients]
        hosts = spec.trainer_hosts | {host for client in clients for host in client.hosts}  # type: ignore[attr-defined]
        roles = RolloutRoles(
            engines=self.engines,
            groups=self.tasks.source(spec),
            prompts=self.tasks.prompts,
            weights=spec.source,
            ledger=_ledger(config, can_rebuild=spec.position is not None),
            validation=self.tasks.validation,
            validators=self.validators,
            restored=spec.restored,
            run_id=spec.run_id,
            position=spec.position,
            devices=spec.devices,
            pool=None if self.tasks.pool is None else self.tasks.pool(),
        )
        transport = _transport(config, hosts)
        side = build_rollout(roles, RolloutOptions.of(config, transport), ComponentTypes(rollouter=spec.rollouter))
        self.starter.one_host = next(iter(hosts)) if transport in ONE_HOST else None
        folder = Path(config.output_dir) / config.exp_name
        await follow_requests(folder, self.engines, self.starter, side.queue, self.stack)
        return side


async def start_rollout(
    config: PipelineConfig, engines: Sequence[ProcessPlacement], pool: NodePool, stack: AsyncExitStack
) -> StartedRollout:
    """Start engines and rewards in parallel; all of them are closed when the stack closes. Raises ValueError for what
    the user can fix, RoleFailed for what a role reports.
    """
    if isinstance(config, AgenticConfig):
        starting = start_agents(config, stack)
    else:
        assert isinstance(config, RLVRConfig)
        starting = start_answers(config, stack)
    starter = ReplicaStarter(config, engines, pool, stack)
    tasks, training, validators = await start_engines(config, starter, starting, stack)
    return StartedRollout(engines=training, tasks=tasks, starter=starter, stack=stack, validators=validators)


async def start_engines(
    config: PipelineConfig, starter: ReplicaStarter, beside: Awaitable[T], stack: AsyncExitStack
) -> tuple[T, Engines, Engines | None]:
    """(what `beside` gives, which is started at the same time; the replicas; those that run validations alone, if
    any).
    """
    found, clients, end_ids = await asyncio.gather(beside, starter.start_all(), asyncio.to_thread(end_ids_of, config))
    first_own, options = len(clients) - config.num_validation_replicas, EngineOptions.of(config)
    options = replace(options, manager=replace(options.manager, end_ids=end_ids))
    connected = build_engines(clients[:first_own], starter, options)
    await connected.start(stack)
    validators = None
    if own := clients[first_own:]:
        validators = build_engines(own, starter, options)
        await validators.start(stack)
    return found, connected, validators


def end_ids_of(config: PipelineConfig) -> tuple[int, ...]:
    """What replicas stop at: the end marks of the model, with each template that the run renders prompts with."""
    tokenizer, templates = load_tokenizer(config.pretrain), {"native"}
    if isinstance(config, RLVRConfig):
        held_out = [] if config.validation is None else [data for _, data in config.validation.data.values()]
        templates = {data.template for data in (config.actor_train.data_args, *held_out) if data is not None}
    found = [EndMarks.of(tokenizer, template) for template in sorted(templates)]
    if differences := sorted({marks.difference for marks in found if marks.difference}):
        logger.warning("end marks: engines stop also at %s", "; ".join(differences))
    return tuple(sorted({i for marks in found for i in marks.ids}))


async def start_answers(config: RLVRConfig, stack: AsyncExitStack) -> StartedTasks:
    """Prompt files and rewards."""
    loaded, scorer = await asyncio.gather(asyncio.to_thread(prompts_of, config), start_scorer(config, stack))

    def source(spec: RolloutSpec) -> Callable[[EnginePool], GroupRunner]:
        assert isinstance(spec.config, RLVRConfig)
        options, tools = SchedulerOptions.of(spec.config), _tools(spec, spec.config)
        return lambda manager: ChatCompletionScheduler(manager, scorer, options, tools=tools)

    return StartedTasks(prompts=loaded.stream, source=source, validation=loaded.held_out, pool=loaded.pool)


async def start_scorer(config: RLVRConfig, stack: AsyncExitStack) -> RayScorer:
    """The rewards that score; they close with the stack."""
    plan = HostPlan(
        rewards={name: r for name, r in config.rewards.items() if name not in config.loss_parts},
        tokenizer_folder=config.pretrain,
        env=config.system_envs,
        rpc_timeout_s=config.fault.rpc_timeout,
    )
    scorer = await RayScorer.start(plan)
    stack.push_async_callback(scorer.close)
    return scorer


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPrompts:
    """Contents of the prompt files of a run."""

    stream: ShuffledPrompts
    held_out: Mapping[str, Sequence[Prompt]]
    """Validation prompts, by set; none without eval_steps."""
    pool: Callable[[], PooledPrompts] | None


def prompts_of(config: RLVRConfig) -> LoadedPrompts:
    """Load the prompt files. Raises ValueError for bad files."""
    data, pool = config.actor_train.data_args, None
    assert data is not None
    train = load_prompts(data_options(config, data))
    stream = ShuffledPrompts(train, seed=config.seed, probabilities=data.domain_interleave_probs)
    if config.prompt_pool.enable:
        reserve, files = {}, config.prompt_pool.refill_file_name
        if files:
            reserve = load_prompts(data_options(config, replace(data, file_name=files)), every_domain=False)
        pool = partial(PooledPrompts, stream.at, train, PromptPoolOptions.of(config), reserve=reserve)
        pool()  # raises before anything starts if the rows have no numbers for the curriculum
    return LoadedPrompts(stream=stream, held_out=held_out_of(config), pool=pool)


def held_out_of(config: RLVRConfig) -> Mapping[str, Sequence[Prompt]]:
    """Held-out prompts by set; none without eval_steps. Raises ValueError for bad files."""
    if not config.eval_steps:
        return {}
    assert config.validation is not None, "the rules require it"
    by_key = {key: _prompts_of_set(config, data) for key, data in dict(config.validation.data.values()).items()}
    return {name: by_key[key] for name, (key, _) in config.validation.data.items()}


def _prompts_of_set(config: RLVRConfig, data: DataArguments) -> list[Prompt]:
    # Validation may use a part of the domains: AIME alone for a run over mathematics and code.
    held_out = load_prompts(data_options(config, data), every_domain=False)
    # One epoch: with fewer rows than val_batch_size no prompt is asked twice.
    stream = ShuffledPrompts(judged(held_out, config.loss_parts), seed=config.seed, num_epochs=1)
    prompts = (stream.at(i) for i in range(config.val_batch_size))
    return [p for p in prompts if p is not None]


def data_options(config: RLVRConfig, data: DataArguments) -> DataOptions:
    """How a prompt file is read, with what the rewards say of its rows."""
    return DataOptions.of(config, data, checks=row_checks(config.rewards), references=REFERENCE_COLUMNS)


async def start_agents(config: AgenticConfig, stack: AsyncExitStack) -> StartedTasks:
    """Worlds, tools and the gateway."""
    parts = await agent_parts(config, stack)

    def source(spec: RolloutSpec) -> Callable[[EnginePool], GroupRunner]:
        assert isinstance(spec.config, AgenticConfig)
        options = group_options(spec.config)
        return lambda manager: GroupRunner(WorldRunner(manager, parts), manager, options)

    return StartedTasks(
        prompts=training_tasks(config),
        source=source,
        validation=validation_tasks(config),
    )


def _tools(spec: RolloutSpec, config: RLVRConfig) -> ToolCompletionCallback | None:
    if not spec.tools:
        return None
    assert config.actor_train.data_args is not None
    template = config.actor_train.data_args.template
    tokenizer = told(load_tokenizer(config.pretrain), template, config.template_time, config.template_kwargs)
    renderer = TemplateRenderer(tokenizer, template)
    renderer.between(0, ["x"])  # a template that drops results is refused now, not at the first call of the run
    return spec.tool_callback(spec.tools, renderer, timeout_s=config.fault.env_timeout)


def _ledger(config: PipelineConfig, *, can_rebuild: bool) -> Ledger:
    ledger = config.ledger
    if config.checkpoint.resume_from is None:
        # A fresh run must not train groups of an older one; the old ledger is kept under another name.
        move_to_previous(Path(ledger.path))
    if not ledger.enable:
        return MemoryLedger()
    return SqliteLedger(ledger.path, fsync=ledger.fsync, can_rebuild=can_rebuild)


def _transport(config: PipelineConfig, hosts: Set[str]) -> str:
    """The weight transport. Without devices the config does not tell whether trainer and engines are on one host, so
    the addresses of the started processes decide.
    """
    wanted, several = config.weight_sync.transport, f"trainer and engines run on hosts {', '.join(sorted(hosts))}"
    pretended = pretended_gpus() > 0
    on_devices = not pretended and bool(config.actor_train.device_mapping and config.actor_infer.device_mapping)
    if len(hosts) > 1 and wanted == "shm":
        raise ValueError(f"weight_sync.transport shm: {several}; use auto")
    if len(hosts) > 1 and wanted == "auto" and not on_devices:
        logger.info("weight transport: gloo (%s)", several)
        return "gloo"
    name, reason = choose_transport(
        config.weight_sync.transport,
        trainer_devices=None if pretended else config.actor_train.device_mapping,  # pretended ones compute on the CPU
        engine_devices=None if pretended else config.actor_infer.device_mapping,
        num_gpus_per_node=config.num_gpus_per_node,
        front_end=needs_front_end(config),
    )
    logger.info("weight transport: %s (%s)", name, reason)
    return name
