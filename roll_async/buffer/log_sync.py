"""One call of the disk makes durable what many have written: a group commit.

A call takes milliseconds, on a file system of the network tens of them, and a driver's event loop has replies of
thousands of requests to read meanwhile. So it runs in a thread, and whoever writes while it runs shares the next one.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

LIMIT_S = 300.0
"""Of a wait for the disk."""


class LogSync:
    """The disk's calls for one file, which stays open from here to `close`: errors of the disk are told to open files
    only.
    """

    def __init__(self, path: Path) -> None:
        self._handle: int | None = os.open(path, os.O_RDONLY)  # enough for `fsync` on Linux
        self._under_way: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def reached(self) -> None:
        """Return when everything that was written before this call is on the disk. Raises OSError when it is not."""
        if self._next is None:  # the call under way may have begun before the write
            self._next = asyncio.create_task(self._after(self._under_way), name="ledger to the disk")
        try:
            async with asyncio.timeout(LIMIT_S):
                await asyncio.shield(self._next)  # shared: one caller's cancellation must not end it for the others
        except TimeoutError:
            raise TimeoutError(f"the disk has not answered for {LIMIT_S:g} s") from None

    async def _after(self, under_way: asyncio.Task[None] | None) -> None:
        if under_way is not None:
            await asyncio.wait({under_way})  # `wait` does not raise: its error is for those who wait for that call
        self._under_way, self._next = self._next, None  # who writes from now on needs another call
        if self._handle is not None:
            await asyncio.to_thread(_sync, os.dup(self._handle))

    def close(self) -> None:
        """Whoever closes the file has made it durable. A call under way has a handle of its own."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
