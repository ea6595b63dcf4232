"""The rollout side of a run: engines, rewards, prompts; then queue, rollouter and synchronizer on them.

Both parts run where they are called: in the driver, or in the rollout process of the fully asynchronous mode
(`cluster/roles/rollout_process.py`), which is why what `build` takes can be pickled.
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
from roll_async.agents.worlds import AgentParts, WorldRunner
from roll_async.buffer.ledger import Ledger, MemoryLedger, SqliteLedger, move_to_previous
from roll_async.buffer.states import QueueOptions
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement, pretended_gpus
from roll_async.cluster.roles.engine_group import RayEngineClient
from roll_async.cluster.roles.reward_group import HostPlan, RayScorer
from roll_async.cluster.roles.trainer_group import RayTrainerGroup
from roll_async.config.schema import AgenticConfig, DataArguments, PipelineConfig, RLVRConfig
from roll_async.inference.endpoint import ChatEndpoint, EndpointOptions
from roll_async.inference.settings import unshown_stops
from roll_async.launch.agents import agent_parts, group_options, training_tasks, validation_tasks
from roll_async.launch.engines import ReplicaStarter
from roll_async.launch.scaling import follow_requests
from roll_async.observe.trace import starting
from roll_async.pipelines.colocation import PhaseSwitcher
from roll_async.pipelines.validation import held_out_sets
from roll_async.pipelines.wire import Engines, RolloutParts, RolloutSide, UserHooks, build_engines, build_rollout
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.load import DataOptions, judged, load_prompts
from roll_async.prompts.pool import PooledPrompts
from roll_async.prompts.stream import ShuffledPrompts
from roll_async.prompts.tokenizer import load_tokenizer, told
from roll_async.rewards.row_checks import REFERENCE_COLUMNS, row_checks
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions
from roll_async.rollout.groups import GroupRunner
from roll_async.rollout.protocol import PromptPool, PromptSource
from roll_async.rollout.teaching import TaughtRunner
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.schema import Prompt
from roll_async.weight_sync.canary import CanaryOptions
from roll_async.weight_sync.protocol import SyncOptions
from roll_async.weight_sync.transport.transports import ONE_HOST, choose_transport, needs_front_end

logger = logging.getLogger(__name__)
_ASKED_AT_START = "The answer is 42, because f(x) = x + 2."
"""Of a teacher behind an address: with another vocabulary its tokens are another text."""
T = TypeVar("T")
C = TypeVar("C", bound=PipelineConfig)

Scorers = RayScorer | AgentParts
"""What scores answers: the host of the rewards, or the worlds that agents act in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRollout:
    """The running engines, what scores their answers, and the prompts: all of it may serve one run after another."""

    engines: Engines
    validators: Engines | None
    """Replicas that run validations and nothing else; None = there are none."""
    scorers: Scorers
    prompts: PromptSource
    held_out: Mapping[str, Sequence[Prompt]]
    """Prompts of validations, by set."""
    pool: Callable[[], PromptPool] | None
    """Makes the pool over the stream, one for each run; None = no pool."""
    starter: ReplicaStarter
    stack: AsyncExitStack
    teachers: Mapping[str, ChatEndpoint] = field(default_factory=dict)
    """Distillation teachers behind addresses, by name."""
    devices: PhaseSwitcher | None = None
    """Devices that training roles and engines share; None = they share none."""

    async def build(
        self,
        config: PipelineConfig,
        weights: RayTrainerGroup,
        hooks: UserHooks,
        run_id: str,
        restored: int,
        position: Mapping[str, object] | None,
    ) -> RolloutSide:
        """Queue, rollouter and synchronizer of one run, whose weights are those of these ranks. `run_id`, `restored`
        and `position` are those of `RolloutParts`.
        """
        all_engines = [self.engines, *([] if self.validators is None else [self.validators])]
        clients = [client for engines in all_engines for client in engines.manager.clients]
        hosts = weights.hosts | {host for client in clients for host in client.hosts}  # type: ignore[attr-defined]
        transport = _transport(config, hosts)
        parts = RolloutParts(
            engines=self.engines,
            groups=groups_on(config, self.scorers, _tools(config, hooks), self.teachers),
            prompts=self.prompts,
            weights=weights,
            ledger=_ledger(config, can_rebuild=position is not None),
            queue=QueueOptions.of(config),
            sync=SyncOptions.of(config, transport),
            stop_timeout_s=config.async_training.interrupt.timeout,
            pool=None if self.pool is None else self.pool(),
            budget=BudgetOptions.of(config),
            canary=CanaryOptions.of(config),
            held_out=held_out_sets(config.validation_sampling, self.held_out),
            validation_mode=config.validation_mode,
            validators=self.validators,
            devices=self.devices,
            run_id=run_id,
            restored=restored,
            position=position,
        )
        side = build_rollout(parts, hooks)
        self.starter.one_host = next(iter(hosts)) if transport in ONE_HOST else None
        folder = Path(config.output_dir) / config.exp_name
        await follow_requests(folder, self.engines, self.starter, side.queue, self.stack)
        return side


