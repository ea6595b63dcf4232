"""What a process gives up before it touches text of a model. Linux: Landlock (files), seccomp (network, processes,
signals, the machine), no capabilities, resource limits. None of it needs a privilege, and none can be taken back.

Landlock needs kernel 5.13. Elsewhere (macOS, older kernels) only the resource limits are there; `missing` says so and
the caller decides. This module imports nothing of the package: it runs in processes that have nothing else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass

from roll_async.rewards.sandbox import seccomp

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every processor
_READ = (1 << 2) | (1 << 3)  # files, folders
_FILE_ONLY = (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)  # write, read, truncate, ioctl: rights a plain file can have
_WRITE = _READ | (1 << 1) | 0x1FF0 | (1 << 14)  # and write, remove, make everything, truncate
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NETWORK, _SCOPES = 0b11, 0b11  # bind and connect TCP (ABI 4); abstract sockets and signals (ABI 6)
_SYSTEM_READS = (
    "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
    "/dev/urandom", "/dev/random", "/dev/zero",
)  # fmt: skip
_DEVICES = ("/dev/null",)
_PR_SET_PDEATHSIG = 1
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """What stays allowed. Limits of None leave the process as it is."""

    read: tuple[str, ...]
    """Folders and files, besides Python's own and the system's libraries."""
    write: tuple[str, ...]
    cpu_s: int | None = None
    memory_bytes: int | None = None
    """Address space, so that an allocation fails before the host feels it."""
    file_bytes: int | None = None
    open_files: int | None = None


def missing() -> str:
    """Why this machine cannot confine a process; empty when it can."""
    if sys.platform != "linux":
        return f"{sys.platform} has neither Landlock nor seccomp: files, network and processes are not closed"
    if not seccomp.supported():
        return f"no seccomp table for {os.uname().machine}"
    if _landlock_abi() < 1:
        return "this kernel has no Landlock (Linux 5.13, enabled in its security modules): files are not closed"
    return ""


def confine(rights: Confinement) -> None:
    """Give up everything else, for good; call it while the process has one thread. Where `missing` is not empty only
    the resource limits take effect. Raises OSError when the kernel refuses a step it should know.
    """
    _limit(rights)
    if missing():
        return
    _drop_capabilities()
    _no_new_privileges()
    _landlock(rights)
    seccomp.install(own_pid=os.getpid())


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when its parent ends, however that happens (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def limit_memory(num_bytes: int) -> None:
    """Bound the address space and write no core files. macOS knows no such bound."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit(rights: Confinement) -> None:
    if rights.memory_bytes is not None:
        limit_memory(rights.memory_bytes)
    for kind, limit in (
        (resource.RLIMIT_CPU, rights.cpu_s),
        (resource.RLIMIT_FSIZE, rights.file_bytes),
        (resource.RLIMIT_NOFILE, rights.open_files),
    ):
        if limit is not None:
            resource.setrlimit(kind, (limit, limit))


def _drop_capabilities() -> None:
    """Root without capabilities cannot raise its limits again, nor ignore the modes of files."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _call(_CAPSET[os.uname().machine], header, bytes(24))  # effective, permitted, inheritable, 2 * 32 bits each: none


def _no_new_privileges() -> None:
    # 38 = PR_SET_NO_NEW_PRIVS, which Landlock and seccomp demand of a process without privileges.
    if ctypes.CDLL(None, use_errno=True).prctl(38, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


def _landlock(rights: Confinement) -> None:
    abi = _landlock_abi()
    known = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    # Rights on files, on TCP (ABI 4), scopes (ABI 6): an older kernel knows only the first ones.
    attributes = struct.pack("=QQQ", known, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = _call(_LANDLOCK_CREATE, attributes, size, 0)
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    for path in (*python, *_SYSTEM_READS, *rights.read):
        _allow(rules, path, _READ & known)
    for path in _DEVICES:
        _allow(rules, path, (_READ | 0b10) & known)
    for path in rights.write:
        _allow(rules, path, _WRITE & known)
    _call(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    """Paths that are not there are left out: there is nothing to allow."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            access &= _FILE_ONLY  # the kernel refuses rights of folders for a file
        # 1 = LANDLOCK_RULE_PATH_BENEATH; its structure is packed: u64, s32.
        _call(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


def _landlock_abi() -> int:
    """Version of Landlock; below 1 = none."""
    # Flag 1 asks for the version and makes nothing.
    return ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)


def _call(number: int, *arguments: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return result
