"""The processes of an engine: they end with the process that started them.

The next start waits until their device memory is free.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait

import psutil

_OWNER = "ROLL_ASYNC_ENGINE_OWNER"
_LOOK_AGAIN_S = 0.2
_KILL_AFTER_S = 10.0

ProcessId = tuple[int, float]
"""Process id and creation time in seconds, because ids are reused."""


def own_children() -> None:
    """Call it in the process of the replica before the library starts others; they call `end_with_owner`."""
    os.environ[_OWNER] = str(os.getpid())


def end_with_owner() -> None:
    """In a worker process: end when the replica's process has ended, however that was, and end the process between the
    two as well. Libraries notice it only at their next message, which may never be sent.
    """
    owner, parent = int(os.environ.get(_OWNER, os.getpid())), os.getppid()
    # The engine's core shares the replica's process, and ends with it anyway.
    if owner == os.getpid():
        return
    try:
        # Not its number, which may be another process's by the time that it is looked at.
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def follow() -> None:
        wait([watched])  # not `select`, which knows the first 1,024 descriptors only
        if parent != owner and os.getppid() == parent:  # still the parent, so its number was not given away
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
        os._exit(1)  # sys.exit would end this thread alone

    # A daemon: a worker that ends by itself does not wait for its owner.
    threading.Thread(target=follow, name="end with owner", daemon=True).start()


def process_ids() -> tuple[ProcessId, ...]:
    """This process and all of its descendants."""
    me = psutil.Process()
    return tuple((p.pid, p.create_time()) for p in [me, *me.children(recursive=True)])


async def until_gone(processes: Sequence[ProcessId], timeout_s: float) -> None:
    """Wait until none of these runs, and with it holds no memory of a device. What has not ended after ten seconds is
    killed. Raises RuntimeError with the ids of those that are left.
    """
    loop = asyncio.get_running_loop()
    started, killed = loop.time(), False
    while left := [p for p in processes if _runs(p)]:
        waited = loop.time() - started
        if waited > timeout_s:
            ids = ", ".join(str(pid) for pid, _ in left)
            raise RuntimeError(f"processes {ids} of the replica that died still run and hold its memory; end them")
        if waited > _KILL_AFTER_S and not killed:
            killed = True
            for pid, _ in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_LOOK_AGAIN_S)


def _runs(process: ProcessId) -> bool:
    pid, created = process
    try:
        found = psutil.Process(pid)
        # A zombie holds no memory, and its parent may never ask for its status.
        return abs(found.create_time() - created) < 1 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
