"""Checks of GPUs, of their driver, and of the CUDA that torch was built for. Nothing of torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from roll_async.commands.doctor.findings import Finding, Level
from roll_async.config.versions import installed_release
from roll_async.observe.machine import gpus_here

_ASKED = "name,memory.total,memory.used,driver_version,compute_cap"
_ANSWERS_WITHIN_S = 3.0
_BF16, _FP8 = 8.0, 8.9
"""Compute capability from which a GPU multiplies these."""
_DRIVERS = {12: 525.60, 13: 580.65}
"""First driver of each CUDA."""
_USED_MIB = 1024
"""Of a GPU, from which another process is said to use it."""


def nvidia_smi(*arguments: str) -> str:
    """What the driver's program answers. Raises OSError where there is none, SubprocessError where it fails."""
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWERS_WITHIN_S).stdout


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
        answer = ask(f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits")
        rows = [re.split(r", *", row) for row in answer.splitlines()]
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "look at what nvidia-smi says; start a container with docker run --gpus all"
        yield Finding(Level.PROBLEM, "GPUs", f"devices are here, and nvidia-smi does not answer: {error}", remedy)
        return
    for (name, total, driver, capability), count in Counter((r[0], r[1], r[3], r[4]) for r in rows).items():
        bf16, fp8 = (float(capability) >= least for least in (_BF16, _FP8))
        can = f"bf16 {'yes' if bf16 else 'no'}, fp8 {'yes' if fp8 else 'no'}"
        said = f"{count} x {name}, {int(total) / 1024:.3g} GiB, driver {driver}, capability {capability}: {can}"
        remedy = "" if bf16 else "set model_args.dtype of every role to fp16 or fp32"
        yield Finding(Level.OK if bf16 else Level.WARN, "GPUs", said, remedy)
    busy = [f"{i}: {int(row[2]) / 1024:.3g} GiB" for i, row in enumerate(rows) if int(row[2]) > _USED_MIB]
    if busy:
        yield Finding(Level.WARN, "GPU memory", f"in use already, {', '.join(busy)}", "end what nvidia-smi lists")
    yield from _visible(env.get("CUDA_VISIBLE_DEVICES"), len(rows), lambda: ask("-L"))
    yield from _cuda(float(re.match(r"\d+(\.\d+)?", rows[0][3])[0]), (torch_cuda or cuda_of_torch)())  # type: ignore[index]


def _visible(chosen: str | None, count: int, listed: Callable[[], str]) -> Iterator[Finding]:
    """CUDA counts devices up to the first entry that it does not know."""
    if chosen is None:
        return
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if not names:
        remedy = "unset it for a run on GPUs"
        yield Finding(Level.WARN, "CUDA_VISIBLE_DEVICES", "is empty: no process sees a GPU", remedy)
        return
    known = re.findall(r"UUID: ([^)]+)\)", listed()) if not all(map(str.isdigit, names)) else []
    wrong = [n for n in names if not (int(n) < count if n.isdigit() else any(uuid.startswith(n) for uuid in known))]
    if wrong:
        said = f"{', '.join(wrong)} is none of the {count} GPUs here, and those after it are not seen either"
        yield Finding(Level.PROBLEM, "CUDA_VISIBLE_DEVICES", said, "use numbers, or names that nvidia-smi -L lists")
    else:
        yield Finding(Level.OK, "CUDA_VISIBLE_DEVICES", f"{len(names)} of {count} GPUs")


def _cuda(driver: float, built_for: str | None) -> Iterator[Finding]:
    if built_for is None:
        remedy = "pip install --force-reinstall torch, in a build for CUDA"
        yield Finding(Level.PROBLEM, "CUDA", "torch is a build for the CPU, and here are GPUs", remedy)
        return
    least = _DRIVERS.get(int(built_for.partition(".")[0]))
    if least is not None and driver < least:
        remedy = f"update the driver to {least} or newer, or install torch for an older CUDA"
        yield Finding(Level.PROBLEM, "CUDA", f"torch wants CUDA {built_for}, the driver {driver} is older", remedy)
    else:
        yield Finding(Level.OK, "CUDA", f"torch is built for {built_for}")
    names = [f"nvidia-nccl-cu{cuda}" for cuda in _DRIVERS]
    nccl = [f"{name} {release}" for name in names if (release := installed_release(name)) is not None]
    remedy = "" if nccl else "pip install the nvidia-nccl of torch's CUDA; builds from source may hold their own"
    yield Finding(Level.OK if nccl else Level.WARN, "NCCL", ", ".join(nccl) or "no package of it", remedy)


def cuda_of_torch(folders: Sequence[str] | None = None) -> str | None:
    """The CUDA that the installed torch was built for, as its file says; None for a build for the CPU."""
    spec = find_spec("torch") if folders is None else None
    for folder in folders or (spec.submodule_search_locations if spec is not None else None) or ():
        match = re.search(r"^cuda\b.*?=\s*'([\d.]+)'", (Path(folder) / "version.py").read_text(), re.M)
        return match[1] if match else None
    return None
