"""Starts the roles of a run and builds it on them: queue, scheduler, rollouter, learner, synchronizer -> pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from roll_async.cluster.roles.trainer_group import BasePolicy, RayTrainerGroup
from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import PipelineConfig, reference_is_actor, roles_on_same_devices
from roll_async.launch.roles import RoleStarter, StartedRoles
from roll_async.launch.run_start import checkpoints_of
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.sample_dump import EVERY_GROUP, SAMPLES, SampleDump
from roll_async.observe.trace import DRIVER, starting
from roll_async.pipelines.checkpoint import LoopCheckpoint, restore_loop
from roll_async.pipelines.metrics import sample_rows
from roll_async.pipelines.protocol import PipelineParts, RunPlan
from roll_async.pipelines.rlvr import RLVRPipeline
from roll_async.pipelines.wire import UserHooks, build_pipeline
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.trainer.learner import Learner, LearnerOptions
from roll_async.trainer.roles import LearnerParts
from roll_async.weight_sync.protocol import OWN_DEVICES


async def start_run(
    config: PipelineConfig,
    runtime: RuntimeInfo,
    stack: AsyncExitStack,
    observers: tuple[Recorder, RunFolder],
    hooks: UserHooks,
) -> RLVRPipeline:
    """Start every role and build the run on them; they close with the stack. Raises ValueError for what the user can
    fix, RoleFailed for what a role reports.
    """
    logs = [str(path) for path in observers[1].log_files(*hooks.log_names)] if hooks.rollout_process else None
    started = await RoleStarter(config, runtime, stack).start(rollout_log_files=logs)
    return await build_run(config, started, stack, observers, hooks)


def learner_parts(config: PipelineConfig, training: Mapping[str, RayTrainerGroup]) -> LearnerParts:
    """The started training roles as a step uses them."""
    actor = training["actor_train"]
    return LearnerParts(
        actor=actor,
        reference=BasePolicy(actor) if reference_is_actor(config) else training.get("reference"),
        teachers={role: group for role, group in training.items() if role.startswith("teacher")},
        critic=training.get("critic") if config.algorithm.adv_estimator == "gae" else None,
        sharing=roles_on_same_devices(config),
    )


async def build_run(
    config: PipelineConfig,
    started: StartedRoles,
    stack: AsyncExitStack,
    observers: tuple[Recorder, RunFolder],
    hooks: UserHooks,
) -> RLVRPipeline:
    """A pipeline on roles that run already; restores the checkpoint that `checkpoint.resume_from` names. What the run
    writes is complete when the stack closes.
    """
    (training, rollout), (recorder, folder) = started, observers
    actor, samples = training["actor_train"], _sample_dump(config, stack, observers)
    learner = Learner(learner_parts(config, training), LearnerOptions.of(config))
    checkpoints = checkpoints_of(config, folder.record)
    saved = {name: training[name] for name in ("actor_train", "critic") if name in training}
    # Before the rollout side is built, which begins at the position that comes out of it.
    with starting(DRIVER, "restore"):
        restored, position = await restore_loop(config, saved, learner, checkpoints)
    assert folder.last_step <= restored, f"the folder has metrics of later steps than {restored}"
    run_id = "" if folder.record is None else folder.record.run_id
    side = await rollout.build(config, actor, hooks.of_rollout, run_id, restored, position)
    checkpoint = LoopCheckpoint(config, saved, learner, side.queue, checkpoints, samples)
    stack.push_async_exit(checkpoint.close)
    parts = PipelineParts(
        queue=side.queue,
        rollouter=side.rollouter,
        learner=learner,
        synchronizer=side.synchronizer,
        checkpoint=checkpoint,
        observer=recorder,
        dump=None if samples is None else lambda step, *trained: samples.write(step, partial(sample_rows, *trained)),
        validate=side.validate,
        devices=OWN_DEVICES if rollout.devices is None else rollout.devices,
        export=actor.export_hf,
    )
    # Saved at that step, and ended before its validation was published.
    lost_result = restored > 0 and not folder.has_validation(restored)
    return build_pipeline(parts, RunPlan.of(config, first_step=restored + 1, measures_restored=lost_result), hooks)


def _sample_dump(
    config: PipelineConfig, stack: AsyncExitStack, observers: tuple[Recorder, RunFolder]
) -> SampleDump | None:
    tracking, (recorder, run) = config.tracking, observers
    kept = {run.path / SAMPLES: tracking.samples_per_step}
    if (dump := tracking.rollout_dump_dir) is not None:  # may be that folder
        kept[Path(dump)] = EVERY_GROUP
    if not (folders := {folder: groups for folder, groups in kept.items() if groups}):
        return None
    samples = SampleDump(folders, load_tokenizer(config.pretrain).batch_decode, show=recorder.samples)
    stack.callback(samples.close)
    return samples
