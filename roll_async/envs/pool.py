"""Worlds for trajectories: in the event loop where they are quick or async, else in worker processes.

A step that takes longer than `step_timeout_s` fails its trajectory at once. Its process takes no new world; it is
killed when its other worlds have ended, and one time-out later in any case. So a hung world holds up nobody, and the
worlds beside it end as they would have.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from operator import methodcaller

from roll_async.envs.protocol import GraderFailed, LiveWorld, Observation, WorldFailed, answer_of
from roll_async.envs.registry import WorldSpec, build, runs_in_loop
from roll_async.envs.worker import LINE_BYTES
from roll_async.observe.outside import OutsideError, asked, border, message_of, place_of
from roll_async.processes.pool import ProcessPool, Program, WorkerProcess

logger = logging.getLogger(__name__)

_START_S = 60.0
"""Importing this package; a world's own libraries are imported in its first `reset`."""
_CLOSE_S = 5.0


def _environment() -> dict[str, str]:
    """This one's, with the folders in which worlds are found here. No devices: each process would hold memory there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}


_PROGRAM = Program(
    name="worlds",
    module="roll_async.envs.worker",
    settings={},
    environment=_environment,
    line_bytes=LINE_BYTES,
    start_timeout_s=_START_S,
)


class WorldPool:
    """Opens worlds. `close` ends every worker process."""

    def __init__(
        self,
        *,
        max_per_worker: int = 16,
        step_timeout_s: float = 600.0,
        worker: Callable[[float, ProcessPool], WorldWorker] | None = None,
    ) -> None:
        """`worker`: makes one from the step time-out, another kind than processes."""
        self._max_per_worker, self._step_timeout_s = max_per_worker, step_timeout_s
        self._processes = ProcessPool(_PROGRAM)
        self._new_worker = worker or WorldWorker
        self._workers: list[WorldWorker] = []
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self.killed = 0
        """Number of worker processes that died or were killed."""

    def open(self, spec: WorldSpec) -> LiveWorld:
        """A new world. It is created at the first `reset`."""
        if runs_in_loop(spec):
            return _InLoop(spec, self._step_timeout_s)
        return _InWorker(self, spec, next(self._numbers), self._step_timeout_s)

    def place(self) -> WorldWorker:
        """The fullest worker that has room, to run as few processes as possible; a new worker if none has room."""
        self._workers = [w for w in self._workers if w.takes_worlds or w.alive]
        usable = [w for w in self._workers if w.takes_worlds and len(w.worlds) < self._max_per_worker]
        if usable:
            return max(usable, key=lambda w: len(w.worlds))
        worker = self._new_worker(self._step_timeout_s, self._processes)
        self._workers.append(worker)
        return worker

    def lost(self, worker: WorldWorker) -> None:
        """Remove a worker whose process has ended or will be killed."""
        if not worker.counted_lost:
            worker.counted_lost = True
            self.killed += 1

    @property
    def num_workers(self) -> int:
        """Number of running worker processes."""
        return sum(worker.alive for worker in self._workers)

    def close_soon(self, world: LiveWorld) -> None:
        """Close a world whose trajectory is over. Nobody waits for it, and what it raises is logged."""
        task = asyncio.ensure_future(self._close(world))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, world: LiveWorld) -> None:
        try:
            await world.close()
        except (OutsideError, TimeoutError) as error:
            logger.warning("a world did not close: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        """End all workers. Worlds that are being closed get a few seconds for it."""
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=_CLOSE_S)  # a copy: each removes itself as it ends
        for task in self._closing:
            task.cancel()
        workers, self._workers = self._workers, []
        await asyncio.gather(*(w.kill("the pool is closed") for w in workers))
        await self._processes.close()  # also those that are just starting


class WorldWorker:
    """One worker process and its worlds; started with its first one."""

    def __init__(self, step_timeout_s: float, processes: ProcessPool) -> None:
        self._step_timeout_s, self._processes = step_timeout_s, processes
        self.worlds: set[int] = set()
        self.takes_worlds = True
        self.counted_lost = False
        self._process: WorkerProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[dict]] = {}
        self._ids = itertools.count()

    async def ask(self, **request: object) -> dict:
        """Send one request. Raises WorldFailed when the process has ended."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._begin())
        # Several worlds wait for one start: the time-out of one must not cancel it for all.
        await asyncio.shield(self._starting)
        number = next(self._ids)
        answer: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send({"id": number, **request})
            return await answer
        finally:
            self._asked.pop(number, None)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and not self._process.ended

    async def _begin(self) -> None:
        """One that does not start takes no further world: the next one gets another worker."""
        try:
            await self._start()
        except (OSError, RuntimeError) as error:
            self.takes_worlds = False
            raise WorldFailed(f"a worker process for worlds did not start: {error}") from error

    async def _start(self) -> None:
        self._process = await self._processes.start()
        self._process.attach(self._read, self._process_ended)

    def _send(self, request: dict) -> None:
        if self._process is None or self._process.ended:
            raise WorldFailed("its worker process has ended")
        # json escapes line breaks, so that a request is one line.
        self._process.send([json.dumps(request).encode() + b"\n"])

    def _read(self, lines: list[bytes]) -> None:
        try:
            with border():
                for line in lines:
                    self._answered(json.loads(line))
        except OutsideError as error:
            self._process_ended(str(error))

    def _process_ended(self, problem: str = "") -> None:
        """It died, or `problem`: it wrote what is no answer. What its worlds have started ends with it."""
        assert self._process is not None
        process, self._process = self._process, None  # before it is gone: nobody would fail what is asked meanwhile
        problem = problem or process.problem
        self._fail("its worker process ended" + (f": it said what is no answer: {problem}" if problem else ""))
        self._processes.end(process)

    def _answered(self, answer: dict) -> None:
        waiting = self._asked.get(answer.pop("id"))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail(self, reason: str) -> None:
        self.takes_worlds = False
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(WorldFailed(reason))

    def retire(self, within_s: float) -> None:
        """Something hangs: the process gets no new world and is killed when its other worlds have ended, at the latest
        after this time.
        """
        self.takes_worlds = False
        if self._retiring is None:
            self._retiring = asyncio.ensure_future(self._end_later(within_s))

    async def _end_later(self, within_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + within_s
        while self.worlds and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(min(0.1, self._step_timeout_s / 10))
        await self.kill("killed: a step of a world beside it hung")

    async def kill(self, reason: str) -> None:
        """Kill the process; pending requests fail."""
        self._fail(reason)
        await self._end_process()
        # This may be the last step of that very task.
        if self._retiring is not None and self._retiring is not asyncio.current_task():
            self._retiring.cancel()

    async def _end_process(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.wait({self._processes.end(process)})  # `wait`: the end is not cancelled with this task


class _InWorker:
    """A world of a worker process."""

    def __init__(self, pool: WorldPool, spec: WorldSpec, number: int, timeout_s: float) -> None:
        self._pool, self._spec, self._number, self._timeout_s = pool, spec, number, timeout_s
        self._worker: WorldWorker | None = None

    async def reset(self, seed: int) -> Observation:
        if self._worker is None:
            self._worker = self._pool.place()
            self._worker.worlds.add(self._number)
        return await self._ask("reset", seed=seed, env_type=self._spec.env_type, values=dict(self._spec.values))

    async def step(self, action: str) -> Observation:
        return await self._ask("step", action=action)

    async def _ask(self, op: str, **more: object) -> Observation:
        worker = self._worker
        assert worker is not None, "reset() first"
        started = asyncio.get_running_loop().time()
        try:
            # A first request also waits for the start of the process.
            async with asyncio.timeout(self._timeout_s + (0 if worker.alive else _START_S)):
                answer = await worker.ask(op=op, world=self._number, **more)
        except TimeoutError:
            worker.worlds.discard(self._number)
            worker.retire(self._timeout_s)  # it waits for the worlds beside this one, which is no longer counted
            self._pool.lost(worker)
            taken = f"{asyncio.get_running_loop().time() - started:.1f} s"
            raise WorldFailed(f"{op} of {self._spec.env_type} took longer than {taken} (fault.env_timeout)") from None
        except (WorldFailed, ConnectionError) as error:
            self._pool.lost(worker)
            raise WorldFailed(f"{op} of {self._spec.env_type}: {error}") from error
        if "error" in answer:
            if answer["kind"] == "grader":
                raise GraderFailed(answer["error"])
            raise WorldFailed(f"{op} of {self._spec.env_type}: {answer['error']}")
        return Observation(**answer)

    async def close(self) -> None:
        """Leave the process to the others; one whose world does not close takes no further ones."""
        worker, self._worker = self._worker, None
        if worker is None or self._number not in worker.worlds:
            return
        try:
            # One that is being retired ends all of its worlds by its own end.
            if worker.alive and worker.takes_worlds:
                async with asyncio.timeout(self._timeout_s):
                    await worker.ask(op="close", world=self._number)
        except TimeoutError:
            worker.retire(math.inf)  # only this thread hangs: the worlds beside it have their steps' limits
            self._pool.lost(worker)
        except (WorldFailed, ConnectionError) as error:
            logger.info("a world did not close: %s", error)
        finally:
            worker.worlds.discard(self._number)


class _InLoop:
    """A world whose steps run in the event loop."""

    def __init__(self, spec: WorldSpec, timeout_s: float) -> None:
        self._spec, self._timeout_s = spec, timeout_s
        self._world: object = None

    async def reset(self, seed: int) -> Observation:
        if self._world is None:
            try:
                with border():
                    self._world = build(self._spec)
            except OutsideError as error:
                raise WorldFailed(f"making {self._spec.env_type}: {error}") from error
        return await self._ask("reset", seed=seed)

    async def step(self, action: str) -> Observation:
        return await self._ask("step", action)

    async def _ask(self, op: str, *args: object, **kwargs: object) -> Observation:
        where = f"{op} of {self._spec.env_type}"
        try:
            start = partial(methodcaller(op, *args, **kwargs), self._world)
            return Observation(**await asked(start, partial(answer_of, op), self._timeout_s, GraderFailed))
        except TimeoutError:
            raise WorldFailed(f"{where} took longer than {self._timeout_s:g} s (fault.env_timeout)") from None
        except GraderFailed as error:
            raise GraderFailed(f"{message_of(error)} [{place_of(error)}]") from error
        except OutsideError as error:
            raise WorldFailed(f"{where}: {error}") from error

    async def close(self) -> None:
        world, self._world = self._world, None
        close = getattr(world, "close", None)
        if close is not None:
            await asked(close, lambda _: None, self._timeout_s)
