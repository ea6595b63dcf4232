"""`roll-async rollout --config CONFIG`: the worlds of an agentic config and a fixed model, without training."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roll_async.commands.command_line import AS_TYPED, EXIT_CODES, EXIT_FINISHED, EXIT_ROLE_FAILED, output_of
from roll_async.config.loading.lookup import resolve_config

if TYPE_CHECKING:
    from roll_async.config.schema import AgenticConfig
    from roll_async.observe.run_folder import RunFolder


@click.command(name="rollout", context_settings=AS_TYPED, epilog=EXIT_CODES)
@click.option(
    "--config", required=True, metavar="NAME_OR_PATH", help="Its worlds, val_env_manager and engines are used."
)
@click.option("--batches", default=1, show_default=True, type=click.IntRange(1), help="Of val_batch_size trajectories.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FOLDER", help="For samples and trajectories.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
def command(config: str, batches: int, output: Path | None, args: tuple[str, ...]) -> int:
    """Run worlds with the model `pretrain` and write the trajectories, without training.

    Worlds, group sizes and seeds are those of validation. The folder gets samples/ as a run's rollout_dump_dir has
    them, trajectories/ to look at, and metrics.jsonl with a line per batch.

    \b
    Example:
      roll-async rollout --config agentic_frozen_lake_async_cpu val_batch_size=64
      roll-async rollout --config agentic_calculator_cpu pretrain=output/calculator_demo/hf
    """
    from roll_async.commands.run import ended

    return ended("rollout", lambda: _rollout(config, batches, output, args))


def _rollout(name: str, batches: int, output: Path | None, args: tuple[str, ...]) -> int:
    """Everything that needs no engine is checked first."""
    from roll_async.cluster.folders import absolute_paths
    from roll_async.cluster.role_log import role_environment
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import dump
    from roll_async.config.secrets import is_secret, with_secrets, without_secrets
    from roll_async.launch.checks.gate import check_supported, require_inputs, require_models
    from roll_async.launch.checks.inputs import resolve_names
    from roll_async.launch.rollout_only import for_rollout
    from roll_async.observe.run_folder import RunFolder

    path, overrides = resolve_config(["--config", name, *args], None)
    loaded = check_supported(path, overrides)
    given = with_secrets(loaded.generating, os.environ)
    output = output and output_of(output, output)
    config = for_rollout(given)
    require_inputs(loaded)
    config = resolve_names(config)
    require_models(loaded, config)
    # Last: it makes the folder, which a start that is refused must not leave.
    target = (output or output_of(None, Path(given.output_dir) / "rollout" / given.exp_name)).absolute()
    config = absolute_paths(replace(config, output_dir=str(target.parent), exp_name=target.name), Path.cwd())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = RunFolder(config.output_dir, config.exp_name)
    folder.open_log()
    folder.write_config(dump(without_secrets(config)), is_secret)
    print(
        f"{config.pretrain}: {batches} x {config.val_batch_size} trajectories, no training; output in {folder.path}",
        flush=True,
    )
    env = role_environment(folder.role_logs())
    with ray_runtime(num_processes=config.num_servers + 2, env=env):
        num_kept = asyncio.run(_run(config, batches, folder))
    if num_kept:
        return EXIT_FINISHED
    print(f"roll-async rollout: no trajectory ended with a reward; {folder.path}/run.log says why", file=sys.stderr)
    return EXIT_ROLE_FAILED


async def _run(config: AgenticConfig, batches: int, folder: RunFolder) -> int:
    """Returns the number of trajectories."""
    from roll_async.launch.rollout_only import rolled_batches

    num_kept = 0
    async with AsyncExitStack() as stack:
        async for metrics in rolled_batches(config, batches, stack):
            folder.append_metrics(metrics)
            num_kept += int(metrics["validation/samples"])
            print(_line(metrics, batches), flush=True)
    return num_kept


def _line(metrics: Mapping[str, float], batches: int) -> str:
    start = "agent/outcomes/"
    shares = {key.removeprefix(start): value for key, value in metrics.items() if key.startswith(start) and value}
    outcomes = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    means = "".join(
        f", {name} {metrics[key]:.3f}" for name in ("reward", "accuracy") if (key := f"validation/{name}") in metrics
    )
    return f"batch {metrics['step']:.0f}/{batches}: {metrics['validation/samples']:.0f} trajectories{means}; {outcomes}"