async def start_rollout(
    config: PipelineConfig, engines: Sequence[ProcessPlacement], pool: NodePool, stack: AsyncExitStack
) -> StartedRollout:
    """Start engines and what scores in parallel, and load the prompts meanwhile; all of them are closed when the stack
    closes. Raises ValueError for what the user can fix, RoleFailed for what a role reports.
    """
    starter = ReplicaStarter(config, engines, pool, stack)
    beside = asyncio.gather(
        _told("read", prompts_of, config), start_scorers(config, stack), start_teachers(config, stack)
    )
    found, training, validators = await start_engines(config, starter, beside, stack)
    (prompts, prompt_pool, held_out), scorers, teachers = found
    return StartedRollout(
        engines=training,
        validators=validators,
        scorers=scorers,
        prompts=prompts,
        held_out=held_out,
        pool=prompt_pool,
        starter=starter,
        stack=stack,
        teachers=teachers,
    )


async def start_engines(
    config: PipelineConfig, starter: ReplicaStarter, beside: Awaitable[T], stack: AsyncExitStack
) -> tuple[T, Engines, Engines | None]:
    """(what `beside` gives, which is started at the same time; the replicas; those that run validations alone, if
    any).
    """
    found, clients, end_ids = await asyncio.gather(beside, starter.start_all(), _told("tokenizer", end_ids_of, config))

    async def connected(replicas: Sequence[RayEngineClient]) -> Engines:
        engines = build_engines(
            replicas,
            starter,
            replace(ManagerOptions.of(config), end_ids=end_ids),
            max_restarts=config.restarts_per_engine,
            start_timeout_s=config.fault.rpc_timeout,
        )
        await engines.start(stack)
        return engines

    first_own = len(clients) - config.num_validation_replicas
    training, own = clients[:first_own], clients[first_own:]
    return found, await connected(training), await connected(own) if own else None


async def _told(phase: str, work: Callable[[C], T], config: C) -> T:
    """In a thread, as a phase of the start."""
    with starting("prompts", phase):
        return await asyncio.to_thread(work, config)


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


async def start_scorers(config: PipelineConfig, stack: AsyncExitStack, *, trains: bool = True) -> Scorers:
    """What scores the answers of a config. `trains`: as in `agents.py: group_options`."""
    if isinstance(config, AgenticConfig):
        return await agent_parts(config, stack, trains=trains)
    assert isinstance(config, RLVRConfig)
    return await start_scorer(config, stack)


def groups_on(
    config: PipelineConfig,
    scorers: Scorers,
    tools: ToolCompletionCallback | None = None,
    teachers: Mapping[str, ChatEndpoint] | None = None,
) -> Callable[[EnginePool], GroupRunner]:
    """`RolloutParts.groups`: of trajectories in worlds, or of answers that rewards score; `teachers` with an address
    score either.
    """

    def groups(manager: EnginePool) -> GroupRunner:
        if isinstance(scorers, AgentParts):
            assert isinstance(config, AgenticConfig)
            limits = group_options(config, trains=scorers.trains)
            made = GroupRunner(WorldRunner(manager, scorers), manager, limits)
        else:
            assert isinstance(config, RLVRConfig)
            made = ChatCompletionScheduler(manager, scorers, SchedulerOptions.of(config), tools=tools)
        if servers:
            made.runner = TaughtRunner(made.runner, config, servers)
        return made

    # Those that run may serve several runs, and this one need not have them all.
    servers = {name: teacher for name, teacher in (teachers or {}).items() if name in config.teacher_servers}
    return groups


async def start_scorer(config: RLVRConfig, stack: AsyncExitStack) -> RayScorer:
    """The rewards that score; they close with the stack."""
    plan = HostPlan(
        rewards={name: r for name, r in config.rewards.items() if name not in config.loss_parts},
        tokenizer_folder=config.pretrain,
        env=config.system_envs,
        stops=unshown_stops(config),
        rpc_timeout_s=config.fault.rpc_timeout,
    )
    scorer = await RayScorer.start(plan)
    stack.push_async_callback(scorer.close)
    return scorer


