"""Peak memory of processes, from Linux."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_PROC = Path("/proc")


def peak_bytes_of_self() -> int:
    """Largest resident set that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux tells it in KiB


def peak_bytes(proc: Path = _PROC, pid: int | None = None) -> int:
    """Largest resident set that a process and its living descendants have had, each at its own time, added up: an
    engine's core and ranks are processes of their own. 0 where the system does not tell.
    """
    total, open_pids = 0, [os.getpid() if pid is None else pid]
    while open_pids:
        folder = proc / str(open_pids.pop())
        try:
            status = (folder / "status").read_text()
            for task in (folder / "task").iterdir():  # children are listed under the thread that made them
                open_pids += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it ended meanwhile, or the system has no such files
            continue
        line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        total += 1024 * int(line.split()[1])  # what /proc calls kB are KiB
    return total
