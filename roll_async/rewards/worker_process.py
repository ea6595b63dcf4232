"""A reward worker as its pool sees it: a process behind a socket."""

from __future__ import annotations

import asyncio
import json
import os
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

START_TIMEOUT_S = 120.0
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
class JudgeTask:
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


class JudgeWorker(asyncio.Protocol):
    """One process and the tasks it has, the head being computed. `on_answer(worker, lines)` and `on_end(worker)` are
    called once it is ready; both are set by its pool.
    """

    def __init__(self) -> None:
        self.tasks: deque[JudgeTask] = deque()
        self.since_s = 0.0
        """Loop time at which the head began."""
        self.on_answer: Callable[[JudgeWorker, list[bytes]], None] | None = None
        self.on_end: Callable[[JudgeWorker], None] | None = None
        self.process: Process | None = None
        self.timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[bytes] = loop.create_future()
        self._ended = asyncio.Event()
        self._rest = b""

    @property
    def ended(self) -> bool:
        """Whether it is gone, perhaps before `on_end` was set."""
        return self._ended.is_set()

    async def connect(self, end: socket.socket) -> None:
        """Speak through this end of its socket from now on."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: self, end)
        self._transport = cast(asyncio.Transport, transport)

    async def ready(self) -> None:
        """Raises RuntimeError with the reason when it will not be."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await self._ready
        except TimeoutError as error:
            raise RuntimeError(f"not ready within {START_TIMEOUT_S:g} s") from error
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


async def worker_behind(launch: Callable[[socket.socket], Awaitable[Process]]) -> JudgeWorker:
    """A worker that is ready, from something that starts a process at one end of a socket."""
    ours, theirs = socket.socketpair()
    worker = JudgeWorker()
    try:
        worker.process = await launch(theirs)
        theirs.close()
        await worker.connect(ours)
        await worker.ready()
    except BaseException:  # also when cancelled: the process must not be left
        theirs.close()
        await worker.stop()
        ours.close()
        raise
    return worker


async def start_python(options: WorkerOptions, end: socket.socket, *, fork: bool) -> asyncio.subprocess.Process:
    """`roll_async.rewards.worker` with one end of a socket; `fork`: as a template."""
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
        "-P",  # else a file of the working folder that is called like a library would replace it
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
