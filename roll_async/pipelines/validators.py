"""Replicas that run validations and nothing else (`validation.mode: replicas`).

    a step is due:  claim --> paused --> the push of the step gives them its weights, too --> run --> result
                      |                                                                        |
                      +-- False: none is there                  trainer and rollout go on -----+

They hold the weights of the step they measure until they are claimed again: a push between two validations leaves them
as they are. Requests of training never reach them. One that is lost is started again like any other replica; when none
is left the run goes on without validations.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from roll_async.rollout.engine_supervisor import EngineSupervisor, Joins
from roll_async.rollout.protocol import Replica
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import WeightVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Connected(Protocol):
    """Replicas with their manager, `pipelines/wire.py: Engines`."""

    @property
    def manager(self) -> AsyncLLMServerManager: ...

    @property
    def supervisor(self) -> EngineSupervisor: ...


class Validators:
    """The replicas of the validations of a run."""

    def __init__(self, engines: Connected, *, pause_timeout_s: float) -> None:
        """`pause_timeout_s`: how long an idle replica may take to pause before it is lost; the trainer waits so long
        at most.
        """
        self._manager, self._supervisor, self._pause_timeout_s = engines.manager, engines.supervisor, pause_timeout_s
        self._names = {client.name for client in engines.manager.clients}
        self._joins: Joins | None = None
        self._claimed: dict[str, Replica] = {}
        self.version: WeightVersion | None = None
        """The one that they measure."""

    def attach(self, joins: Joins) -> None:
        """What gives them weights."""
        self._joins = joins
        self._supervisor.attach(joins)

    def own(self, name: str) -> bool:
        """Whether a replica of this name runs validations."""
        return name in self._names

    async def claim(self, step: WeightVersion) -> bool:
        """Pause all replicas, so that the next push, or `resync_returned`, gives them the weights of this step. False:
        there is none, and none is being started again.
        """
        assert self._joins is not None
        try:
            await self._manager.interrupt("resume", self._pause_timeout_s)
        except ConnectionError as error:
            logger.error("validation: %s", error)
        self.version, self._claimed = step, {client.name: client for client in self._manager.clients}
        for client in self._claimed.values():
            self._joins.rejoin(client)
        return bool(self._claimed) or self._manager.expects_return

    async def readmit(self, client: Replica) -> None:
        """A replica holds the weights: it runs from now on, because the canary of the push asks it, too."""
        if self._claimed.pop(client.name, None) is client:
            await self._resume()
        else:  # the claimed one was lost since, and this is its next process
            await self._supervisor.readmit(client)

    async def _resume(self) -> None:
        try:
            await self._manager.resume()
        except ConnectionError as error:
            logger.error("validation: %s", error)

    async def remove_replica(self, name: str, reason: str) -> None:
        """A replica did not take the weights."""
        await self._supervisor.remove_replica(name, reason)

    async def run(self, measure: Callable[[], Awaitable[T]]) -> T | None:
        """What `measure` finds on the claimed replicas; None when the last of them is lost, which ends no run."""
        failed = asyncio.ensure_future(self._manager.wait_failed())
        measuring = asyncio.ensure_future(self._resumed(measure))
        try:
            await asyncio.wait({measuring, failed}, return_when=asyncio.FIRST_COMPLETED)
            return await (measuring if measuring.done() else failed)
        except ConnectionError as error:
            logger.error("the validation of step %s has no result: %s", self.version, error)
            return None
        finally:
            for task in (measuring, failed):
                task.cancel()
            await asyncio.wait({measuring, failed})
            for task in (measuring, failed):
                if not task.cancelled():
                    task.exception()  # marks it as retrieved

    async def _resumed(self, measure: Callable[[], Awaitable[T]]) -> T:
        await self._resume()
        return await measure()
