"""Checks of this machine: processors, memory, shared memory, files, disk, network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from roll_async.cluster.address import require_cluster
from roll_async.commands.doctor.findings import Finding, Level
from roll_async.observe.disk import remedied

GIB = 1 << 30
_LEAST_MEMORY, _LEAST_DISK, _FULL_DISK = 6 * GIB, 20 * GIB, 1 * GIB
_LEAST_SHM, _NO_SHM = 4 * GIB, 256 << 20
"""Containers get 64 MiB unless they are told otherwise."""
_LEAST_FILES = 4096
_CLUSTER_WITHIN_S = 2.0
_CGROUP = Path("/sys/fs/cgroup")
FreeBytes = Callable[[Path], int]


def total_and_free() -> tuple[int, int]:
    """Bytes of the machine's memory."""
    found = psutil.virtual_memory()
    return found.total, found.available


def free_bytes_of(folder: Path) -> int:
    """Of the disk that a folder is on."""
    return shutil.disk_usage(folder).free


def processors(cgroup: Path = _CGROUP) -> Iterator[Finding]:
    """Cores, and what a container may use of them."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup)
    if quota is not None and quota < cores:
        said = f"{cores} cores are seen, {quota:g} may be used (cgroup)"
        remedy = f"give the container more, or set OMP_NUM_THREADS={max(1, int(quota))}: libraries count the cores"
        yield Finding(Level.WARN, "CPUs", said, remedy)
    else:
        yield Finding(Level.OK, "CPUs", f"{cores} cores of {os.cpu_count()}")


def memory(cgroup: Path = _CGROUP, of_machine: Callable[[], tuple[int, int]] = total_and_free) -> Iterator[Finding]:
    """What processes may use; the least of machine and container."""
    total, free = of_machine()
    limit = _number(cgroup / "memory.max") or _number(cgroup / "memory" / "memory.limit_in_bytes")
    said = f"{_gib(free)} free of {_gib(total)}"
    if limit is not None and limit < total:
        free, said = min(free, limit), f"{said}, the container may have {_gib(limit)}"
    if free < _LEAST_MEMORY:
        yield Finding(Level.WARN, "memory", said, "end other programs, or raise the limit of the container")
    else:
        yield Finding(Level.OK, "memory", said)


def cpu_quota(cgroup: Path) -> float | None:
    """Cores that a cgroup (v2 or v1) grants; None without a limit."""
    if (cgroup / "cpu.max").is_file():
        quota, _, period = (cgroup / "cpu.max").read_text().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = (_number(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _number(file: Path) -> int | None:
    """None where there is no such file, or no number (`max`) in it."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.lstrip("-").isdigit() else None


def shared_memory(folder: Path = Path("/dev/shm"), free_bytes: FreeBytes = free_bytes_of) -> Iterator[Finding]:
    """Room for weights on their way to engines of the same host, and for NCCL, Gloo and Ray."""
    remedy = "enlarge it: docker run --shm-size=16g, in Kubernetes an emptyDir with medium: Memory"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(Level.PROBLEM, str(folder), "is not there, or cannot be written to", "mount a tmpfs there")
        return
    free = free_bytes(folder)
    said = f"{_gib(free)} free"
    if free < _NO_SHM:
        yield Finding(Level.PROBLEM, str(folder), f"{said}: processes end with a bus error when it is full", remedy)
    elif free < _LEAST_SHM:
        yield Finding(Level.WARN, str(folder), f"{said}; it should hold one copy of the weights", remedy)
    else:
        yield Finding(Level.OK, str(folder), said)


def open_files(limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """`limits`: (soft, hard)."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        yield Finding(Level.OK, "open files", f"at most {soft}")
        return
    high = hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES
    remedy = "ulimit -n 65536" if high else "raise nofile in limits.conf, or docker run --ulimit nofile=65536"
    yield Finding(Level.WARN, "open files", f"at most {soft}: roles and their connections take more", remedy)


def disk(folder: Path, free_bytes: FreeBytes = free_bytes_of) -> Iterator[Finding]:
    """Whether output can be written below a folder, and how much."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding(Level.PROBLEM, "output", f"cannot write to {there}", remedied(error))
    free = free_bytes(there)
    said, remedy = f"{_gib(free)} free in {there}", "make room, or set output_dir to a larger disk"
    if free < _LEAST_DISK:
        full = free < _FULL_DISK
        remedy = f"{remedy}: a checkpoint takes about 14 bytes a parameter"
        yield Finding(Level.PROBLEM if full else Level.WARN, "disk", said, remedy)
    else:
        yield Finding(Level.OK, "disk", said)


def loopback(address: str = "127.0.0.1") -> Iterator[Finding]:
    """Roles of one machine talk to one another on ports that the system picks."""
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), timeout=2.0):
            yield Finding(Level.OK, "loopback", f"a free port of {address} accepts a connection")
    except OSError as error:
        remedy = "bring the interface lo up; a firewall or a sandbox may forbid it"
        yield Finding(Level.PROBLEM, "loopback", f"no connection on {address}: {error.strerror or error}", remedy)


def ray_cluster(env: Mapping[str, str] = os.environ, within_s: float = _CLUSTER_WITHIN_S) -> Iterator[Finding]:
    """Whether the cluster answers that a run would join. Its host is not told: issues are public."""
    address = env.get("RAY_ADDRESS")
    if not address:
        yield Finding(Level.OK, "Ray", "RAY_ADDRESS is not set: a run starts Ray on this machine")
        return
    try:
        require_cluster(address, within_s)
        yield Finding(Level.OK, "Ray", "something answers at RAY_ADDRESS")
    except ValueError as error:
        said, _, remedy = str(error).replace(address, "...").partition("; ")
        yield Finding(Level.PROBLEM, "Ray", said, remedy or "unset RAY_ADDRESS to run on this machine")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
