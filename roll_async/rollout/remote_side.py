"""A generating side in a process of its own: the driver's clients of its roles, and what answers them inside.

    TrainLoop -- QueueClient, RollouterClient, SynchronizerClient --> RpcChannel ))) RolloutServer --> queue, ...

The channel is Ray's (`cluster/roles/rollout_process.py`) or the virtual clock's (`simulator/parts/process.py`);
everything else is the same object in both. Counters of the clients are those of the last answer; every answer contains
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from roll_async.buffer.errors import StallError, first_cause
from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueStats
from roll_async.rollout.protocol import ValidationMeasure
from roll_async.rollout.rollouter import Rollouter, RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.weight_sync.canary import CanaryReport
from roll_async.weight_sync.protocol import SyncReport, SyncStatus
from roll_async.weight_sync.push import ParameterSynchronizer

logger = logging.getLogger(__name__)

ROLE = "rollout process"


class CoupledRollout(Protocol):
    """The roles of one run, see `pipelines/wire.py: RolloutSide`."""

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


class RolloutCalls(Protocol):
    """Everything that the driver asks of the roles in the process."""

    async def take_batch(self, step: int, num_groups: int | None) -> tuple[list[Group], dict[str, object]]:
        """The groups, with the position that a checkpoint of `step` needs if this process has died by then."""
        ...

    async def freshness(self, step: int) -> BatchFreshness: ...

    async def step_trained(self, step: int) -> None: ...

    async def checkpoint_state(self, step: int) -> dict[str, object]: ...

    async def checkpointed(self, step: int) -> None: ...

    async def run(self) -> None:
        """Run the rollouter to its end."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...

    async def push(self, version: WeightVersion) -> SyncReport: ...

    async def checked(self) -> CanaryReport | None: ...

    async def resync_returned(self, version: WeightVersion) -> None: ...

    async def prepare_validation(self, step: int) -> bool: ...

    async def validate(self, step: int) -> Mapping[str, float]: ...

    async def look(self) -> None:
        """For the counters, which come with every answer."""


WAITS = frozenset(
    {
        RolloutCalls.take_batch,
        RolloutCalls.run,
        RolloutCalls.push,
        RolloutCalls.checked,
        RolloutCalls.resync_returned,
        RolloutCalls.prepare_validation,
        RolloutCalls.validate,
        RolloutCalls.look,
    }
)
"""Calls without a fixed duration. Their waits have owners and deadlines in the process; `RpcChannel.watch` detects a
process that does not answer.
"""


class RolloutServer:
    """The roles inside the process. Implements RolloutCalls."""

    def __init__(self, side: CoupledRollout) -> None:
        self._side = side
        queue, rollouter, synchronizer = side.queue, side.rollouter, side.synchronizer
        self.freshness, self.step_trained = queue.freshness, queue.step_trained
        self.checkpoint_state, self.checkpointed = queue.checkpoint_state, queue.checkpointed
        self.pause, self.resume, self.stop = rollouter.pause, rollouter.resume, rollouter.stop
        self.push, self.checked = synchronizer.push, synchronizer.checked
        self.resync_returned = synchronizer.resync_returned

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

    async def take_batch(self, step: int, num_groups: int | None) -> tuple[list[Group], dict[str, object]]:
        return await self._side.queue.take_batch(step, num_groups), await self._side.queue.checkpoint_state(step)

    async def run(self) -> None:
        try:
            await self._side.rollouter.run()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def prepare_validation(self, step: int) -> bool:
        assert self._side.validate is not None
        return await self._side.validate.prepare(step)

    async def validate(self, step: int) -> Mapping[str, float]:
        assert self._side.validate is not None
        return await self._side.validate(step)

    async def look(self) -> None: ...


class RpcChannel:
    """The way to a `RolloutServer` in another process, and its counters as of the last answer."""

    calls: RolloutCalls
    """Raise what the role inside raised, ConnectionError when the process is gone, StallError when the answer does not
    come in time. Cancelling the wait for an answer cancels the call.
    """

    def __init__(self) -> None:
        self._counters: Counters | None = None
        self.returned = asyncio.Event()
        """Set while a restarted engine waits for weights."""

    @property
    def counters(self) -> Counters:
        assert self._counters is not None, "build first"
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

    async def watch(self) -> None:
        """Poll the counters. Raises StallError when the process does not answer, ConnectionError when it dies."""
        raise NotImplementedError

    def close_queue(self) -> None:
        """Does not wait for the answer."""
        raise NotImplementedError


class QueueClient:
    """`pipelines/protocol.py: BatchQueue`."""

    def __init__(self, channel: RpcChannel) -> None:
        self._channel, self._calls = channel, channel.calls
        self.freshness, self.step_trained = channel.calls.freshness, channel.calls.step_trained
        self.checkpointed, self.close = channel.calls.checkpointed, channel.close_queue
        self._positions: dict[int, dict[str, object]] = {}
        """By step: of the newest, and of the one before, which is the last whole one until the newest is learned."""

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        groups, position = await self._calls.take_batch(step, num_groups)
        self._positions = {s: p for s, p in self._positions.items() if s == step - 1} | {step: position}
        return groups

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """The position that the process reports. If it has died, that of the moment when `step` took its last groups:
        groups that finished since then are generated again.
        """
        try:
            return await self._calls.checkpoint_state(step)
        except (ConnectionError, StallError) as error:  # it has died or hangs; what it raises is raised
            if (position := self._positions.get(step)) is None:
                raise
            logger.warning("step %d is saved without the %s: %s", step, ROLE, error)
            return position

    def stats(self) -> QueueStats:
        return self._channel.counters.queue


class RollouterClient:
    """`pipelines/protocol.py: Generator`."""

    def __init__(self, channel: RpcChannel) -> None:
        self._channel = channel
        self.pause, self.resume, self.stop = channel.calls.pause, channel.calls.resume, channel.calls.stop

    async def run(self) -> None:
        """Run the rollouter to its end, or to the end of its process."""
        running = asyncio.ensure_future(self._channel.calls.run())
        watching = asyncio.ensure_future(self._channel.watch())
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                watching.result()  # raises: the watch ends by an error alone
            await running
        finally:
            for task in (running, watching):
                task.cancel()
            await asyncio.wait({running, watching})

    def stats(self) -> RollouterStats:
        return self._channel.counters.rollouter


class SynchronizerClient:
    """`pipelines/protocol.py: WeightPusher`."""

    def __init__(self, channel: RpcChannel) -> None:
        self._channel = channel
        self.push, self.checked = channel.calls.push, channel.calls.checked
        self.resync_returned = channel.calls.resync_returned

    async def wait_for_returned(self) -> None:
        await self._channel.returned.wait()

    def status(self) -> SyncStatus:
        return self._channel.counters.sync


class ValidateClient:
    """`ValidationMeasure`."""

    def __init__(self, calls: RolloutCalls) -> None:
        self.prepare, self._validate = calls.prepare_validation, calls.validate

    async def __call__(self, step: int) -> Mapping[str, float]:
        return await self._validate(step)


class RolloutClient:
    """Clients of these roles, for the driver."""

    def __init__(self, channel: RpcChannel, *, validates: bool) -> None:
        self.queue, self.rollouter = QueueClient(channel), RollouterClient(channel)
        self.synchronizer = SynchronizerClient(channel)
        self.validate = ValidateClient(channel.calls) if validates else None
