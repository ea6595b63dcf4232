"""Processes for code that may hang, crash or fill the memory: rewards and worlds run in them.

    start() --> WorkerProcess ==lines==> the process (`child.py` is its end of the socket)
                              <==lines== on_lines(lines), and on_end() when it is gone

A process is a fork of a template, which has imported and warmed up: there in milliseconds (`forks`). Or it is a Python
of its own, the next one started ahead (`spare`): a fork breaks the threads, devices and files of a user's code.
The pool starts, restarts and ends processes. Which of them gets which work, and until when, is for its owner to say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar, cast

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_STARTS = 3
"""Attempts to replace a process before its owner is told that none starts; more follow."""
_LONGEST_PAUSE_S = 30.0
"""Between two attempts: a machine without memory or process numbers has them again at some time."""
_ENDING_S = 5.0
_KILLED = -signal.SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the processes of a pool run."""

    name: str
    """For log lines."""
    module: str
    """Run as `python -m`; it begins with `child.connect`."""
    settings: Mapping[str, object]
    """Plain JSON values, which `child.connect` returns."""
    environment: Callable[[], Mapping[str, str]]
    """Asked at each start: folders of user code may have been added."""
    line_bytes: int
    """Limit of an answer, which is one line. A process that writes more without an end of line is ended."""
    start_timeout_s: float
    """Limit of the imports on a busy machine."""


class _Handle(Protocol):
    """The operating system's side of a process."""

    def kill(self) -> None: ...

    async def wait(self) -> int:
        """Exit status, or minus the signal, of a process that ended or was killed."""
        ...


class WorkerProcess(asyncio.Protocol):
    """One process behind a socket. Both directions are lines of JSON; the first answer says that it is ready."""

    def __init__(self, line_bytes: int) -> None:
        self.handle: _Handle | None = None
        self.problem = ""
        """Why this side ended it; empty: it ended by itself."""
        self._line_bytes = line_bytes
        self._on_lines: Callable[[list[bytes]], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._rest = bytearray()

    @property
    def ended(self) -> bool:
        """Whether its socket is closed."""
        return self._ended.is_set()

    def attach(self, on_lines: Callable[[list[bytes]], None], on_end: Callable[[], None]) -> None:
        """Its owner from now on. `on_end` is called at once where it ended as a spare."""
        self._on_lines, self._on_end = on_lines, on_end
        if self.ended:
            on_end()

    def detach(self) -> None:
        """What it still says, and its end, are nobody's any more."""
        self._on_lines = self._on_end = None

    def send(self, lines: list[bytes]) -> None:
        """Not drained: a long line behind a hanging one would be waited for. An ended process shows in `on_end`."""
        assert self._transport is not None
        self._transport.write(b"".join(lines))

    async def connect(self, end: socket.socket, timeout_s: float) -> None:
        """Use this end of its socket; returns when the process is ready. Raises RuntimeError with the reason when it
        will not be.
        """
        # An end of a socketpair is connected already.
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: self, end)
        self._transport = cast(asyncio.Transport, transport)
        assert self.handle is not None
        await _first_answer(self._ready, timeout_s, self.handle.wait)

    async def stop(self) -> int:
        """Kill it, wait until it is gone (it may hold gigabytes), and return how it ended."""
        self.detach()
        status = 0
        if self.handle is not None:
            self.handle.kill()
            if self._transport is not None:
                with suppress(TimeoutError):  # something it started may hold its socket
                    await asyncio.wait_for(self._ended.wait(), _ENDING_S)
            status = await self.handle.wait()
        if self._transport is not None:
            self._transport.abort()  # not close, which would write out what is buffered first
        return status

    def data_received(self, data: bytes) -> None:
        begun, newline, rest = data.rpartition(b"\n")
        lines = (bytes(self._rest) + begun).split(b"\n") if newline else []
        if newline:
            self._rest.clear()
        self._rest += rest  # not joined before its line is complete: a long one comes in many pieces
        if len(self._rest) > self._line_bytes and self._transport is not None:
            self.problem = f"a line of more than {self._line_bytes} bytes"
            self._transport.abort()
        if lines and not self._ready.done():
            self._ready.set_result(lines.pop(0))
        if lines and self._on_lines is not None:
            self._on_lines(lines)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
        if not self._ready.done():
            self._ready.set_result(b"")  # no answer: it ended before it was ready
        if self._on_end is not None:
            self._on_end()


