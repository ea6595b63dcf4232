"""One line about a run whose devices are not on this machine: all that it needs, and how to get each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from roll_async.cluster.placement import gpu_nodes, shortage
from roll_async.cluster.runtime import pretended_gpus
from roll_async.config.schema import PipelineConfig, RLVRConfig
from roll_async.launch.checks.devices import cards_here, device_problem
from roll_async.launch.checks.inputs import is_hub_name, missing_inputs, models_of
from roll_async.launch.checks.packages import missing_packages
from roll_async.launch.roles import processes_of


def needs_elsewhere(config: PipelineConfig) -> str | None:
    """What a run needs whose devices this machine does not have, or cannot use; None where it has them, or where Ray is
    to say so: another cluster is joined, or GPUs are pretended.
    """
    if os.environ.get("RAY_ADDRESS") or pretended_gpus():
        return None
    there = gpus_here()
    if there is None:
        return None
    # What is wrong with the names of devices explains a lack of them.
    problem = device_problem(config, cards_here(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda)
    lacking = shortage(gpu_nodes(processes_of(config)), [there])
    if problem is not None or lacking is None:
        return problem
    needs = "; ".join([*_models(config), *_rest(config), f"{_devices(lacking)} (RAY_ADDRESS=HOST:6379 of a cluster)"])
    here = "; or see it run on the CPU here, on the demo's model and data: --device cpu"
    return f"the run needs {needs}{here if isinstance(config, RLVRConfig) else ''}"


def gpus_here(devices: Path = Path("/dev")) -> int | None:
    """NVIDIA devices that this process may use; None: only Ray can count what is here (AMD's, those of WSL)."""
    if (devices / "kfd").exists() or (devices / "dxg").exists():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(entry.name.removeprefix("nvidia").isdigit() for entry in devices.glob("nvidia[0-9]*"))
    return there if visible is None else min(there, len([x for x in visible.split(",") if x.strip()]))


def _models(config: PipelineConfig) -> Iterator[str]:
    for key, model in models_of(config).items():
        if is_hub_name(model) and not model.startswith("modelscope://"):  # `hf` fetches none of ModelScope's
            yield f"model {model} (hf download {model}, or {key}=FOLDER)"


def _rest(config: PipelineConfig) -> Iterator[str]:
    """What is said elsewhere in a line each."""
    for key, message in [*missing_inputs(config), *missing_packages(config)]:
        yield f"{key}: {message}"


def _devices(lacking: str) -> str:
    wanted, _, there = lacking.removeprefix("device_mapping needs ").partition(", and Ray has ")
    return f"{wanted}, here: {there}"
