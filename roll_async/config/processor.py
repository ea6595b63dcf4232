"""What the processor of this machine computes by itself, and what a measured figure depends on besides the code."""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from importlib import metadata
from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As Linux names the instructions of x86 (AVX-512 BF16, AMX) and of Arm for products of bfloat16."""
_VECTORS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for bfloat16 products. Without them they are emulated, and slower than
    float32. False where the system does not tell.
    """
    return not _BF16_FLAGS.isdisjoint(flags(_told()))


def flags(cpuinfo: str) -> list[str]:
    """The instructions of the first processor in the text of /proc/cpuinfo."""
    told = _fields(cpuinfo)
    return told.get("flags", told.get("Features", "")).split()


def machine_line(args: argparse.Namespace) -> str:
    """The first line of a measurement, JSON: processor, cores, load and settings."""
    known = flags(_told())
    line = {
        "name": "machine",
        "cpu": _fields(_told()).get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vectors": [name for name in _VECTORS if name in known],
        "bf16": "native" if multiplies_bf16() else "emulated",
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": metadata.version("torch"),
        "settings": {name: value for name, value in vars(args).items() if not callable(value)},
    }
    return json.dumps(line, default=str)


@cache
def _told() -> str:
    """/proc/cpuinfo; empty where the system has none."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _fields(cpuinfo: str) -> dict[str, str]:
    lines = cpuinfo.strip().partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
