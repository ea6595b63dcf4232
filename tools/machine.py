"""What a measured figure depends on besides the code: the first line that a script of `tools/bench/` prints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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


_LOOP = """
import sys, time
import torch
torch.set_num_threads(1)
a = torch.randn(256, 256)
for _ in range(50): a @ a
print("ready", flush=True)
sys.stdin.readline()
started, n = time.perf_counter(), 0
while time.perf_counter() - started < 2.0:
    a @ a
    n += 1
print(n, flush=True)
"""


def busy_core() -> float:
    """What one of two busy cores does of what it does alone: rates of a loop of matrix products in its cache, in two
    processes at once and in one. 1 where cores share nothing; what a program makes of two cores at once is at most
    about so much of what it makes of each in turn.
    """

    def rate(number: int) -> float:
        command = [sys.executable, "-c", _LOOP]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        loops = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            for _ in range(number)
        ]
        for loop in loops:
            assert loop.stdout is not None and loop.stdout.readline() == "ready\n"
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write("\n")
            loop.stdin.flush()
        return sum(float(loop.communicate()[0]) for loop in loops) / number

    return round(rate(2) / rate(1), 3)
