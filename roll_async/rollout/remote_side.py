"""A generating side in a process of its own: the driver's clients of its roles, and what answers them inside.

    TrainLoop -- QueueClient, RollouterClient, SynchronizerClient --> Border ))) HostedSide --> queue, rollouter, ...

The border is Ray's (`cluster/rollout_process.py`) or the virtual clock's (`simulator/process.py`); everything else is
the same object in both. Counters of the clients are those of the last answer; every answer contains them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from roll_async.buffer.errors import StallError, first_cause
from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueStats
from roll_async.rollout.protocol import ValidationMeasure
from roll_async.rollout.rollouter import Rollouter, RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.weight_sync.canary import CanaryReport
from roll_async.weight_sync.synchronizer import ParameterSynchronizer, SyncReport, SyncStatus

logger = logging.getLogger(__name__)

ROLE = "rollout process"


class CoupledRollout(Protocol):
    """The coupled roles, see `pipelines/wire.py: RolloutSide`."""

    @property
    def queue(self) -> MessageQueue: ...

    @property
    def rollouter(self) -> Rollouter: ...

    @property
    def synchronizer(self) -> ParameterSynchronizer: ...

    @property
    def validate(self) -> ValidationMeasure | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Counters of the process at one instant."""

    taken_s: float
    """Time of its loop."""
    queue: QueueStats
    rollouter: RollouterStats
    sync: SyncStatus
    returning: bool
    """A restarted engine waits for weights."""
    warnings: tuple[str, ...] = ()
    """Lines logged since the previous answer: they are in the log files, and are printed on the console of the run."""


class RolloutServer:
    """The roles inside the process, called by name."""

    def __init__(self, side: CoupledRollout) -> None:
        self._side = side
        queue, rollouter, synchronizer = side.queue, side.rollouter, side.synchronizer
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "take_batch": self._take_batch,
            "freshness": queue.freshness,
            "step_trained": queue.step_trained,
            "checkpoint_state": queue.checkpoint_state,
            "checkpointed": queue.checkpointed,
            "run": self._run,
            "pause": rollouter.pause,
            "resume": rollouter.resume,
            "stop": rollouter.stop,
            "push": synchronizer.push,
            "checked": synchronizer.checked,
            "resync_returned": synchronizer.resync_returned,
            "counters": self._nothing,
        }
        if side.validate is not None:
            self._calls |= {"validate": side.validate, "prepare_validation": side.validate.prepare}

    async def answer(self, what: str, *args: object) -> Any:
        """The result of a call; raises what the role raises."""
        return await self._calls[what](*args)

    def counters(self, warnings: tuple[str, ...] = ()) -> Counters:
        """Of now."""
        side = self._side
        return Counters(
            taken_s=asyncio.get_running_loop().time(),
            queue=side.queue.stats(),
            rollouter=side.rollouter.stats(),
            sync=side.synchronizer.status(),
            returning=side.synchronizer.returning,
            warnings=warnings,
        )

    def close_queue(self) -> None:
        """At the end of a run."""
        self._side.queue.close()

    async def _take_batch(self, step: int, num_groups: int | None) -> tuple[list[Group], dict[str, object]]:
        """The groups, with the position that a checkpoint of `step` needs if this process has died by then."""
        return await self._side.queue.take_batch(step, num_groups), await self._side.queue.checkpoint_state(step)

    async def _run(self) -> None:
        """Run the rollouter to its end."""
        try:
            await self._side.rollouter.run()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def _nothing(self) -> None: ...


