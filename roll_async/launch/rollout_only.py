"""Worlds and engines without a trainer: trajectories of a fixed model, with validation's managers.

held-out tasks --> GroupRunner <--> engines, which hold the weights of `pretrain`
                       +--> samples/step_N.jsonl, trajectories/, metrics.jsonl of the folder, batch by batch
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from roll_async.agents.tasks import Tasks
from roll_async.buffer.errors import after_start
from roll_async.config.schema import AgenticConfig, PipelineConfig
from roll_async.launch.agents import held_out_tasks
from roll_async.launch.roles import loading_weights, start_without_training
from roll_async.observe.sample_dump import EVERY_GROUP, SampleDump
from roll_async.pipelines.metrics import ratio_metrics, sample_rows
from roll_async.pipelines.validation import validation_metrics
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.rollout.group_source import GroupFate
from roll_async.rollout.groups import GroupRunner
from roll_async.schema import Group

logger = logging.getLogger(__name__)

SAMPLES = "samples"
"""Folder of the rows."""


def for_rollout(config: PipelineConfig) -> AgenticConfig:
    """The config of a rollout. Raises ValueError for a config without worlds."""
    if not isinstance(config, AgenticConfig):
        raise ValueError("pipeline rlvr has no worlds to run; rollout takes agentic configs, eval the others")
    return replace(config, actor_infer=loading_weights(config.actor_infer))


async def rolled_batches(
    config: AgenticConfig, num_batches: int, stack: AsyncExitStack
) -> AsyncIterator[Mapping[str, float]]:
    """The metrics of each batch of `val_batch_size` trajectories when its samples are written. Raises what
    `launch/roles.py: start_without_training` does.
    """
    groups, _ = await start_without_training(config, stack)
    folder = Path(config.output_dir) / config.exp_name / SAMPLES
    dump = SampleDump({folder: EVERY_GROUP}, load_tokenizer(config.pretrain).batch_decode)
    stack.callback(dump.close)
    tasks = held_out_tasks(config)
    group_size = config.val_env_manager.group_size
    size = config.val_batch_size // group_size
    before: Mapping[str, tuple[float, float]] = {}
    for batch in range(num_batches):
        places = range(batch * size, (batch + 1) * size)
        with after_start():
            kept = await rolled(groups, tasks, places)
        dump.write(batch + 1, lambda _, kept=kept: sample_rows(kept))
        dump.flush()
        answered = [(group.prompt, rows) for group in kept for rows in group.trajectories]
        # All that were asked: what a failed group lacks counts as unscored.
        found = validation_metrics(answered, [tasks.at(place) for place in places], num_samples=group_size)
        failed, counts = {"groups/failed": float(size - len(kept))}, groups.counts()
        yield {"step": batch + 1.0, **found, **failed, **counts.metrics, **ratio_metrics(counts.ratios, before)}
        before = counts.ratios


async def rolled(groups: GroupRunner, tasks: Tasks, places: Sequence[int]) -> list[Group]:
    """The groups of the tasks at these places, in order, without those whose attempts are used up."""
    async with asyncio.TaskGroup() as running:
        asked = [running.create_task(groups.run_group(tasks.at(place), group_id=place)) for place in places]
    kept = []
    for outcome in (task.result() for task in asked):
        if outcome.fate is GroupFate.KEPT and outcome.group is not None:
            kept.append(outcome.group)
        else:
            logger.warning("a group gave no trajectories: %s", outcome.reason)
    return kept
