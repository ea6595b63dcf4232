"""Starts and couples the roles of a run: queue, scheduler, rollouter, learner, synchronizer -> pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from roll_async.cluster.roles.trainer_group import BasePolicy, RayTrainerGroup
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import PipelineConfig, reference_is_actor, roles_on_same_devices
from roll_async.launch.roles import RolePlacements, Roles, RoleStarter
from roll_async.launch.rollout import RolloutSpec
from roll_async.launch.run_start import checkpoints_of
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.sample_dump import SampleDump
from roll_async.pipelines.checkpoint import LoopCheckpoint, restore_loop
from roll_async.pipelines.health import CustomMonitor
from roll_async.pipelines.metrics import sample_rows
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.rlvr import RLVRPipeline, TrainLoop
from roll_async.pipelines.wire import build_pipeline
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.rollout.rollouter import Rollouter
from roll_async.rollout.tools import Tool, ToolCompletionCallback
from roll_async.trainer.learner import Learner, LearnerOptions
from roll_async.trainer.roles import LearnerParts
from roll_async.weight_sync.protocol import OWN_DEVICES, DevicePhase, Devices


@dataclass(frozen=True, kw_only=True, slots=True)
class UserHooks:
    """Classes and callbacks that a user may replace, and options of the launcher."""

    trainer: type[TrainLoop] = TrainLoop
    rollouter: type[Rollouter] = Rollouter
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """Tools by name; without any, completions are not searched for calls."""
    tool_callback: type[ToolCompletionCallback] = ToolCompletionCallback
    monitor_interval_s: float | None = None
    """Seconds between two reports of the health of all components; None = no monitor."""
    custom_monitor: CustomMonitor | None = None
    log_name: str | None = None
    """A second log file in the run folder, besides run.log."""
    rollout_process: bool = False
    """Queue, rollouter and synchronizer run in a process of their own, so that the trainer's loop cannot delay them."""

    @property
    def log_names(self) -> list[str]:
        """Log files of the run folder besides run.log."""
        return [] if self.log_name is None else [self.log_name]

    @property
    def modules(self) -> set[str]:
        """Modules whose code runs in the driver: a script's `logging.getLogger(__name__)` has such a name."""
        hooks = [self.trainer] if self.custom_monitor is None else [self.trainer, self.custom_monitor]
        return {hook.__module__ for hook in hooks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """A run whose roles are started and coupled."""

    pipeline: RLVRPipeline
    actor: RayTrainerGroup
    checkpoint: LoopCheckpoint
    devices: Devices

    async def export_hf(self, folder: str) -> None:
        """Write the trained model as a folder that transformers loads."""
        await self.devices.phase(DevicePhase.TRAIN)
        await self.actor.export_hf(folder)


async def build_run(
    config: PipelineConfig,
    runtime: RuntimeInfo,
    placements: RolePlacements,
    stack: AsyncExitStack,
    observers: tuple[Recorder, RunFolder],
    classes: UserHooks,
) -> Assembled:
    """Start every role and couple them; they close with the stack. Raises ValueError for what the user can fix,
    RoleFailed for what a role reports.
    """
    logs = [str(path) for path in observers[1].log_files(*classes.log_names)] if classes.rollout_process else None
    roles = await RoleStarter(config, runtime, placements, stack).start(rollout_log_files=logs)
    samples = None
    if config.tracking.rollout_dump_dir is not None:
        samples = SampleDump(config.tracking.rollout_dump_dir, load_tokenizer(config.pretrain).batch_decode)
        stack.callback(samples.close)
    assembled = await couple(config, roles, *observers, classes, samples)
    stack.push_async_exit(assembled.checkpoint.close)
    return assembled


def learner_parts(config: PipelineConfig, training: Mapping[str, RayTrainerGroup]) -> LearnerParts:
    """The started training roles as a step uses them."""
    actor = training["actor_train"]
    return LearnerParts(
        actor=actor,
        reference=BasePolicy(actor) if reference_is_actor(config) else training.get("reference"),
        teacher=training.get("teacher"),
        critic=training.get("critic") if config.algorithm.adv_estimator == "gae" else None,
        sharing=roles_on_same_devices(config),
    )


async def couple(
    config: PipelineConfig,
    roles: Roles,
    recorder: Recorder,
    folder: RunFolder,
    classes: UserHooks,
    samples: SampleDump | None = None,
) -> Assembled:
    """A pipeline on roles that run already; restores the checkpoint that `checkpoint.resume_from` names."""
    actor = roles.training["actor_train"]
    learner = Learner(learner_parts(config, roles.training), LearnerOptions.of(config))
    checkpoints = checkpoints_of(config, folder.record)
    saved = {name: roles.training[name] for name in ("actor_train", "critic") if name in roles.training}
    # Before the rollout is coupled, which begins at the position that comes out of it.
    restored, position = await restore_loop(config, saved, learner, checkpoints)
    assert folder.last_step <= restored, f"the folder has metrics of later steps than {restored}"
    spec = RolloutSpec(
        config=config,
        source=actor,
        run_id="" if folder.record is None else folder.record.run_id,
        restored=restored,
        position=position,
        rollouter=classes.rollouter,
        tools=classes.tools,
        tool_callback=classes.tool_callback,
        devices=roles.devices,
        trainer_hosts=actor.hosts,
    )
    side = await roles.rollout.couple(spec)
    checkpoint = LoopCheckpoint(config, saved, learner, side.queue, checkpoints, samples)
    parts = PipelineParts(
        queue=side.queue,
        rollouter=side.rollouter,
        learner=learner,
        synchronizer=side.synchronizer,
        checkpoint=checkpoint,
        observer=recorder,
        dump=None if samples is None else lambda step, *rows: samples.write(step, sample_rows(*rows)),
        validate=side.validate,
        devices=OWN_DEVICES if roles.devices is None else roles.devices,
    )
    # Saved at that step, and ended before its validation was published.
    lost_result = restored > 0 and not folder.has_validation(restored)
    pipeline = build_pipeline(
        parts,
        RunPlan.of(config, first_step=restored + 1, measures_restored=lost_result),
        trainer=classes.trainer,
        monitor_interval_s=classes.monitor_interval_s,
        custom_monitor=classes.custom_monitor,
    )
    return Assembled(pipeline=pipeline, actor=actor, checkpoint=checkpoint, devices=parts.devices)
