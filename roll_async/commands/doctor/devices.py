"""Checks of GPUs, of their driver, and of the CUDA that torch was built for. Nothing of torch is imported."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from roll_async.commands.doctor.findings import Finding, Level
from roll_async.config.versions import installed_release
from roll_async.launch.checks.devices import OLDEST_DRIVER, Card, cards_of, cuda_of_torch, nvidia_smi, seen_devices
from roll_async.observe.machine import gpus_here


def gpus(
    ask: Callable[..., str] = nvidia_smi,
    devices: Path = Path("/dev"),
    env: Mapping[str, str] = os.environ,
    torch_cuda: Callable[[], str | None] | None = None,
) -> Iterator[Finding]:
    """The GPUs of this machine, what they can do, and whether torch and the driver fit them."""
    there = any(entry.name.removeprefix("nvidia").isdigit() for entry in devices.glob("nvidia[0-9]*"))
    if not there:
        said = "none of NVIDIA's: runs are on the CPU"
        yield Finding(Level.OK, "GPUs", said if gpus_here(devices) == 0 else "not NVIDIA's: only Ray counts them")
        return
    try:
        cards = cards_of(ask)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        remedy = "look at what nvidia-smi says; start a container with docker run --gpus all"
        yield Finding(
            Level.PROBLEM, "GPUs", f"devices are here, and nvidia-smi does not describe them: {error}", remedy
        )
        return
    alike = Counter((c.name, c.total_mib, c.driver, c.capability, c.computes_bf16, c.computes_fp8) for c in cards)
    for (name, total, driver, capability, bf16, fp8), count in alike.items():
        can = f"bf16 {'yes' if bf16 else 'no'}, fp8 {'yes' if fp8 else 'no'}"
        said = f"{count} x {name}, {total / 1024:.3g} GiB, driver {driver}, capability {capability}: {can}"
        remedy = "" if bf16 else "set model_args.dtype of every role to fp16 or fp32"
        yield Finding(Level.OK if bf16 else Level.WARN, "GPUs", said, remedy)
    busy = [f"{card.index}: {card.used_mib / 1024:.3g} GiB" for card in cards if card.is_used]
    if busy:
        yield Finding(Level.WARN, "GPU memory", f"in use already, {', '.join(busy)}", "end what nvidia-smi lists")
    yield from _visible(cards, env.get("CUDA_VISIBLE_DEVICES"))
    yield from _cuda(cards[0], (torch_cuda or cuda_of_torch)())


def _visible(cards: list[Card], chosen: str | None) -> Iterator[Finding]:
    if chosen is None:
        return
    seen = seen_devices(cards, chosen)
    if isinstance(seen, str):
        level = Level.PROBLEM if chosen.strip() else Level.WARN
        yield Finding(level, "CUDA_VISIBLE_DEVICES", seen, "use numbers, or names that nvidia-smi -L lists")
    else:
        yield Finding(Level.OK, "CUDA_VISIBLE_DEVICES", f"{len(seen)} of {len(cards)} GPUs")


def _cuda(card: Card, built_for: str | None) -> Iterator[Finding]:
    if built_for is None:
        remedy = "pip install --force-reinstall torch, in a build for CUDA"
        yield Finding(Level.PROBLEM, "CUDA", "torch is a build for the CPU, and here are GPUs", remedy)
        return
    if (least := card.too_old_for(built_for)) is not None:
        remedy = f"update the driver to {least} or newer, or install torch for an older CUDA"
        yield Finding(Level.PROBLEM, "CUDA", f"torch wants CUDA {built_for}, the driver {card.driver} is older", remedy)
    else:
        yield Finding(Level.OK, "CUDA", f"torch is built for {built_for}")
    names = [f"nvidia-nccl-cu{cuda}" for cuda in OLDEST_DRIVER]
    nccl = [f"{name} {release}" for name in names if (release := installed_release(name)) is not None]
    remedy = "" if nccl else "pip install the nvidia-nccl of torch's CUDA; builds from source may hold their own"
    yield Finding(Level.OK if nccl else Level.WARN, "NCCL", ", ".join(nccl) or "no package of it", remedy)