async def start_teachers(config: PipelineConfig, stack: AsyncExitStack) -> dict[str, ChatEndpoint]:
    """Teachers behind addresses, by name; they close with the stack. Raises ValueError for one that does not answer,
    gives no log-probs of prompts, or reads the policy's token ids as another text.
    """
    if not config.teacher_servers:
        return {}
    tokenizer = await asyncio.to_thread(load_tokenizer, config.pretrain)
    asked = tokenizer.encode(_ASKED_AT_START, add_special_tokens=False)
    started = {}
    for name, server in config.teacher_servers.items():
        endpoint = started[name] = ChatEndpoint(EndpointOptions.of(server))
        stack.push_async_callback(endpoint.close)
        try:
            await endpoint.start()
            text, _ = await endpoint.echo(asked)
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"teachers.{name}: {error}") from error
        expected = str(tokenizer.decode(asked)).strip()
        if not text.strip().startswith(expected):
            message = f"it reads {expected!r} as {text[: len(expected)]!r}; use a teacher with the policy's tokenizer"
            raise ValueError(f"teachers.{name}: {server.address} has another vocabulary: {message}")
    return started


def prompts_of(
    config: PipelineConfig,
) -> tuple[PromptSource, Callable[[], PromptPool] | None, Mapping[str, Sequence[Prompt]]]:
    """The prompts of training, what makes the pool over them, and those of validations. Raises ValueError for bad
    files.
    """
    if isinstance(config, AgenticConfig):
        return training_tasks(config), None, held_out_of(config)
    assert isinstance(config, RLVRConfig)
    data, pool = config.actor_train.data_args, None
    assert data is not None
    train = load_prompts(data_options(config, data))
    stream = ShuffledPrompts(train, seed=config.seed, probabilities=data.domain_interleave_probs)
    if config.prompt_pool.enable:
        reserve, files = {}, config.prompt_pool.refill_file_name
        if files:
            reserve = load_prompts(data_options(config, replace(data, file_name=files)), every_domain=False)
        pool = partial(PooledPrompts, stream.at, train, config.prompt_pool, seed=config.seed, reserve=reserve)
        pool()  # raises before anything starts if the rows have no numbers for the curriculum
    return stream, pool, held_out_of(config)


def held_out_of(config: PipelineConfig) -> Mapping[str, Sequence[Prompt]]:
    """Held-out prompts by set; none without eval_steps. Raises ValueError for bad files."""
    if isinstance(config, AgenticConfig):
        return validation_tasks(config)
    assert isinstance(config, RLVRConfig)
    if not config.eval_steps:
        return {}
    assert config.validation is not None, "the rules require it"
    by_key = {key: _prompts_of_set(config, data) for key, data in dict(config.validation.data.values()).items()}
    return {name: by_key[key] for name, (key, _) in config.validation.data.items()}


def _prompts_of_set(config: RLVRConfig, data: DataArguments) -> list[Prompt]:
    # Validation may use a part of the domains: AIME alone for a run over mathematics and code.
    held_out = load_prompts(replace(data_options(config, data), teachers=()), every_domain=False)
    # One epoch: with fewer rows than val_batch_size no prompt is asked twice.
    stream = ShuffledPrompts(judged(held_out, config.loss_parts), seed=config.seed, num_epochs=1)
    prompts = (stream.at(i) for i in range(config.val_batch_size))
    return [p for p in prompts if p is not None]


def data_options(config: RLVRConfig, data: DataArguments) -> DataOptions:
    """How a prompt file is read, with what the rewards say of its rows."""
    return DataOptions.of(config, data, checks=row_checks(config.rewards), references=REFERENCE_COLUMNS)


def _tools(config: PipelineConfig, hooks: UserHooks) -> ToolCompletionCallback | None:
    """The tools that completions call; worlds have theirs from the config."""
    if not (hooks.tools and isinstance(config, RLVRConfig)):
        return None
    assert config.actor_train.data_args is not None
    template = config.actor_train.data_args.template
    tokenizer = told(load_tokenizer(config.pretrain), template, config.template_time, config.template_kwargs)
    renderer = TemplateRenderer(tokenizer, template)
    renderer.between(0, ["x"])  # a template that drops results is refused now, not at the first call of the run
    return hooks.tool_callback(hooks.tools, renderer, timeout_s=config.fault.env_timeout)


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
