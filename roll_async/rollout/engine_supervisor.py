"""Restarts lost engines: start the process, pause it, give it the present weights, resume it.

    manager.lost --> supervisor.lost --> start (retried) --> rejoin --> synchronizer --> readmit --> manager.add

Its requests wait or run on other replicas meanwhile. A replica that has used up its restarts is not started again; the
run ends when none is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from roll_async.inference.protocol import PauseMode
from roll_async.rollout.protocol import Replica
from roll_async.rollout.server_manager import AsyncLLMServerManager

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 1.0
_BACKOFF = 4.0

StartEngine = Callable[[str, int], Awaitable[Replica]]
"""(name, number of earlier starts) to a running replica of that name, on the devices of the lost one."""


class EngineSupervisor:
    """Restarts each replica at most `max_restarts` times (`fault.max_engine_restarts`). Close it before the manager."""

    def __init__(
        self, manager: AsyncLLMServerManager, start: StartEngine, *, max_restarts: int, start_timeout_s: float
    ) -> None:
        self._manager, self._start = manager, start
        self._max_restarts, self._start_timeout_s = max_restarts, start_timeout_s
        self._rejoin: Callable[[Replica], None] | None = None
        self._restarts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        manager.supervise(self.lost)

    def attach(self, rejoin: Callable[[Replica], None]) -> None:
        """`rejoin` gives weights to restarted replicas: `ParameterSynchronizer.rejoin`."""
        self._rejoin = rejoin

    def lost(self, name: str, reason: str) -> bool:
        """A replica was lost. True: it will be started again."""
        if self._rejoin is None or self._restarts[name] >= self._max_restarts:
            logger.error("engine %s is not started again after %d restarts: %s", name, self._restarts[name], reason)
            return False
        self._restarts[name] += 1
        task = asyncio.get_running_loop().create_task(self._restart(name), name=f"restart of {name}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, name))
        return True

    def _ended(self, task: asyncio.Task[None], name: str) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # not a failure to start, which `_restart` reports itself
            self._manager.give_up(name, f"{type(error).__name__}: {error}")

    async def remove_replica(self, name: str, reason: str) -> None:
        """Remove a replica, running or being restarted, that does not accept the weights."""
        if any(client.name == name for client in self._manager.clients):
            await self._manager.remove(name, reason)
        elif not self.lost(name, reason):
            self._manager.give_up(name, reason)

    async def readmit(self, client: Replica) -> None:
        """Resume a replica that holds the weights. One that does not resume is lost once more."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await client.resume()
        except TimeoutError:
            await self.remove_replica(client.name, f"did not resume within {self._start_timeout_s:g} s")
        except (RuntimeError, OSError) as error:
            await self.remove_replica(client.name, f"did not resume: {error}")
        else:
            await self._manager.add(client)

    async def close(self) -> None:
        """Stop restarting."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restart(self, name: str) -> None:
        """Start the replica, retried as often as restarts are left; the synchronizer then gives it the weights."""
        assert self._rejoin is not None
        reason = ""
        while True:
            number = self._restarts[name]
            await asyncio.sleep(_FIRST_DELAY_S * _BACKOFF ** (number - 1))
            logger.warning("engine %s is started again (%d of %d)", name, number, self._max_restarts)
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    client = await self._start(name, number)
                    await client.pause(PauseMode.ABORT)
            except TimeoutError:
                reason = f"not up within {self._start_timeout_s:g} s"
            except (RuntimeError, OSError, ValueError) as error:
                reason = str(error)
            else:
                self._rejoin(client)
                return
            logger.error("engine %s does not start: %s", name, reason)
            if self._restarts[name] >= self._max_restarts:
                self._manager.give_up(name, reason)
                return
            self._restarts[name] += 1
