"""What a measured figure depends on besides the code: the first line that a script of `tools/bench/` prints."""

from __future__ import annotations

import argparse
import json
import os
from importlib import metadata

from roll_async.config.processor import cpuinfo, flags, multiplies_bf16, properties

_VECTORS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")


def machine_line(args: argparse.Namespace) -> str:
    """The first line of a measurement, JSON: processor, cores, load and settings."""
    known = flags(cpuinfo())
    line = {
        "name": "machine",
        "cpu": properties(cpuinfo()).get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vectors": [name for name in _VECTORS if name in known],
        "bf16": "native" if multiplies_bf16() else "emulated",
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": metadata.version("torch"),
        "settings": {name: value for name, value in vars(args).items() if not callable(value)},
    }
    return json.dumps(line, default=str)
