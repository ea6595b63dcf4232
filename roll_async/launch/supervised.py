"""Starts the ranks of a run without engines and builds it on them: rows, learner, checkpoint -> pipeline."""

from __future__ import annotations

from contextlib import AsyncExitStack

from roll_async.cluster.runtime import RuntimeInfo
from roll_async.config.schema import SupervisedConfig
from roll_async.launch.roles import RoleStarter
from roll_async.launch.run_start import checkpoints_of
from roll_async.observe.recorder import Recorder
from roll_async.observe.run_folder import RunFolder
from roll_async.pipelines.checkpoint import LoopCheckpoint, restore_loop
from roll_async.pipelines.supervised import SupervisedPipeline, SupervisedPlan
from roll_async.prompts.given import GivenOptions, load_given
from roll_async.trainer.supervised import GivenData, SupervisedLearner


def load_data(config: SupervisedConfig) -> GivenData:
    """The rows of a run, tokenised. Raises ValueError, one line, for rows that cannot be trained on."""
    data, held_out = config.actor_train.data_args, config.validation
    assert data is not None, "the loader requires it"
    rows = load_given(GivenOptions.of(config, "actor_train.data_args", data))
    if held_out is None or not config.eval_steps:
        return GivenData(rows=rows)
    measured = load_given(GivenOptions.of(config, "validation.data_args", held_out.data_args))
    return GivenData(rows=rows, held_out=measured)


async def start_supervised(
    config: SupervisedConfig,
    runtime: RuntimeInfo,
    stack: AsyncExitStack,
    observers: tuple[Recorder, RunFolder],
    data: GivenData,
) -> SupervisedPipeline:
    """Start the ranks and build the run on them; they close with the stack. Raises ValueError for what the user can
    fix, RoleFailed for what a role reports.
    """
    recorder, folder = observers
    roles = await RoleStarter(config, runtime, stack).start_ranks()
    actor = roles["actor_train"]
    learner, checkpoints = SupervisedLearner(actor, config, data), checkpoints_of(config, folder.record)
    await learner.prepare()  # first: the ranks still hold the model that the run starts from
    restored, _ = await restore_loop(config, roles, learner, checkpoints)
    assert folder.last_step <= restored, f"the folder has metrics of later steps than {restored}"
    checkpoint = LoopCheckpoint(config, roles, learner, None, checkpoints)
    stack.push_async_exit(checkpoint.close)
    plan = SupervisedPlan(
        first_step=restored + 1,
        max_steps=learner.last_step(restored),
        save_every=config.save_steps,
        eval_every=config.eval_steps,
    )
    return SupervisedPipeline(learner, checkpoint, recorder, actor.export_hf, plan)
