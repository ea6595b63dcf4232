"""The rollout side of a run as a Ray actor: queue, rollouter, server manager and synchronizer in one process.

The driver calls it through the clients of `rollout_process.py`. Queue and ledger are in the process that fills them, so
every change of a group's state, "consumed by step t" included, is one transaction of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol

import ray

from roll_async.cluster.gc_policy import defer_gc_during_startup
from roll_async.cluster.remote import served
from roll_async.observe.machine import peak_bytes_of_self
from roll_async.observe.run_folder import log_to
from roll_async.observe.trace import Phase, StartTimeline
from roll_async.rollout.remote_side import Counters, CoupledRollout, RolloutServer

_CONCURRENT_CALLS = 32
"""Concurrent calls of the driver: the rollouter's run, a batch, a push, the counters."""


class RunningRoles(Protocol):
    """What runs before there is a run: `launch/rollout.py: StartedRollout`, which knows what its `build` takes."""

    @property
    def build(self) -> Callable[..., Awaitable[CoupledRollout]]: ...


StartRoles = Callable[[AsyncExitStack], Awaitable[RunningRoles]]
"""Starts engines and rewards; they close with the stack."""


class HostStart(Protocol):
    """Calls that start the process."""

    async def start(self) -> Sequence[Phase]: ...

    async def build(self, *run: object) -> tuple[bool, Counters]: ...


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
@served({})
class RolloutHost:
    """The process, plain asyncio inside. Every answer of the roles comes with the counters."""

    def __init__(self, start: StartRoles, log_files: Sequence[str]) -> None:
        self._start, self._stack, self._warnings = start, AsyncExitStack(), _Warnings()
        log_to(log_files).addHandler(self._warnings)  # the console is the driver's, which prints them

    async def start(self) -> Sequence[Phase]:
        """Start engines and rewards. Returns the phases of it."""
        with StartTimeline().current() as timeline, defer_gc_during_startup(settled=True):
            self._roles = await self._start(self._stack)
        return timeline.take()

    async def build(self, *run: object) -> tuple[bool, Counters]:
        """Build queue, rollouter and synchronizer. Returns also whether there are validation prompts."""
        side = await self._roles.build(*run)
        self._hosted = RolloutServer(side)
        return side.validate is not None, self._counters()

    async def answer(self, method: str, *args: object) -> tuple[object, Counters]:
        """The result of a call of `rollout/remote_side.py: RolloutCalls`."""
        return await getattr(self._hosted, method)(*args), self._counters()

    def _counters(self) -> Counters:
        """Of the roles, with the memory of this process."""
        counters = self._hosted.counters(self._warnings.take())
        memory = {"memory/rollout_peak_bytes": float(peak_bytes_of_self())}
        rollouter = replace(counters.rollouter, source={**counters.rollouter.source, **memory})
        return replace(counters, rollouter=rollouter)

    async def close_queue(self) -> None:
        self._hosted.close_queue()

    async def close(self) -> None:
        """Close the queue, whose finished groups are in the ledger; then end the engines."""
        await self._stack.aclose()