class RpcChannel:
    """Calls to a `RolloutServer` in another process, and its counters as of the last answer."""

    def __init__(self) -> None:
        self._counters: Counters | None = None
        self.returned = asyncio.Event()
        """Set while a restarted engine waits for weights."""

    @property
    def counters(self) -> Counters:
        assert self._counters is not None, "couple first"
        return self._counters

    def update(self, counters: Counters) -> None:
        """Store the counters, unless a later answer has arrived before this one."""
        if self._counters is not None and counters.taken_s < self._counters.taken_s:
            return
        self._counters = counters
        if counters.returning:
            self.returned.set()
        else:
            self.returned.clear()

    async def ask(self, what: str, *args: object) -> Any:
        """The answer to a call; raises what the role inside raised, ConnectionError when the process is gone.
        Cancelling the wait cancels the call. Raises StallError when the answer does not come in time.
        """
        raise NotImplementedError

    async def wait(self, what: str, *args: object) -> Any:
        """As `ask`, for calls without a fixed duration: the rollouter's run, the next batch, a push, a validation.
        Their waits have owners and deadlines in the process; `watch` detects a process that does not answer.
        """
        raise NotImplementedError

    async def watch(self) -> None:
        """Poll the counters. Raises StallError when the process does not answer, ConnectionError when it dies."""
        raise NotImplementedError

    def close_queue(self) -> None:
        """Does not wait for the answer."""
        raise NotImplementedError


class QueueClient:
    """`pipelines/protocol.py: BatchQueue`."""

    def __init__(self, border: RpcChannel) -> None:
        self._border = border
        self._positions: dict[int, dict[str, object]] = {}
        """By step: of the newest, and of the one before, which is the last whole one until the newest is learned."""

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        groups, position = await self._border.wait("take_batch", step, num_groups)
        self._positions = {s: p for s, p in self._positions.items() if s == step - 1} | {step: position}
        return groups

    async def freshness(self, step: int) -> BatchFreshness:
        return await self._border.ask("freshness", step)

    async def step_trained(self, step: int) -> None:
        await self._border.ask("step_trained", step)

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """The position that the process reports. If it has died, that of the moment when `step` took its last groups:
        groups that finished since then are generated again.
        """
        try:
            return await self._border.ask("checkpoint_state", step)
        except (ConnectionError, StallError) as error:  # it has died or hangs; what it raises is raised
            if (position := self._positions.get(step)) is None:
                raise
            logger.warning("step %d is saved without the %s: %s", step, ROLE, error)
            return position

    async def checkpointed(self, step: int) -> None:
        await self._border.ask("checkpointed", step)

    def stats(self) -> QueueStats:
        return self._border.counters.queue

    def close(self) -> None:
        self._border.close_queue()


class RollouterClient:
    """`pipelines/protocol.py: Generator`."""

    def __init__(self, border: RpcChannel) -> None:
        self._border = border

    async def run(self) -> None:
        """Run the rollouter to its end, or to the end of its process."""
        running = asyncio.ensure_future(self._border.wait("run"))
        watching = asyncio.ensure_future(self._border.watch())
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                watching.result()
            await running
        finally:
            for task in (running, watching):
                task.cancel()
            await asyncio.wait({running, watching})

    async def pause(self) -> None:
        await self._border.ask("pause")

    async def resume(self) -> None:
        await self._border.ask("resume")

    async def stop(self) -> None:
        await self._border.ask("stop")

    def stats(self) -> RollouterStats:
        return self._border.counters.rollouter


class SynchronizerClient:
    """`pipelines/protocol.py: WeightPusher`."""

    def __init__(self, border: RpcChannel) -> None:
        self._border = border

    async def push(self, version: WeightVersion) -> SyncReport:
        return await self._border.wait("push", version)

    async def checked(self) -> CanaryReport | None:
        return await self._border.wait("checked")

    async def wait_for_returned(self) -> None:
        await self._border.returned.wait()

    async def resync_returned(self, version: WeightVersion) -> None:
        await self._border.wait("resync_returned", version)

    def status(self) -> SyncStatus:
        return self._border.counters.sync


class ValidateClient:
    """`ValidationMeasure`."""

    def __init__(self, border: RpcChannel) -> None:
        self._border = border

    async def prepare(self, step: int) -> bool:
        return await self._border.wait("prepare_validation", step)

    async def __call__(self, step: int) -> Mapping[str, float]:
        return await self._border.wait("validate", step)


class RolloutClient:
    """Clients of the coupled roles, for the driver."""

    def __init__(self, border: RpcChannel, *, validates: bool) -> None:
        self.queue, self.rollouter = QueueClient(border), RollouterClient(border)
        self.synchronizer = SynchronizerClient(border)
        self.validate = ValidateClient(border) if validates else None
