"""Where a pool gets its workers from.

    Template   one process imports and warms up once; each worker is a fork of it, there in milliseconds   (our rules)
    Spawner    each worker is a process of its own, one started ahead of need                              (the rest)

A user's reward may hold threads, devices and files that a fork would break; a rule holds none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import suppress
from typing import Protocol

from roll_async.rewards.worker_process import (
    START_TIMEOUT_S,
    JudgeWorker,
    Process,
    WorkerOptions,
    start_python,
    worker_behind,
)


class Launcher(Protocol):
    """Where a pool gets its workers from."""

    async def start_worker(self) -> JudgeWorker:
        """A worker that is ready. Raises RuntimeError with the reason when none can be started."""
        ...

    async def close(self) -> None:
        """After the workers were stopped."""
        ...


class Spawner:
    """Workers of their own, started one ahead: the imports of a replacement are waited for by nobody."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._spare: asyncio.Task[JudgeWorker] | None = None
        self._kept: set[asyncio.Task[JudgeWorker]] = set()
        """Workers that nobody has yet. One that is ready in the moment in which its caller is cancelled stays here."""

    async def start_worker(self) -> JudgeWorker:
        task, self._spare = self._spare or self._start_soon(), None
        try:
            worker = await asyncio.shield(task)
        except (RuntimeError, OSError):
            self._kept.discard(task)
            raise
        self._kept.discard(task)
        if self._spare is None:
            self._spare = self._start_soon()
        return worker

    async def close(self) -> None:
        self._spare = None
        for task in self._kept:
            task.cancel()
        for task in self._kept:
            with suppress(asyncio.CancelledError, RuntimeError, OSError):
                await (await task).stop()
        self._kept.clear()

    def _start_soon(self) -> asyncio.Task[JudgeWorker]:
        task = asyncio.create_task(self._start(), name=f"worker of {self._options.reward}")
        self._kept.add(task)
        return task

    async def _start(self) -> JudgeWorker:
        return await worker_behind(self._launch)

    async def _launch(self, end: socket.socket) -> Process:
        return _Spawned(await start_python(self._options, end, fork=False))


class _Spawned:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def kill(self) -> None:
        """End the process and everything it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()


class Template:
    """One warm process that forks a worker whenever one is asked for. It reaps them when told to, never on its own, so
    a worker's number means that worker until it was reaped. Started when first used, again when it ended.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._control: socket.socket | None = None
        self._generation = 0
        self._asking = asyncio.Lock()

    async def start_worker(self) -> JudgeWorker:
        return await worker_behind(self._launch)

    async def close(self) -> None:
        async with self._asking:
            await self._end()

    def owns(self, generation: int) -> bool:
        """Whether a number given in this generation still means the worker that it was given to."""
        return generation == self._generation and self._process.returncode is None

    async def reap(self, pid: int, generation: int) -> int:
        """Exit status of a worker that ended or was killed; that of a kill when the template ended, and it with it."""
        try:
            return int(await self._ask(b"%d" % pid)) if self.owns(generation) else -signal.SIGKILL
        except RuntimeError:
            return -signal.SIGKILL

    async def _launch(self, end: socket.socket) -> Process:
        return _Forked(self, int(await self._ask(b"fork", end)), self._generation)

    async def _ask(self, message: bytes, end: socket.socket | None = None) -> bytes:
        async with self._asking:
            if self._control is None:
                if end is None:
                    raise RuntimeError("the template ended")
                await self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [message], [] if end is None else [end.fileno()])
                answer = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            except OSError:
                answer = b""
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for that of the next question
                raise
            if not answer:
                await self._end()
                raise RuntimeError("the process that workers are forked from ended")
            if answer.startswith(b"!"):
                raise RuntimeError(answer[1:].decode(errors="replace"))
            return answer

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        try:
            self._process = await start_python(self._options, theirs, fork=True)
            theirs.close()
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            answer = json.loads(line) if line else {}
            if "ready" not in answer:
                raise RuntimeError(answer.get("error") or f"it ended with status {await self._process.wait()}")
        except BaseException as error:  # also when cancelled: the process must not be left
            theirs.close()
            await self._end()
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"not ready within {START_TIMEOUT_S:g} s") from error
            raise

    async def _end(self) -> None:
        if self._control is None:
            return
        self._control.close()
        self._control = None
        self._generation += 1
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class _Forked:
    def __init__(self, template: Template, pid: int, generation: int) -> None:
        self._template, self._pid, self._generation = template, pid, generation
        self._status: int | None = None

    def kill(self) -> None:
        if self._status is None and self._template.owns(self._generation):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def wait(self) -> int:
        if self._status is None:
            self._status = await self._template.reap(self._pid, self._generation)
        return self._status
