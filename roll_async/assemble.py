"""Couples the roles of a run: queue, scheduler, rollouter, learner, synchronizer -> pipeline."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from roll_async import assemble_settings as settings
from roll_async.assemble_checkpoint import LoopCheckpoint, restore_loop
from roll_async.assemble_roles import RolePlacements, Roles, RoleStarter, reference_is_actor
from roll_async.buffer.ledger import Ledger, MemoryLedger, SqliteLedger, set_aside
from roll_async.buffer.message_queue import MessageQueue
from roll_async.checkpoint.run_checkpoints import RunCheckpoints
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.cluster.trainer_group import BasePolicy, RayTrainerGroup
from roll_async.config.schema import RLVRConfig
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.sample_dump import SampleDump
from roll_async.pipelines.health import CustomMonitor, HealthMonitor
from roll_async.pipelines.metrics import sample_rows, validation_metrics
from roll_async.pipelines.rlvr import RLVRPipeline
from roll_async.pipelines.train_loop import PipelineParts, TrainLoop
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.prompts.tool_turns import ChatToolCodec
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.schema import Prompt
from roll_async.trainer.learner import Learner, LearnerParts
from roll_async.weight_sync.synchronizer import ParameterSynchronizer
from roll_async.weight_sync.transports import choose_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunClasses:
    """Where a run may differ by the user's own code."""

    trainer: type[TrainLoop] = TrainLoop
    rollouter: type[Rollouter] = Rollouter
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """By name; without one, no completion is searched for calls."""
    tool_callback: type[ToolCompletionCallback] = ToolCompletionCallback
    monitor_interval_s: float | None = None
    """Seconds between two looks at the health of all components; None = no monitor."""
    custom_monitor: CustomMonitor | None = None
    log_name: str | None = None
    """A second log file in the run folder, besides run.log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A run ready to go."""

    pipeline: RLVRPipeline
    actor: RayTrainerGroup
    checkpoint: LoopCheckpoint


async def build_run(
    config: RLVRConfig,
    runtime: RuntimeInfo,
    placements: RolePlacements,
    stack: AsyncExitStack,
    observers: tuple[Recorder, RunFolder],
    classes: RunClasses,
) -> Assembled:
    """Start every role and couple them; they close with the stack. Raises ValueError for what the user can fix,
    RoleFailed for what a role reports.
    """
    roles = await RoleStarter(config, runtime, placements, stack).start()
    samples = None
    if config.tracking.rollout_dump_dir is not None:
        samples = SampleDump(config.tracking.rollout_dump_dir, load_tokenizer(config.pretrain).batch_decode)
        stack.callback(samples.close)
    assembled = await couple(config, roles, *observers, classes, samples)
    stack.push_async_exit(assembled.checkpoint.close)
    return assembled


async def couple(
    config: RLVRConfig,
    roles: Roles,
    recorder: Recorder,
    folder: RunFolder,
    classes: RunClasses,
    samples: SampleDump | None = None,
) -> Assembled:
    """A pipeline on roles that run already; restores what `checkpoint.resume_from` names."""
    actor, manager, supervisor = roles.training["actor_train"], roles.manager, roles.supervisor
    scheduler = ChatCompletionScheduler(
        manager, roles.scorer, settings.scheduler_options(config), tools=_tools(config, classes)
    )
    learner_parts = LearnerParts(
        actor=actor,
        reference=BasePolicy(actor) if reference_is_actor(config) else roles.training.get("reference"),
        teacher=roles.training.get("teacher"),
        critic=roles.training.get("critic") if config.algorithm.adv_estimator == "gae" else None,
    )
    learner = Learner(learner_parts, settings.learner_options(config))
    checkpoints = RunCheckpoints(folder=Path(config.checkpoint.output_dir), max_to_keep=config.checkpoint.max_to_keep)
    saved = {name: roles.training[name] for name in ("actor_train", "critic") if name in roles.training}
    restored, position = await restore_loop(config, saved, learner, checkpoints)
    folder.truncate_metrics(restored)
    queue = MessageQueue(settings.queue_options(config), _ledger(config))
    queue.restore(restored, position)
    rollouter = classes.rollouter(queue, scheduler, manager, roles.prompts, budget=settings.filter_budget(config))
    synchronizer = ParameterSynchronizer(
        actor,
        rollouter,
        lambda: manager.clients,  # type: ignore[arg-type, return-value]
        settings.sync_options(config, _transport(config)),
        weights_held=queue.weights_held,
        take_out=supervisor.take_out,
        put_back=supervisor.put_back,  # type: ignore[arg-type]
        comes_back=lambda: manager.expects_return,
    )
    supervisor.attach(synchronizer.rejoin)  # type: ignore[arg-type]
    checkpoint = LoopCheckpoint(config, saved, learner, queue, checkpoints, samples)
    parts = PipelineParts(
        queue=queue,
        rollouter=rollouter,
        learner=learner,
        synchronizer=synchronizer,
        checkpoint=checkpoint,
        observer=recorder,
        dump=None if samples is None else lambda step, groups: samples.write(step, sample_rows(groups)),
        validate=_validator(config, scheduler, roles.validation) if roles.validation else None,
    )
    plan = settings.run_plan(config, first_step=restored + 1)
    trainer = classes.trainer(parts, plan)
    watch = None
    if classes.monitor_interval_s is not None:
        monitor = HealthMonitor(
            trainer, parts, interval_s=classes.monitor_interval_s, custom_monitor=classes.custom_monitor
        )
        watch = monitor.run
    return Assembled(
        pipeline=RLVRPipeline(parts, plan, trainer=trainer, watch=watch), actor=actor, checkpoint=checkpoint
    )


def _tools(config: RLVRConfig, classes: RunClasses) -> ToolCompletionCallback | None:
    if not classes.tools:
        return None
    assert config.actor_train.data_args is not None
    codec = ChatToolCodec(load_tokenizer(config.pretrain), config.actor_train.data_args.template)
    return classes.tool_callback(classes.tools, codec, timeout_s=config.fault.env_timeout)


def _ledger(config: RLVRConfig) -> Ledger:
    ledger = config.ledger
    if config.checkpoint.resume_from is None:
        # A fresh run must not train groups of an older one; they are kept beside it, not lost.
        set_aside(Path(ledger.path))
    return SqliteLedger(ledger.path, fsync=ledger.fsync) if ledger.enable else MemoryLedger()


def _transport(config: RLVRConfig) -> str:
    name, reason = choose_transport(
        config.weight_sync.transport,
        trainer_devices=config.actor_train.device_mapping,
        engine_devices=config.actor_infer.device_mapping,
        num_gpus_per_node=config.num_gpus_per_node,
    )
    logger.info("weight transport: %s (%s)", name, reason)
    return name


def _validator(
    config: RLVRConfig, scheduler: ChatCompletionScheduler, prompts: Sequence[Prompt]
) -> Callable[[int], Awaitable[Mapping[str, float]]]:
    assert config.validation is not None
    sampling = settings.sampling_params(config.validation.generating_args)

    async def validate(step: int) -> Mapping[str, float]:
        answered = await scheduler.validate(prompts, sampling, name=f"validation.{step}")
        return validation_metrics(answered, num_asked=len(prompts))

    return validate
