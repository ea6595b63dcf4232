"""The channel to a rollout process that may die (`rollout/remote_side.py`) on the virtual clock.

Calls and answers take time, counters are as of the last answer. When the process dies every call fails, what runs
inside ends where it stands, and nobody writes to the ledger any more.
"""

from __future__ import annotations

import asyncio
from typing import Any

from roll_async.cluster.remote import CallRules, remote
from roll_async.rollout.remote_side import ROLE, CoupledRollout, RolloutCalls, RolloutServer, RpcChannel
from roll_async.simulator.parts.models import ProcessModel, uniform

_LOOK_EVERY_S = 1.0


class SimProcess(RpcChannel):
    """One process with a generating side in it."""

    def __init__(self, side: CoupledRollout, seed: int, model: ProcessModel) -> None:
        super().__init__()
        self._hosted, self._seed, self._model = RolloutServer(side), seed, model
        self.calls = remote(RolloutCalls, self, CallRules(role=ROLE, deadline_s=None))
        self._num_calls = 0
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inside: set[asyncio.Future[Any]] = set()
        self.update(self._hosted.counters())

    @property
    def dead(self) -> bool:
        """It is gone."""
        return self._dead.done()

    def die(self) -> None:
        """As a kill: nothing inside takes another step that counts."""
        if not self.dead:
            self._dead.set_result(None)
            for task in self._inside:
                task.cancel()

    async def invoke(self, method: str, *args: object) -> Any:
        """`cluster/remote.py: Channel`."""
        if self.dead:
            raise ConnectionError(f"{ROLE}: process is gone")
        work = asyncio.ensure_future(self._across(method, *args))
        self._inside.add(work)
        try:
            await asyncio.wait({work, self._dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._inside.discard(work)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        if self.dead:
            if not work.cancelled():
                work.exception()  # marks it as retrieved
            raise ConnectionError(f"{ROLE}: process is gone")
        return work.result()

    async def _across(self, method: str, *args: object) -> Any:
        await self._way()
        answer = await getattr(self._hosted, method)(*args)
        self.update(self._hosted.counters())
        await self._way()
        return answer

    async def _way(self) -> None:
        if self._model.way_s:
            self._num_calls += 1
            await asyncio.sleep(self._model.way_s * uniform("process way", self._seed, self._num_calls))

    async def watch(self) -> None:
        while True:
            await asyncio.wait({self._dead}, timeout=_LOOK_EVERY_S)
            await self.calls.look()  # raises when the process is dead

    def close_queue(self) -> None:
        if not self.dead:
            self._hosted.close_queue()
