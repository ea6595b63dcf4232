"""Moves one weight version from the trainer to every engine: pause, stream buckets, compare digests, commit, resume.

    trainer.export_weights --bucket--> replica 0..n-1 (concurrently) ; the next bucket is gathered while this one loads

A replica serves a version only after it proved that it holds it. A failed attempt leaves the replicas paused at most
until the
retries are used up; a replica that keeps failing is taken out and reported, the run goes on with the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from roll_async.schema import WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """The trainer's side."""

    def export_weights(
        self, version: WeightVersion, transport: str, verify: str
    ) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """The plan, every bucket, then the digest."""


class Replica(Protocol):
    """One engine. ConnectionError from any call: it is gone."""

    name: str

    async def begin_update(self, plan: UpdatePlan) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None: ...

    async def finish_update(self) -> str: ...

    async def commit(self, version: WeightVersion) -> None: ...


class Rollout(Protocol):
    """Who uses the replicas."""

    async def interrupt(self, mode: str, timeout_s: float) -> None: ...

    async def release(self) -> None: ...


class SyncState(Enum):
    """Where a push is."""

    IDLE = "idle"
    PAUSING = "pausing"
    TRANSFERRING = "transferring"
    VERIFYING = "verifying"
    RESUMING = "resuming"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The part of the config a push obeys. Times in seconds of the loop."""

    transport: str
    verify: str = "sample"
    interrupt_mode: str = "resume"
    interrupt_timeout_s: float = 30.0
    max_retries: int = 3
    timeout_s: float = 300.0
    retry_delay_s: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One finished push."""

    version: WeightVersion
    total_s: float
    pause_s: float
    transfer_s: float
    num_bytes: int
    attempts: int
    replicas: int


class SyncFailed(RuntimeError):
    """No replica holds the version after all retries."""


class ParameterSynchronizer:
    """One push at a time. Counters feed `param_sync_count`, `sync_failures`."""

    def __init__(
        self,
        source: WeightSource,
        rollout: Rollout,
        replicas: Callable[[], Sequence[Replica]],
        options: SyncOptions,
        *,
        weights_held: Callable[[WeightVersion], None],
        take_out: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._source, self._rollout, self._replicas, self._options = source, rollout, replicas, options
        self._weights_held, self._take_out = weights_held, take_out
        self.state = SyncState.IDLE
        self.param_sync_count = 0
        self.sync_failures = 0
        self.version: WeightVersion | None = None
        self._deadline = 0.0

    async def push(self, version: WeightVersion) -> SyncReport:
        """Bring every replica to `version`. Raises SyncFailed when none could be brought there, TimeoutError when
        engines do not pause.
        """
        loop, options = asyncio.get_running_loop(), self._options
        started = loop.time()
        self.state = SyncState.PAUSING
        try:
            await self._rollout.interrupt(options.interrupt_mode, options.interrupt_timeout_s)
            paused = loop.time()
            num_bytes, attempts = await self._transfer_with_retries(version)
            transferred = loop.time()
            self.state = SyncState.RESUMING
            await self._rollout.release()
        finally:
            self.state = SyncState.IDLE
        self.version = version
        self.param_sync_count += 1
        self._weights_held(version)
        report = SyncReport(
            version=version,
            total_s=loop.time() - started,
            pause_s=paused - started,
            transfer_s=transferred - paused,
            num_bytes=num_bytes,
            attempts=attempts,
            replicas=len(self._replicas()),
        )
        logger.info(
            "Parameter sync: version %d on %d replicas, %.1f MiB in %.3f s (pause %.3f s, attempt %d)",
            version, report.replicas, num_bytes / 2**20, report.transfer_s, report.pause_s, attempts,
        )  # fmt: skip
        return report

    async def _transfer_with_retries(self, version: WeightVersion) -> tuple[int, int]:
        """(bytes, attempts). Replicas that fail the last attempt are taken out as long as others succeed."""
        waiting = list(self._replicas())
        failures: dict[str, str] = {}
        num_bytes = 0
        for attempt in range(1, self._options.max_retries + 2):
            if attempt > 1:
                self.sync_failures += 1
                logger.warning(
                    "Parameter sync: version %d attempt %d failed: %s; trying again", version, attempt - 1, failures
                )
                await asyncio.sleep(self._options.retry_delay_s)
            alive = {r.name for r in self._replicas()}
            waiting = [r for r in waiting if r.name in alive]
            try:
                num_bytes, failures = await self._transfer(version, waiting)
            except TimeoutError:  # of the trainer: no replica can have the version
                failures = {r.name: f"the trainer sent nothing within {self._late()}" for r in waiting}
            waiting = [r for r in waiting if r.name in failures]
            if not waiting:
                return num_bytes, attempt
        self.sync_failures += 1
        if len(waiting) == len(self._replicas()):
            raise SyncFailed(
                f"Parameter sync: version {version} reached no engine after {self._options.max_retries} retries: "
                f"{failures}"
            )
        for replica in waiting:
            logger.error("Parameter sync: %s is taken out: %s", replica.name, failures[replica.name])
            await self._take_out(replica.name, failures[replica.name])
        return num_bytes, self._options.max_retries + 1

    async def _transfer(self, version: WeightVersion, replicas: Sequence[Replica]) -> tuple[int, dict[str, str]]:
        """One attempt: (bytes, failure reason by replica)."""
        self.state = SyncState.TRANSFERRING
        failures: dict[str, str] = {}
        num_bytes, digest = 0, ""
        export = self._source.export_weights(version, self._options.transport, self._options.verify)
        self._deadline = asyncio.get_running_loop().time() + self._options.timeout_s
        try:
            while True:
                async with asyncio.timeout_at(self._deadline):
                    item = await anext(export, None)
                if item is None:
                    break
                left = [r for r in replicas if r.name not in failures]
                if isinstance(item, UpdatePlan):
                    await self._each(left, failures, lambda r, plan=item: r.begin_update(plan))
                elif isinstance(item, Bucket):
                    num_bytes += item.num_bytes
                    await self._each(left, failures, lambda r, bucket=item: r.load_bucket(bucket))
                else:
                    digest = item
        finally:
            await export.aclose()  # type: ignore[attr-defined]
        self.state = SyncState.VERIFYING
        left = [r for r in replicas if r.name not in failures]
        await self._each(left, failures, lambda r: self._prove(r, digest, version))
        return num_bytes, failures

    async def _prove(self, replica: Replica, digest: str, version: WeightVersion) -> None:
        held = await replica.finish_update()
        if held != digest:
            raise RuntimeError(f"holds digest {held}, the trainer sent {digest}")
        await replica.commit(version)

    async def _each(
        self, replicas: Sequence[Replica], failures: dict[str, str], call: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Call all at once. Who is not done at the deadline has failed; the others get a deadline of their own, so that
        a hanging replica costs time and not the version.
        """
        if not replicas:
            return
        loop = asyncio.get_running_loop()
        calls = {asyncio.ensure_future(call(r)): r for r in replicas}
        try:
            done, late = await asyncio.wait(calls, timeout=max(0.0, self._deadline - loop.time()))
        finally:
            for task in calls:
                task.cancel()
        for task in late:
            failures[calls[task].name] = f"not done within {self._late()}"
        if late:
            self._deadline = loop.time() + self._options.timeout_s
        for task in done:
            error = task.exception()
            if isinstance(error, (RuntimeError, ConnectionError, ValueError, OSError)):
                failures[calls[task].name] = f"{type(error).__name__}: {error}"
            elif error is not None:
                raise error

    def _late(self) -> str:
        return f"sync_timeout {self._options.timeout_s:g} s"
