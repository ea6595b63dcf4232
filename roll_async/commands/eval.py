"""`roll-async eval TARGET --config CONFIG`: the validation of a config, of a folder or of an address, without a run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from roll_async.commands.command_line import (
    AS_TYPED,
    EXIT_CODES,
    EXIT_FINISHED,
    EXIT_ROLE_FAILED,
    output_of,
    print_table,
)
from roll_async.config.loading.lookup import resolve_config

if TYPE_CHECKING:
    from roll_async.config.schema import PipelineConfig, RLVRConfig
    from roll_async.launch.evaluation import Evaluation
    from roll_async.observe.run_folder import RunFolder

_COLUMNS = ("prompts", "samples", "accuracy", "standard_error", "reward", "length_mean", "truncated", "unscored")


@dataclass(frozen=True, kw_only=True)
class _EvalArguments:
    target: str
    config: str
    output: Path | None
    model: str | None
    key_env: str | None
    args: tuple[str, ...]

    @property
    def is_address(self) -> bool:
        """Whether the target is one, and not a folder."""
        return self.target.startswith(("http://", "https://"))


@click.command(name="eval", context_settings=AS_TYPED, epilog=EXIT_CODES)
@click.argument("target")
@click.option("--config", required=True, metavar="NAME_OR_PATH", help="Its validation, rewards or worlds, and engines.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FOLDER", help="For results.json and samples.jsonl.")
@click.option("--model", metavar="NAME", help="Of an address that serves several.")
@click.option("--key-env", metavar="VARIABLE", help="Environment variable with the key of an address.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
def command(**given: object) -> int:
    """Measure TARGET as a validation of the config would.

    TARGET: a Hugging Face folder or hub name, a checkpoint of a run (of a run or a folder of several: the newest), or
    the address of an OpenAI-compatible server (rlvr configs). Prints a table on a terminal, SET/NAME VALUE lines in a
    pipe. Worlds of an agentic config are those of its val_env_manager.

    \b
    Example:
      roll-async eval output/addition_demo/hf --config rlvr_config_async_cpu val_batch_size=64
      roll-async eval output/frozen_lake_demo --config agentic_frozen_lake_async_cpu
      roll-async eval http://127.0.0.1:8100/v1 --config rlvr_config_async_cpu --key-env TOKEN
    """
    from roll_async.commands.run import ended

    return ended("eval", lambda: _evaluate(_EvalArguments(**given)))  # type: ignore[arg-type]


def _evaluate(arguments: _EvalArguments) -> int:
    """Everything that needs no engine is checked first."""
    from roll_async.cluster.folders import absolute_paths
    from roll_async.config.api import load_with_warnings
    from roll_async.config.schema import RLVRConfig
    from roll_async.config.secrets import with_secrets
    from roll_async.config.user_code import search_beside
    from roll_async.launch.checks.gate import in_checkout
    from roll_async.launch.checks.inputs import resolve_names
    from roll_async.launch.evaluation import for_evaluation
    from roll_async.observe.run_folder import RunFolder

    path, overrides = resolve_config(["--config", arguments.config, *arguments.args], None)
    search_beside(path)
    given = in_checkout(load_with_warnings(path, overrides)).generating
    config = for_evaluation(with_secrets(given, os.environ), None)
    if arguments.is_address and not isinstance(config, RLVRConfig):
        message = "is asked for chats, and worlds need the tokens of a model"
        raise ValueError(f"{arguments.target}: an address {message}; name a model folder or a checkpoint")
    model = None if arguments.is_address else _model_of(arguments.target)
    default = Path(config.output_dir) / "eval" / _name_of(arguments.target)
    _require_inputs(config, model_is_used=arguments.is_address)
    output = output_of(arguments.output, default).absolute()
    config = replace(config, output_dir=str(output.parent), exp_name=output.name)  # trajectories for people go there
    folder = RunFolder(str(output.parent), output.name)
    folder.open_log()
    began_s = time.monotonic()
    with TemporaryDirectory(prefix="model-", dir=output) as converted:
        if arguments.is_address:
            assert isinstance(config, RLVRConfig)
            found = asyncio.run(_address(absolute_paths(resolve_names(config), Path.cwd()), arguments))
        else:
            found_at = arguments.target if model is None else _as_hf(model, Path(converted), config.pretrain)
            of_model = resolve_names(for_evaluation(config, found_at))
            found = _folder(absolute_paths(of_model, Path.cwd()), folder)
    _write(output, arguments, found, seconds=time.monotonic() - began_s)
    _print(found, arguments.target)
    if found.unanswered:
        print(
            f"roll-async eval: no answer of set {', '.join(found.unanswered)} has a score; {output}/run.log says why",
            file=sys.stderr,
        )
        return EXIT_ROLE_FAILED
    return EXIT_FINISHED


def _model_of(target: str) -> Path | None:
    """The Hugging Face or torch_dist folder that a target names; None for a name on a hub. Raises ValueError for what
    is neither.
    """
    from roll_async.checkpoint.folders.find_model import find_model
    from roll_async.launch.checks.inputs import is_hub_name

    folder = Path(target)
    if not folder.is_dir():
        if is_hub_name(target):
            return None
        raise ValueError(f"{target}: no such folder; name a model folder, a checkpoint, or an address (http://...)")
    return find_model(folder)


def _as_hf(model: Path, folder: Path, like: str) -> str:
    """A Hugging Face folder: the model itself, or what it is converted to. In a process of its own, whose memory is
    free before engines start.
    """
    from roll_async.checkpoint.folders.find_model import is_hf, side_files

    if is_hf(model):
        return str(model)
    target = folder / "model"
    # A checkpoint without config.json and tokenizer takes those of the config's model.
    more = ["--like", like] if side_files(model) is None else []
    typed = [sys.executable, "-m", "roll_async.cli", "convert", str(model), str(target), *more]
    done = subprocess.run(typed, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ValueError(f"{model} cannot be converted: {lines[-1].removeprefix('roll-async convert: ')}")
    return str(target)


def _require_inputs(config: PipelineConfig, *, model_is_used: bool) -> None:
    """Raises ValueError for prompt files that are not there, for worlds and tools that do not exist, and for the folder
    of the tokenizer where it is used.
    """
    from roll_async.config.schema import AgenticConfig
    from roll_async.launch.agents import check_agents
    from roll_async.launch.checks.inputs import missing_inputs

    if isinstance(config, AgenticConfig):
        check_agents(config)
    for key, message in missing_inputs(config):
        if key.startswith("validation.") or (key == "pretrain" and model_is_used):
            raise ValueError(f"{key}: {message}")


async def _address(config: RLVRConfig, arguments: _EvalArguments) -> Evaluation:
    from roll_async.inference.endpoint import EndpointOptions
    from roll_async.launch.evaluation import evaluate_address

    options = EndpointOptions(
        url=arguments.target,
        model=arguments.model,
        key_env=arguments.key_env,
        timeout_s=config.async_training.generation_timeout,
        max_concurrent=config.async_training.max_concurrent_per_server,
        max_retries=config.fault.request_retries,
    )
    async with AsyncExitStack() as stack:
        return await evaluate_address(config, options, stack)


def _folder(config: PipelineConfig, folder: RunFolder) -> Evaluation:
    from roll_async.cluster.role_log import role_environment
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.launch.evaluation import evaluate_folder

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    env = role_environment(folder.role_logs())

    async def measured() -> Evaluation:
        async with AsyncExitStack() as stack:
            return await evaluate_folder(config, stack)

    with ray_runtime(num_processes=config.num_servers + 2, env=env):
        return asyncio.run(measured())


def _name_of(target: str) -> str:
    """A folder name for the results of a target."""
    parts = [part for part in target.partition("://")[2].split("/") or [] if part] or list(Path(target).parts)
    named = parts[-2:] if "://" not in target else parts[:1]
    return "-".join(part.replace(":", "_") for part in named if part not in ("/", "..", "."))


def _write(output: Path, arguments: _EvalArguments, found: Evaluation, *, seconds: float) -> None:
    from roll_async.config.secrets import shown_override

    lines = (json.dumps(sample, ensure_ascii=False) for sample in found.samples)
    (output / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    asked = {key: value for key, value in asdict(arguments).items() if key in ("target", "config", "model")}
    results = {
        **asked,
        "overrides": [shown_override(arg) for arg in arguments.args],
        "seconds": round(seconds, 1),
        "sets": found.sets,
    }
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"results and samples in {output}", file=sys.stderr)


def _print(found: Evaluation, title: str) -> None:
    """A table on a terminal, else one number a line."""
    if not sys.stdout.isatty():
        for name, metrics in found.sets.items():
            for key, value in metrics.items():
                print(f"{name}/{key} {value:.6g}")
        return
    draws = sorted({k for m in found.sets.values() for k in m if k.startswith(("avg@", "pass@"))}, key=_by_number)
    columns = [*_COLUMNS, *draws]
    rows = [[name, *(_cell(metrics, column) for column in columns)] for name, metrics in found.sets.items()]
    print_table(["set", *columns], rows, title)


def _by_number(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("@")
    return kind, int(number)  # as a number: avg@8 before avg@16


def _cell(metrics: Mapping[str, float], column: str) -> str:
    value = metrics.get(column)
    return "-" if value is None else f"{value:.4g}"
