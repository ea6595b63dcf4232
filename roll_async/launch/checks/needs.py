"""One line about a run whose devices are not on this machine: all that it needs, and how to get each."""

from __future__ import annotations

import os
from collections.abc import Iterator

from roll_async.cluster.placement import gpu_nodes, pretended_gpus, processes_of, shortage
from roll_async.config.schema import RLVRConfig, RunConfig
from roll_async.launch.checks.devices import cards_here, device_problem
from roll_async.launch.checks.inputs import is_hub_name, missing_inputs, models_of
from roll_async.launch.checks.packages import missing_packages
from roll_async.observe.machine import gpus_here


def needs_elsewhere(config: RunConfig) -> str | None:
    """What a run needs whose devices this machine does not have, or cannot use; None where it has them, or where Ray is
    to say so: another cluster is joined, or GPUs are pretended.
    """
    if os.environ.get("RAY_ADDRESS") or pretended_gpus():
        return None
    there = gpus_here()
    if there is None:
        return None
    # What is wrong with the names of devices explains a lack of them.
    cards = cards_here() if any(role.device_mapping for _, role in config.roles()) else []
    problem = device_problem(config, cards, os.environ.get("CUDA_VISIBLE_DEVICES"), _cuda() if cards else None)
    lacking = shortage(gpu_nodes(processes_of(config)), [there])
    if problem is not None or lacking is None:
        return problem
    needs = "; ".join([*_models(config), *_rest(config), f"{_devices(lacking)} (RAY_ADDRESS=HOST:6379 of a cluster)"])
    here = "; or see it run on the CPU here, on the demo's model and data: --device cpu"
    return f"the run needs {needs}{here if isinstance(config, RLVRConfig) else ''}"


def _cuda() -> str | None:
    """The version that torch was built with."""
    import torch  # seconds, which only a run on devices of this machine waits

    return torch.version.cuda


def _models(config: RunConfig) -> Iterator[str]:
    for key, model in models_of(config).items():
        if is_hub_name(model) and not model.startswith("modelscope://"):  # `hf` fetches none of ModelScope's
            yield f"model {model} (hf download {model}, or {key}=FOLDER)"


def _rest(config: RunConfig) -> Iterator[str]:
    """What is said elsewhere in a line each."""
    for key, message in [*missing_inputs(config), *missing_packages(config)]:
        yield f"{key}: {message}"


def _devices(lacking: str) -> str:
    wanted, _, there = lacking.removeprefix("device_mapping needs ").partition(", and Ray has ")
    return f"{wanted}, here: {there}"
