"""The generating side behind a process border that may die: the driver's clients of `cluster/rollout_process.py`,
without Ray.

Calls and answers take time, counters are as of the last answer. When the process dies every call fails, what runs
inside ends where it stands, and nobody writes to the ledger any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.states import QueueStats
from roll_async.pipelines.protocol import Validates
from roll_async.pipelines.wire import RolloutSide
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.simulator.models import ProcessModel, uniform
from roll_async.weight_sync.synchronizer import SyncReport, SyncStatus

T = TypeVar("T")

_LOOK_EVERY_S = 1.0


class SimProcess:
    """One process with a generating side in it."""

    def __init__(self, side: RolloutSide, seed: int, model: ProcessModel) -> None:
        self._side, self._seed, self._model = side, seed, model
        self._calls = 0
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inside: set[asyncio.Future[Any]] = set()
        self.returned = asyncio.Event()
        self.take_counters()

    def take_counters(self) -> None:
        """With every answer."""
        side = self._side
        self.queue, self.rollouter = side.queue.stats(), side.rollouter.stats()
        self.sync = side.synchronizer.status()
        if side.synchronizer.returning:
            self.returned.set()
        else:
            self.returned.clear()

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

    async def ask(self, what: Callable[[], Awaitable[T]]) -> T:
        """What it answers. Raises what the role inside raises, ConnectionError when the process is gone."""
        if self.dead:
            raise ConnectionError("rollout process: process is gone")
        work = asyncio.ensure_future(self._across(what))
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
                work.exception()
            raise ConnectionError("rollout process: process is gone")
        return work.result()

    async def _across(self, what: Callable[[], Awaitable[T]]) -> T:
        await self._way()
        answer = await what()
        self.take_counters()
        await self._way()
        return answer

    async def _way(self) -> None:
        if self._model.way_s:
            self._calls += 1
            await asyncio.sleep(self._model.way_s * uniform("process way", self._seed, self._calls))

    async def look_on(self) -> None:
        """Ask for the counters for ever; raises ConnectionError when the process dies."""

        async def nothing() -> None:
            pass

        while True:
            await asyncio.wait({self._dead}, timeout=_LOOK_EVERY_S)
            await self.ask(nothing)


class QueueThere:
    """`pipelines/protocol.py: Batches`, and what a checkpoint needs of the queue."""

    def __init__(self, process: SimProcess, side: RolloutSide) -> None:
        self._process, self._queue = process, side.queue
        self._position: dict[str, object] = {}

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        """With the position that a checkpoint of `step` needs: the process may be gone by then."""
        groups, self._position = await self._process.ask(partial(self._take, step, num_groups))
        return groups

    async def _take(self, step: int, num_groups: int | None) -> tuple[list[Group], dict[str, object]]:
        return await self._queue.take_batch(step, num_groups), await self._queue.checkpoint_state(step)

    async def freshness(self, step: int) -> BatchFreshness:
        return await self._process.ask(partial(self._queue.freshness, step))

    async def step_trained(self, step: int) -> None:
        await self._process.ask(partial(self._queue.step_trained, step))

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """Of the process; without it, as it was when `step` took its last groups."""
        try:
            return await self._process.ask(partial(self._queue.checkpoint_state, step))
        except ConnectionError:
            if self._position.get("step") != step:
                raise
            return self._position

    async def checkpointed(self, step: int) -> None:
        if not self._process.dead:
            await self._process.ask(partial(self._queue.checkpointed, step))

    def stats(self) -> QueueStats:
        return self._process.queue

    def close(self) -> None:
        if not self._process.dead:
            self._queue.close()


class RollouterThere:
    """`pipelines/protocol.py: Generates`."""

    def __init__(self, process: SimProcess, side: RolloutSide) -> None:
        self._process, self._rollouter = process, side.rollouter

    async def run(self) -> None:
        """The rollouter to its end, or to the end of its process."""
        running = asyncio.ensure_future(self._process.ask(self._rollouter.run))
        looking = asyncio.ensure_future(self._process.look_on())
        try:
            await asyncio.wait({running, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                looking.result()
            await running
        finally:
            for task in (running, looking):
                task.cancel()
            await asyncio.wait({running, looking})

    async def pause(self) -> None:
        await self._process.ask(self._rollouter.pause)

    async def resume(self) -> None:
        await self._process.ask(self._rollouter.resume)

    async def stop(self) -> None:
        await self._process.ask(self._rollouter.stop)

    def stats(self) -> RollouterStats:
        return self._process.rollouter


class SynchronizerThere:
    """`pipelines/protocol.py: Pushes`."""

    def __init__(self, process: SimProcess, side: RolloutSide) -> None:
        self._process, self._synchronizer = process, side.synchronizer

    async def push(self, version: WeightVersion) -> SyncReport:
        return await self._process.ask(partial(self._synchronizer.push, version))

    async def wait_for_returned(self) -> None:
        await self._process.returned.wait()

    async def resync_returned(self, version: WeightVersion) -> None:
        await self._process.ask(partial(self._synchronizer.resync_returned, version))

    def status(self) -> SyncStatus:
        return self._process.sync


class ValidateThere:
    """`pipelines/protocol.py: Validates`."""

    def __init__(self, process: SimProcess, validate: Validates) -> None:
        self._process, self._validate = process, validate

    async def prepare(self, step: int) -> bool:
        return await self._process.ask(partial(self._validate.prepare, step))

    async def __call__(self, step: int) -> Mapping[str, float]:
        return await self._process.ask(partial(self._validate, step))
