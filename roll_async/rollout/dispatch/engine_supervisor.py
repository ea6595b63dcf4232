"""Which replicas there are: starts lost ones again, starts those that join during a run, ends those that leave.

    pool.lost --> lost  --\\
    scale --> join --> devices --> start (retried) --> hold --> the next push --> rejoin (`returning.py`)
          \\-> leave --> pool.retire --> end of its process

A replica is paused until it holds the present weights. Requests of a lost or leaving one wait or run on other replicas
meanwhile. A replica that has used up its restarts is not started again; the run ends when none is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Protocol

from roll_async.buffer.errors import RoleFailed, StallError
from roll_async.inference.protocol import PauseMode
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.protocol import Replica

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 1.0
_BACKOFF = 4.0


class Starter(Protocol):
    """Where replicas come from."""

    def name(self, index: int) -> str:
        """Of the replica of this number, from 0 on."""
        ...

    async def reserve(self, name: str) -> None:
        """Returns when there are devices for the replica: at once for one that was there, else after as long as it
        takes.
        """

    async def start(self, name: str, number: int) -> Replica:
        """A running replica of that name. `number`: how often it was started before; whatever is left of the process
        before goes first.
        """
        ...

    async def stop(self, name: str) -> None:
        """End its process, running, starting or dead, and give back what `reserve` waited for."""


class EngineSupervisor:
    """Restarts each replica at most `max_restarts` times (`fault.max_engine_restarts`). Close it before the manager."""

    def __init__(
        self,
        manager: EnginePool,
        starter: Starter,
        *,
        max_restarts: int,
        start_timeout_s: float,
    ) -> None:
        self._manager, self._starter = manager, starter
        self._max_restarts, self._start_timeout_s = max_restarts, start_timeout_s
        self._restarts: Counter[str] = Counter()
        self._starts = Counter(client.name for client in manager.clients)
        """Processes of each replica so far: no two of them may be the same to Ray, or sample from the same seed."""
        self._coming: dict[str, None] = {}
        """Those that were started and not given up, in order; also when they serve."""
        self._leaving: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        manager.returning.supervise(self.lost)

    def lost(self, name: str, reason: str) -> bool:
        """A replica was lost. True: it will be started again."""
        if name in self._leaving:
            return False
        if not self._manager.returning.gives_weights or self._restarts[name] >= self._max_restarts:
            logger.error("engine %s is not started again after %d restarts: %s", name, self._restarts[name], reason)
            self._coming.pop(name, None)
            return False
        self._restarts[name] += 1
        self._bring(name)
        return True

    @property
    def names(self) -> list[str]:
        """Replicas that serve or will: without those that leave or were given up."""
        serving = [c.name for c in self._manager.clients if c.name not in self._leaving]
        return [*serving, *(name for name in self._coming if name not in serving)]

    def scale(self, num_replicas: int) -> tuple[list[str], list[str]]:
        """From now on so many replicas; who joins and who leaves. Those that came last leave first, and before them
        those that do not serve yet.
        """
        assert num_replicas >= 1 and self._manager.returning.gives_weights
        there = self.names
        leave = there[num_replicas:]
        fresh = (name for name in map(self._starter.name, count()) if name not in there and name not in self._leaving)
        join = [next(fresh) for _ in range(num_replicas - len(there))]
        for name in leave:
            self._leaving.add(name)  # first: its loss from now on is no failure
            self._coming.pop(name, None)
            self._manager.returning.holding.pop(name, None)
            self._run(name, self._leave(name), "end")
        for name in join:
            # A name used before has all its restarts again; a Counter does not raise without one.
            del self._restarts[name]
            self._bring(name)
        return join, leave

    def _bring(self, name: str) -> None:
        self._coming.pop(name, None)  # the last one started is the last in order
        self._coming[name] = None
        self._run(name, self._start(name), "start")

    def _run(self, name: str, work: Coroutine[object, object, None], what: str) -> None:
        if (before := self._tasks.get(name)) is not None:
            before.cancel()  # a start and an end of one name must not run side by side
        self._tasks[name] = task = asyncio.get_running_loop().create_task(work, name=f"{what} of {name}")
        task.add_done_callback(lambda done: self._ended(done, name))

    def _ended(self, task: asyncio.Task[None], name: str) -> None:
        if self._tasks.get(name) is task:  # not the next task of this name, which `_run` has put there
            del self._tasks[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:  # no failure to start, which `_start` reports itself
            self._manager.fail(error)

    def _give_up(self, name: str, reason: str) -> None:
        self._coming.pop(name, None)
        self._manager.returning.give_up(name, reason)

    async def close(self) -> None:
        """Stop restarting."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, name: str) -> None:
        """Start the replica, retried as often as restarts are left; the next push then gives it the weights."""
        while True:
            if again := self._restarts[name]:
                await asyncio.sleep(_FIRST_DELAY_S * _BACKOFF ** (again - 1))
                logger.warning("engine %s is started again (%d of %d)", name, again, self._max_restarts)
            try:
                await self._starter.reserve(name)
                self._manager.returning.expect(name)
                # Counted before it can fail: to Ray the next try is another process.
                number, self._starts[name] = self._starts[name], self._starts[name] + 1
                async with asyncio.timeout(self._start_timeout_s):  # not around `reserve`, which waits for devices
                    client = await self._starter.start(name, number)
                    await client.pause(PauseMode.ABORT)
            except TimeoutError:
                reason = f"not up within {self._start_timeout_s:g} s"
            except (ConnectionError, StallError, RoleFailed, ValueError) as error:
                # Of a start, not of a call: also what the library says while it loads (RoleFailed), and what a place
                # refuses (ValueError). The others go on without it.
                reason = str(error)
            else:
                self._manager.returning.hold(client)
                return
            logger.error("engine %s does not start: %s", name, reason)
            if self._restarts[name] >= self._max_restarts:
                self._give_up(name, reason)
                return
            self._restarts[name] += 1

    async def _leave(self, name: str) -> None:
        """What it runs goes on elsewhere, then its process ends."""
        # Where it was still being started, nobody waits for it any more.
        self._manager.returning.give_up(name, "it leaves")
        await self._manager.retire(name)
        await self._starter.stop(name)
        self._leaving.discard(name)
        logger.info("engine %s has left", name)
