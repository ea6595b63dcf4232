"""The rollout side of a run as a Ray actor: queue, rollouter, server manager and synchronizer in one process.

The driver calls it through the clients of `rollout_process.py`. Queue and ledger are in the process that fills them, so
every change of a group's state, "consumed by step t" included, is one transaction of one process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import ray

from roll_async.buffer.errors import first_cause
from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import QueueStats
from roll_async.cluster.garbage import start_without_collections
from roll_async.observe.run_folder import log_to
from roll_async.rollout.rollouter import Rollouter, RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.weight_sync.synchronizer import ParameterSynchronizer, SyncReport, SyncStatus

_CONCURRENT_CALLS = 32
"""Concurrent calls of the driver: the rollouter's run, a batch, a push, the counters."""


class Validates(Protocol):
    """See `pipelines/protocol.py`."""

    async def prepare(self, step: int) -> bool: ...

    async def __call__(self, step: int) -> Mapping[str, float]: ...


class Side(Protocol):
    """The coupled roles, see `pipelines/wire.py: RolloutSide`."""

    @property
    def queue(self) -> MessageQueue: ...

    @property
    def rollouter(self) -> Rollouter: ...

    @property
    def synchronizer(self) -> ParameterSynchronizer: ...

    @property
    def validate(self) -> Validates | None: ...


class Roles(Protocol):
    """The running roles before they are coupled. The type of the spec is the launcher's (`launch/rollout.py`)."""

    @property
    def couple(self) -> Callable[..., Awaitable[Side]]: ...


StartRoles = Callable[[AsyncExitStack], Awaitable[Roles]]
"""Starts engines and rewards; they close with the stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Counters of the rollout process at one instant."""

    taken_s: float
    """Time of its loop."""
    queue: QueueStats
    rollouter: RollouterStats
    sync: SyncStatus
    returning: bool
    """A restarted engine waits for weights."""
    warnings: tuple[str, ...]
    """Lines logged since the previous answer: they are in the log files, and are printed on the console of the run."""


class _Warnings(logging.Handler):
    """Collects log lines for the console until the next answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname}: {record.getMessage()}")

    def take(self) -> tuple[str, ...]:
        lines, self._lines = self._lines, []
        return tuple(lines)


# Ray's overloads lack max_concurrency, so that pyright takes the class for one that is not remote.
@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=_CONCURRENT_CALLS)  # pyright: ignore[reportCallIssue]
class RolloutHost:
    """The process, plain asyncio inside. Calls that change a counter also return the counters."""

    def __init__(self, start: StartRoles, log_files: Sequence[str]) -> None:
        self._start, self._stack, self._warnings = start, AsyncExitStack(), _Warnings()
        log_to(log_files).addHandler(self._warnings)

    async def start(self) -> None:
        """Start engines and rewards."""
        with start_without_collections(settled=True):
            self._roles = await self._start(self._stack)

    async def couple(self, spec: object) -> tuple[bool, Counters]:
        """Build queue, rollouter and synchronizer. Returns also whether there are validation prompts."""
        self._side = await self._roles.couple(spec)
        return self._side.validate is not None, self._counters()

    def _counters(self) -> Counters:
        side = self._side
        return Counters(
            taken_s=asyncio.get_running_loop().time(),
            queue=side.queue.stats(),
            rollouter=side.rollouter.stats(),
            sync=side.synchronizer.status(),
            returning=side.synchronizer.returning,
            warnings=self._warnings.take(),
        )

    async def counters(self) -> Counters:
        return self._counters()

    async def take_batch(self, step: int, num_groups: int | None) -> tuple[list[Group], Counters, dict[str, object]]:
        """The groups, with the position that a checkpoint of `step` needs if this process has died by then."""
        groups = await self._side.queue.take_batch(step, num_groups)
        return groups, self._counters(), await self._side.queue.checkpoint_state(step)

    async def freshness(self, step: int) -> BatchFreshness:
        return await self._side.queue.freshness(step)

    async def step_trained(self, step: int) -> Counters:
        await self._side.queue.step_trained(step)
        return self._counters()

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        return await self._side.queue.checkpoint_state(step)

    async def checkpointed(self, step: int) -> None:
        await self._side.queue.checkpointed(step)

    async def close_queue(self) -> None:
        self._side.queue.close()

    async def run(self) -> Counters:
        """Run the rollouter to its end."""
        try:
            await self._side.rollouter.run()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return self._counters()

    async def pause(self) -> None:
        await self._side.rollouter.pause()

    async def resume(self) -> None:
        await self._side.rollouter.resume()

    async def stop(self) -> Counters:
        await self._side.rollouter.stop()
        return self._counters()

    async def push(self, version: WeightVersion) -> tuple[SyncReport, Counters]:
        report = await self._side.synchronizer.push(version)
        return report, self._counters()

    async def resync_returned(self, version: WeightVersion) -> Counters:
        await self._side.synchronizer.resync_returned(version)
        return self._counters()

    async def validate(self, step: int) -> tuple[Mapping[str, float], Counters]:
        assert self._side.validate is not None, "nothing to validate with"
        metrics = await self._side.validate(step)
        return metrics, self._counters()

    async def prepare_validation(self, step: int) -> tuple[bool, Counters]:
        assert self._side.validate is not None, "nothing to validate with"
        prepared = await self._side.validate.prepare(step)
        return prepared, self._counters()

    async def close(self) -> None:
        """Close the queue, whose finished groups are in the ledger; then end the engines."""
        await self._stack.aclose()
