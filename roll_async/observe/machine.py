"""What a run uses of its machine: peak memory of processes, from Linux; how busy its GPUs are and how much of their
memory is used, from NVIDIA's management library.

The library (`pip install nvidia-ml-py`) is optional: without it, or without a GPU, nothing is published of GPUs.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_PROC = Path("/proc")
_EVERY_S = 0.5


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


class Nvml(Protocol):
    """The calls of `pynvml` that are used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...


class Gpus:
    """Asks for the utilisation of some GPUs every half second, in a thread of its own; means since the last question.
    NVML's figure is the share of time in which any kernel ran, not how much of the GPU it used.
    """

    def __init__(self, nvml: Nvml, indexes: Sequence[int] | None = None) -> None:
        """`indexes`: as NVML counts them; None = all of the machine. Raises the library's error where there is none."""
        nvml.nvmlInit()
        self._nvml = nvml
        chosen = range(nvml.nvmlDeviceGetCount()) if indexes is None else indexes
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in chosen}
        self._lock = threading.Lock()  # the thread adds to the sums that `metrics` resets
        self._sums: dict[int, float] = dict.fromkeys(self._handles, 0.0)
        self._peaks: dict[int, int] = dict.fromkeys(self._handles, 0)
        self._count = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(target=self._run, name="gpu utilisation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):  # a sleep that `close` ends at once
            self.sample()

    def sample(self) -> None:
        """Ask once."""
        try:
            # NVML tells it in percent.
            busy = {
                i: self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for i, handle in self._handles.items()
            }
            used = {i: self._nvml.nvmlDeviceGetMemoryInfo(handle).used for i, handle in self._handles.items()}
        except self._nvml.NVMLError as error:
            logger.warning("the GPUs do not tell how busy they are: %s", error)
            self._ended.set()  # one warning, not one every half second
            return
        with self._lock:
            self._count += 1
            for index, share in busy.items():
                self._sums[index] += share
                self._peaks[index] = max(self._peaks[index], used[index])

    def metrics(self) -> dict[str, float]:
        """Since the call before; nothing without a sample."""
        with self._lock:
            count, sums = self._count, dict(self._sums)
            self._count, self._sums = 0, dict.fromkeys(self._handles, 0.0)
            peaks = dict(self._peaks)  # not reset: peaks are of the whole run
        if not count or not sums:
            return {}
        means = {index: total / count for index, total in sums.items()}
        return {
            "gpu/utilisation": sum(means.values()) / len(means),
            **{f"gpu/{index}/utilisation": mean for index, mean in means.items()},
            **{f"gpu/{index}/peak_memory_bytes": float(peak) for index, peak in peaks.items()},
        }

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


def gpus_here(devices: Path = Path("/dev")) -> int | None:
    """NVIDIA devices that this process may use; None: only Ray can count what is here (AMD's, those of WSL)."""
    if (devices / "kfd").exists() or (devices / "dxg").exists():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(entry.name.removeprefix("nvidia").isdigit() for entry in devices.glob("nvidia[0-9]*"))
    return there if visible is None else min(there, len([x for x in visible.split(",") if x.strip()]))


def gpus_of_machine() -> Gpus | None:
    """Those of this machine, asked from now on; None without GPUs or without the library."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        gpus = Gpus(pynvml)  # pyright: ignore[reportArgumentType]  # a module, whose names it does not see
    except pynvml.NVMLError:
        return None
    gpus.start()
    return gpus