class ProcessPool:
    """Starts, restarts and ends the processes of one program. `close` at the end."""

    def __init__(self, program: Program, *, forks: bool = False, spare: bool = False) -> None:
        """`forks`: of a template, see `child.serve_forks`. `spare`: one is started ahead, so that nobody waits for the
        imports of a replacement.
        """
        self._program, self._forks, self._keeps_spare = program, forks, spare
        self._spare: asyncio.Task[WorkerProcess] | None = None
        self._template: _Template | None = None
        self._opening_template = asyncio.Lock()
        self._processes: set[WorkerProcess] = set()
        """All that are ready, also those whose caller was cancelled in the moment in which they became so."""
        self._starting: set[asyncio.Task] = set()
        self._ending: set[asyncio.Task] = set()

    async def start(self) -> WorkerProcess:
        """One that is ready. Raises RuntimeError or OSError with the reason when none can be started."""
        task, self._spare = self._spare or self._background(self._starting, self._start()), None
        process = await asyncio.shield(task)  # one that comes too late for its caller is ended by `close`
        if self._keeps_spare and self._spare is None:
            self._spare = self._background(self._starting, self._start())
        return process

    def restart(self, started: Callable[[WorkerProcess], None], failing: Callable[[str], None]) -> None:
        """Start one in the background, however many attempts it takes. From the third failed one on, each is told to
        `failing`.
        """
        self._background(self._starting, self._restart(started, failing))

    def end(self, process: WorkerProcess, ended: Callable[[int], None] | None = None) -> asyncio.Task[None]:
        """Kill a process in the background; `ended` gets its exit status, or minus the signal, when it is gone."""
        self._processes.discard(process)
        process.detach()  # before its owner's next line: an answer on its way would be taken for the next task's
        return self._background(self._ending, self._end(process, ended))

    async def close(self) -> None:
        """End all processes, also those that are just starting, and wait until they are gone."""
        starting = {*self._starting, *filter(None, [self._spare])}  # a spare that failed is no longer among the first
        self._spare = None
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)  # no start that fails now is of interest
        for process in list(self._processes):
            self.end(process)
        while self._ending:
            await asyncio.wait(self._ending)
        if self._template is not None:  # after its forks, which it reaps
            await self._template.close()

    async def _restart(self, started: Callable[[WorkerProcess], None], failing: Callable[[str], None]) -> None:
        for attempt in count(1):
            try:
                process = await self.start()
            except (RuntimeError, OSError) as problem:
                logger.warning("%s: a worker does not start: %s", self._program.name, problem)
                if attempt >= _MAX_STARTS:
                    failing(f"no worker starts: {problem}")
                await asyncio.sleep(min(_LONGEST_PAUSE_S, 0.5 * 2**attempt))
            else:
                started(process)
                return

    async def _start(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        process = WorkerProcess(self._program.line_bytes)
        try:
            if self._forks:
                process.handle = await self._fork(theirs)
            else:
                process.handle = _Spawned(await _python(self._program, theirs, fork=False))
            theirs.close()  # only the process has that end now, so its death is the end of our input
            await process.connect(ours, self._program.start_timeout_s)
        except BaseException:  # also when cancelled: the process must not be left
            theirs.close()
            await process.stop()
            ours.close()
            raise
        self._processes.add(process)
        return process

    async def _fork(self, end: socket.socket) -> _Handle:
        async with self._opening_template:  # one for all that start now
            if self._template is None or self._template.closed:
                self._template = await _Template.open(self._program)
        return await self._template.fork(end)

    async def _end(self, process: WorkerProcess, ended: Callable[[int], None] | None) -> None:
        status = await process.stop()
        if ended is not None:
            ended(status)

    def _background(self, tasks: set[asyncio.Task], work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """A strong reference until it is done."""
        task = asyncio.create_task(work, name=f"process of {self._program.name}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task


class _Spawned:
    """A Python of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def kill(self) -> None:
        """End the process and everything it started."""
        if self._process.returncode is None:  # else its number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session, so a group, of its own

    async def wait(self) -> int:
        return await self._process.wait()


class _Template:
    """One warm process that forks a worker whenever one is asked for. It reaps them when told to, never on its own, so
    a worker's number means that worker until it was reaped.
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process, self._control = process, control
        self._asking = asyncio.Lock()
        self.closed = False

    @classmethod
    async def open(cls, program: Program) -> _Template:
        """One that is ready. Raises RuntimeError with the reason when it will not be."""
        control, theirs = socket.socketpair()
        control.setblocking(False)  # the event loop's sock_recv takes no other
        try:
            template = cls(await _python(program, theirs, fork=True), control)
        except BaseException:  # also when cancelled: nobody else has this end
            control.close()
            raise
        finally:
            theirs.close()
        try:
            line = asyncio.get_running_loop().sock_recv(control, 4096)
            await _first_answer(line, program.start_timeout_s, template._process.wait)
        except BaseException:  # also when cancelled: the process must not be left
            await template._end()
            raise
        return template

    async def fork(self, end: socket.socket) -> _Handle:
        """A worker behind the other end of this socket."""
        return _Forked(self, int(await self._ask(b"fork", end)))

    @property
    def alive(self) -> bool:
        """Whether the numbers of its workers still mean them; they end with it."""
        return not self.closed and self._process.returncode is None

    async def reap(self, pid: int) -> int:
        """Exit status of a worker that ended or was killed; that of a kill when the template ended, and it with it."""
        try:
            return int(await self._ask(b"%d" % pid)) if self.alive else _KILLED
        except RuntimeError:
            return _KILLED

    async def close(self) -> None:
        """After its workers were stopped."""
        async with self._asking:
            await self._end()

    async def _ask(self, message: bytes, end: socket.socket | None = None) -> bytes:
        async with self._asking:  # one question at a time: answers have no number
            try:
                if self.closed:
                    raise OSError("closed while this question waited")
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

    async def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._control.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class _Forked:
    """A fork of a template."""

    def __init__(self, template: _Template, pid: int) -> None:
        self._template, self._pid = template, pid
        self._status: int | None = None

    def kill(self) -> None:
        if self._status is None and self._template.alive:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def wait(self) -> int:
        if self._status is None:
            self._status = await self._template.reap(self._pid)
        return self._status


async def _python(program: Program, end: socket.socket, *, fork: bool) -> asyncio.subprocess.Process:
    """The program with one end of a socket; `fork`: as a template."""
    settings = {**program.settings, "parent": os.getpid(), "fd": end.fileno(), "fork": fork}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # else a file of the working folder that is called like a library would replace it
        "-m",
        program.module,
        json.dumps(settings),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **program.environment(),
            "OMP_NUM_THREADS": "1",
        },  # one process for each core, not for each a pool of threads
        pass_fds=(end.fileno(),),  # it has the same number there
        start_new_session=True,  # what user code starts ends with it; Ctrl-C reaches only the driver, which ends both
    )


async def _first_answer(line: Awaitable[bytes], timeout_s: float, status: Callable[[], Awaitable[int]]) -> None:
    """Raises RuntimeError when it does not say that the process is ready."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await line
    except TimeoutError as error:
        raise RuntimeError(f"not ready within {timeout_s:g} s") from error
    answer = json.loads(found) if found else {}
    if "ready" not in answer:
        raise RuntimeError(answer.get("error") or f"it ended with status {await status()}")
