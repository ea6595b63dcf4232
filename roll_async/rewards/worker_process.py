"""A reward worker as its pool sees it: a process behind a socket, and two ways to get one.

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
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from roll_async.rewards.registry import needs_environment
from roll_async.schema import Reward

_START_TIMEOUT_S = 120.0
"""Importing a reward's libraries on a busy machine."""
_ENDING_S = 5.0
_ANSWER_LIMIT_BYTES = 16 << 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""A script in a checkout finds the package by its own path; its workers must find the same one."""
_KEPT_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "VIRTUAL_ENV", "ROLL_ASYNC_RUN",
)  # fmt: skip
"""What Python needs, and the mark by which the processes of a run are found when its driver was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """What one worker process is."""

    reward: str
    """Name or dotted path."""
    memory_mb: int
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the reward's class, plain JSON values."""


@dataclass(eq=False, slots=True)
class Task:
    """One sample to judge: its line for the worker, and who waits."""

    line: bytes
    result: asyncio.Future[Reward]
    crashes: int = 0


class Process(Protocol):
    """The operating system's side of a worker."""

    def kill(self) -> None: ...

    async def wait(self) -> int:
        """Exit status, or minus the signal, of a process that ended or was killed."""
        ...


class Worker(asyncio.Protocol):
    """One process and the tasks it has, the head being computed. `on_answer(worker, lines)` and `on_end(worker)` are
    called once it is ready; both are set by its pool.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.since_s = 0.0
        """Loop time at which the head began."""
        self.on_answer: Callable[[Worker, list[bytes]], None] | None = None
        self.on_end: Callable[[Worker], None] | None = None
        self.process: Process | None = None
        self.timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[bytes] = loop.create_future()
        self._ended = asyncio.Event()
        self._rest = b""

    async def connect(self, end: socket.socket) -> None:
        """Speak through this end of its socket from now on."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: self, end)
        self._transport = cast(asyncio.Transport, transport)

    async def ready(self) -> None:
        """Raises RuntimeError with the reason when it will not be."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await self._ready
        except TimeoutError as error:
            raise RuntimeError(f"not ready within {_START_TIMEOUT_S:g} s") from error
        answer = json.loads(line) if line else {}
        if "ready" not in answer:
            assert self.process is not None
            raise RuntimeError(answer.get("error") or f"it ended with status {await self.process.wait()}")

    def send(self, lines: list[bytes]) -> None:
        """Not drained: a long task behind a hanging one would be waited for. An ended process shows in `on_end`."""
        assert self._transport is not None
        self._transport.write(b"".join(lines))

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _ANSWER_LIMIT_BYTES and self._transport is not None:
            self._transport.abort()
        if lines and not self._ready.done():
            self._ready.set_result(lines.pop(0))
        if lines and self.on_answer is not None:
            self.on_answer(self, lines)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
        if not self._ready.done():
            self._ready.set_result(b"")
        if self.on_end is not None:
            self.on_end(self)

    async def stop(self) -> int:
        """Kill it, wait until it is gone (it may hold gigabytes), and say how it ended."""
        self.on_end = self.on_answer = None
        if self.timer is not None:
            self.timer.cancel()
        status = 0
        if self.process is not None:
            self.process.kill()
            if self._transport is not None:
                with suppress(TimeoutError):  # something it started may hold its socket
                    await asyncio.wait_for(self._ended.wait(), _ENDING_S)
            status = await self.process.wait()
        if self._transport is not None:
            self._transport.abort()
        return status


class Launcher(Protocol):
    """Where a pool gets its workers from."""

    async def start_worker(self) -> Worker:
        """A worker that is ready. Raises RuntimeError with the reason when none can be started."""
        ...

    async def close(self) -> None:
        """After the workers were stopped."""
        ...


class Spawner:
    """Workers of their own, started one ahead: the imports of a replacement are waited for by nobody."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._spare: asyncio.Task[Worker] | None = None

    async def start_worker(self) -> Worker:
        spare, self._spare = self._spare, None
        worker = await (self._start() if spare is None else spare)
        if self._spare is None:
            self._spare = asyncio.create_task(self._start(), name=f"spare worker of {self._options.reward}")
        return worker

    async def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.cancel()
            with suppress(asyncio.CancelledError, RuntimeError, OSError):
                await (await spare).stop()

    async def _start(self) -> Worker:
        return await _worker_behind(self._launch)

    async def _launch(self, end: socket.socket) -> Process:
        return _Spawned(await _start_python(self._options, end, fork=False))


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

    async def start_worker(self) -> Worker:
        return await _worker_behind(self._launch)

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
            self._process = await _start_python(self._options, theirs, fork=True)
            theirs.close()
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            answer = json.loads(line) if line else {}
            if "ready" not in answer:
                raise RuntimeError(answer.get("error") or f"it ended with status {await self._process.wait()}")
        except BaseException as error:
            theirs.close()
            await self._end()
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"not ready within {_START_TIMEOUT_S:g} s") from error
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


async def _worker_behind(launch: Callable[[socket.socket], Awaitable[Process]]) -> Worker:
    """A worker that is ready, from something that starts a process at one end of a socket."""
    ours, theirs = socket.socketpair()
    worker = Worker()
    try:
        worker.process = await launch(theirs)
        theirs.close()
        await worker.connect(ours)
        await worker.ready()
    except BaseException:
        theirs.close()
        await worker.stop()
        ours.close()
        raise
    return worker


async def _start_python(options: WorkerOptions, end: socket.socket, *, fork: bool) -> asyncio.subprocess.Process:
    settings = {
        "reward": options.reward,
        "memory_mb": options.memory_mb,
        "options": dict(options.arguments),
        "parent": os.getpid(),
        "fd": end.fileno(),
        "fork": fork,
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "roll_async.rewards.worker",
        json.dumps(settings),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=_environment(options.reward),
        pass_fds=(end.fileno(),),
        start_new_session=True,  # what a user's reward starts ends with it
    )


def _environment(reward: str) -> dict[str, str]:
    """A user's reward sees the environment, keys included; ours see what Python itself needs."""
    kept = os.environ if needs_environment(reward) else {k: v for k, v in os.environ.items() if k in _KEPT_ENVIRONMENT}
    path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
