"""Moves one weight version from the trainer to every engine: stream buckets, compare digests, pause, swap, resume.

    trainer.export_weights --bucket--> replica 0..n-1 (concurrently) ; the next bucket is gathered while this one loads

With a staged transport engines generate during the transfer and are paused only for the swap; a transfer that fails
leaves them on the version they serve. Other transports load into the served weights, so engines are paused first.
Either way a replica serves a version only after its digest proved that it holds it. A replica that keeps failing is
removed and reported, the run goes on with the others, and a restarted replica may rejoin with the next push.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

from roll_async.config.schema import PipelineConfig
from roll_async.schema import WeightVersion
from roll_async.weight_sync.adapters import adapters_of
from roll_async.weight_sync.bucket import FILES, STAGED, Bucket, UpdatePlan
from roll_async.weight_sync.calls import ReplicaCalls
from roll_async.weight_sync.canary import Canary, CanaryReport
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.export_plans import ExportPlanner
from roll_async.weight_sync.protocol import (
    OWN_DEVICES,
    DevicePhase,
    Devices,
    Rollout,
    UpdatedReplica,
    WeightSource,
)
from roll_async.weight_sync.transports import sends_changes

logger = logging.getLogger(__name__)

Replica = TypeVar("Replica", bound=UpdatedReplica)
"""The owner's type of replicas; `readmit` is called with the same objects."""


class SyncState(Enum):
    """Phase of a push."""

    IDLE = "idle"
    PAUSING = "pausing"  # engines finish or abort their requests
    TRANSFERRING = "transferring"  # buckets are sent and loaded
    VERIFYING = "verifying"  # digests of the replicas are compared
    WAITING_TO_RETRY = "waiting_to_retry"
    COMMITTING = "committing"  # verified weights become the served ones
    RESUMING = "resuming"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The options of a push. Times in seconds of the loop."""

    transport: str
    verify: str = "sample"
    interrupt_mode: str = "resume"
    interrupt_timeout_s: float = 30.0
    max_retries: int = 3
    timeout_s: float = 300.0
    """Limit of one attempt to transfer, and of the swap."""
    retry_delay_s: float = 1.0
    sparse: bool = False
    """Send only what changed to replicas that hold what the last export sent."""
    adapters: bool = False
    """Send only the adapters to replicas that hold the weights below them."""

    @classmethod
    def of(cls, config: PipelineConfig, transport: str) -> SyncOptions:
        """Options of a weight push as in the config. `transport`: the result of `choose_transport`."""
        a = config.async_training
        return cls(
            transport=transport,
            verify=config.weight_sync.verify,
            interrupt_mode=a.interrupt.mode,
            interrupt_timeout_s=a.interrupt.timeout,
            max_retries=a.max_sync_retries,
            timeout_s=a.sync_timeout,
            retry_delay_s=a.sync_retry_delay,
            sparse=sends_changes(config.weight_sync.sparse, transport),
            adapters=adapters_of(config) is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One finished push."""

    version: WeightVersion
    total_s: float
    pause_s: float
    """Seconds until the engines were paused."""
    transfer_s: float
    """Seconds until the digests of all replicas were verified, all attempts together."""
    stopped_s: float
    """Seconds from the interruption until the engines go on, in which none generated."""
    num_bytes: int
    """Sent by the trainer in the last attempt."""
    sent_share: float
    """Values sent of all values; below 1 where only changes were sent."""
    attempts: int
    replicas: int
    """Replicas that serve the version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncStatus:
    """A snapshot for monitoring and error messages."""

    state: SyncState
    version: WeightVersion | None
    """Newest version that the engines serve."""
    target: WeightVersion | None
    """Version being pushed."""
    attempt: int
    param_sync_count: int
    sync_failures: int
    failures: dict[str, str] = field(default_factory=dict)
    """Replica name to the reason of its last failure, cleared when it holds a version."""
    removed: tuple[str, ...] = ()


class SyncFailed(RuntimeError):
    """No replica holds the version after all retries."""


@dataclass(slots=True)
class _Push(Generic[Replica]):
    """The state of one push."""

    version: WeightVersion
    started_s: float
    waiting: list[Replica]
    """Replicas that do not hold the weights yet."""
    canary: Canary | None = None
    """Checks what the replicas compute with them."""
    late: list[Replica] = field(default_factory=list)
    """Replicas that missed the deadline of a call; this push does not try them again: it would be a second time-out."""
    proved: list[Replica] = field(default_factory=list)
    """Replicas whose digest is verified; they serve the weights after their commit."""
    serving: list[Replica] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    buckets: list[Bucket] = field(default_factory=list)
    """Sent in the present attempt."""
    interrupted_s: float | None = None
    pause_s: float = 0.0
    transfer_s: float = 0.0


class ParameterSynchronizer(Generic[Replica]):
    """One push at a time; `status` is a snapshot of it."""

    def __init__(
        self,
        source: WeightSource,
        rollout: Rollout,
        replicas: Callable[[], Sequence[Replica]],
        options: SyncOptions,
        *,
        weights_held: Callable[[WeightVersion], None],
        remove_replica: Callable[[str, str], Awaitable[None]],
        readmit: Callable[[Replica], Awaitable[None]],
        expects_return: Callable[[], bool],
        canary: Canary | None = None,
        devices: Devices = OWN_DEVICES,
    ) -> None:
        self._source, self._rollout, self._replicas, self._options = source, rollout, replicas, options
        self._devices = devices
        self._weights_held, self._remove, self._readmit = weights_held, remove_replica, readmit
        self._canary = canary
        self._expects_return = expects_return
        self._push: _Push[Replica] | None = None
        self._returning: dict[str, Replica] = {}
        self._returned = asyncio.Event()
        self._removed: dict[str, None] = {}
        self._state = SyncState.IDLE
        self._calls = ReplicaCalls[Replica](self._alive_ids, options.timeout_s)
        common = UpdatePlan(version=0, transport=options.transport, verify=options.verify)
        self._plans = ExportPlanner[Replica](common, sparse=options.sparse, adapters=options.adapters)
        self.param_sync_count = 0
        self.sync_failures = 0
        self.version: WeightVersion | None = None

    def status(self) -> SyncStatus:
        """A snapshot of the current push and the counters."""
        push = self._push
        return SyncStatus(
            state=self._state,
            version=self.version,
            target=None if push is None else push.version,
            attempt=0 if push is None else push.attempt,
            param_sync_count=self.param_sync_count,
            sync_failures=self.sync_failures,
            failures={} if push is None else dict(push.failures),
            removed=tuple(self._removed),
        )

    def rejoin(self, replica: Replica) -> None:
        """Give a new or restarted, paused replica the weights with the next push or `resync_returned`, then hand it to
        `readmit`.
        """
        self._returning[replica.name] = replica
        self._returned.set()

    def forget(self, name: str) -> None:
        """This replica wants no weights any more."""
        self._returning.pop(name, None)

    @property
    def returning(self) -> bool:
        """Whether a restarted replica waits for `resync_returned`."""
        return self._returned.is_set()

    async def wait_for_returned(self) -> None:
        """Return when a restarted replica waits for `resync_returned`."""
        await self._returned.wait()

    async def resync_returned(self, version: WeightVersion) -> None:
        """Give restarted replicas the trainer's current weights, between pushes; the others continue generating.

        `version`: the newest whose training the current weights contain in full. The others may serve an older one.
        Raises EngineMismatch as `push` does.
        """
        assert self._push is None, f"resync_returned with version {version} during a push"
        now = asyncio.get_running_loop().time()
        waiting = list(self._returning.values())
        self._push = push = _Push(version=version, started_s=now, waiting=waiting, interrupted_s=now)
        self._returned.clear()
        try:
            await self._transfer_and_commit(push)
            await self._remove_failed(push)
            back = await self._readmit_serving(push)
            if self._canary is not None:
                await self._canary.check_returned(version, back)
        finally:
            self._push = None
            self._enter(SyncState.IDLE)

    async def push(self, version: WeightVersion) -> SyncReport:
        """Bring every replica to `version`.

        Raises SyncFailed when no replica holds it after all retries, ConnectionError when none is left, EngineMismatch
        when one computes other log-probs and `weight_sync.on_mismatch` is stop.
        """
        assert self._push is None, f"push of version {version} during the push of another"
        waiting = [*self._replicas(), *self._returning.values()]
        now = asyncio.get_running_loop().time()
        self._push = push = _Push(version=version, started_s=now, waiting=waiting, canary=self._canary)
        self._returned.clear()
        try:
            if self._canary is not None:
                await self._canary.before_push(version)
            if self._options.transport not in STAGED:
                await self._interrupt(push)
            await self._transfer_and_commit(push)
            if not push.serving:
                await self._continue_without_engines(push)
            await self._remove_failed(push)
            self._enter(SyncState.RESUMING)
            await self._rollout.release()
            self.version = version
            self.param_sync_count += 1
            self._weights_held(version)
            report = self._report(push)  # engines generate: those that return need not hold the queue, or the figures
            await self._readmit_serving(push)
            if self._canary is not None:
                await self._canary.score_on_engines(version, push.serving)
            return report
        finally:
            self._push = None
            self._enter(SyncState.IDLE)

    async def checked(self) -> CanaryReport | None:
        """What the canary of the last push found; waits for the engines' answers. None: nobody asked them."""
        return None if self._canary is None else await self._canary.report()

    async def _transfer_and_commit(self, push: _Push[Replica]) -> None:
        """Transfer with retries, then swap. A replica whose swap fails is given the weights again while attempts are
        left.
        """
        attempts = self._options.max_retries + 1
        while True:
            while push.waiting and push.attempt < attempts:
                await self._attempt(push)
            if push.proved:
                await self._interrupt(push)
                if push.canary is not None:
                    push.canary.score_on_trainer(push.version)
                await self._commit(push)
            if not push.waiting or push.attempt >= attempts:
                break

    async def _continue_without_engines(self, push: _Push[Replica]) -> None:
        """No engine holds the version: the push fails, unless a replica is being restarted, which is then given this
        version or a newer one.
        """
        if not self._expects_return():
            result = f"reached no engine after {max(0, push.attempt - 1)} retries: {push.failures}"
            raise SyncFailed(f"Parameter sync: version {push.version} {result}")
        await self._interrupt(push)
        logger.warning("Parameter sync: no engine holds version %d; restarted replicas will get it", push.version)

    async def _remove_failed(self, push: _Push[Replica]) -> None:
        """Remove the replicas that do not hold the version. Dead ones have been removed already."""
        for replica in self._still_alive([*push.waiting, *push.late], push):
            reason = push.failures[replica.name]
            logger.error("Parameter sync: %s is removed: %s", replica.name, reason)
            self._removed[replica.name] = None
            if self._returning.get(replica.name, replica) is replica:  # otherwise a restarted one has its name
                self._returning.pop(replica.name, None)
                await self._remove(replica.name, reason)

    async def _attempt(self, push: _Push[Replica]) -> None:
        """One transfer to all replicas that wait for it."""
        options, loop = self._options, asyncio.get_running_loop()
        if push.attempt:
            self._enter(SyncState.WAITING_TO_RETRY)
            failed = (push.version, push.attempt, push.failures)
            logger.warning("Parameter sync: version %d attempt %d failed: %s; trying again", *failed)
            await asyncio.sleep(options.retry_delay_s)
        push.waiting = self._still_alive(push.waiting, push)
        if not push.waiting:
            return
        push.attempt += 1
        push.buckets = []
        started = loop.time()
        try:
            failures = await self._transfer(push)
        except TimeoutError:  # the trainer was late: no replica can have the version
            failures = {r.name: f"the trainer sent nothing within {self._calls.limit}" for r in push.waiting}
        push.transfer_s += loop.time() - started
        tried, push.waiting = push.waiting, []
        proved = self._sort(push, tried, failures, relayed=options.transport not in FILES)
        self._plans.transferred(tried, proved)
        push.proved += proved

    def _still_alive(self, replicas: Sequence[Replica], push: _Push[Replica]) -> list[Replica]:
        """These replicas without those lost since the push began: dead, or removed because they did not pause. Compares
        identities: a dead replica may have been restarted under the same name, without these weights.
        """
        alive = self._alive_ids()
        push.failures.update({r.name: "lost during the push" for r in replicas if id(r) not in alive})
        return [r for r in replicas if id(r) in alive]

    def _alive_ids(self) -> set[int]:
        """Identities of all replicas alive."""
        return {id(replica) for replica in (*self._replicas(), *self._returning.values())}

    def _sort(
        self, push: _Push[Replica], tried: Sequence[Replica], failures: dict[str, str], *, relayed: bool
    ) -> list[Replica]:
        """The replicas without a failure; the others wait for the next attempt. A time-out is not retried; with
        `relayed`, a replica whose upstream neighbour timed out is tried again without it.
        """
        self.sync_failures += bool(failures)
        upstream_late = False
        for replica in tried:
            late = id(replica) in self._calls.late
            if late and not (relayed and upstream_late):
                push.late.append(replica)
            elif replica.name in failures:
                push.waiting.append(replica)
            upstream_late = late
        good = [r for r in tried if r.name not in failures]
        push.failures = {**push.failures, **failures}
        for replica in good:
            push.failures.pop(replica.name, None)
        return good

    async def _transfer(self, push: _Push[Replica]) -> dict[str, str]:
        """Stream one version to the waiting replicas; failure reason by replica."""
        self._enter(SyncState.TRANSFERRING)
        failures: dict[str, str] = {}
        digest = ""
        # After the canary, which scores with all of the trainer's state; before the first bucket, which needs a place.
        await self._devices.phase(DevicePhase.PUSH)
        plan = replace(self._plans.next(push.version, push.waiting), others_proved=bool(push.proved))
        export = self._source.export_weights(plan)
        self._calls.begin()
        try:
            while True:
                async with asyncio.timeout_at(self._calls.deadline):
                    item = await anext(export, None)
                if item is None:
                    break
                left = [r for r in push.waiting if r.name not in failures]
                if isinstance(item, UpdatePlan):
                    plans = item.chained([r.name for r in left], push.attempt)
                    await self._calls.each(left, failures, lambda r, plans=plans: r.begin_update(plans[r.name]))
                elif isinstance(item, Bucket):
                    await self._calls.each(left, failures, lambda r, bucket=item: r.load_bucket(bucket))
                    push.buckets.append(item)
                else:
                    digest = item
        finally:
            await export.aclose()  # type: ignore[attr-defined]
        self._enter(SyncState.VERIFYING)
        left = [r for r in push.waiting if r.name not in failures]
        await self._calls.each(left, failures, lambda r: _prove(r, digest))
        return failures

    async def _interrupt(self, push: _Push[Replica]) -> None:
        """Stop the engines, once per push."""
        if push.interrupted_s is not None:
            return
        loop = asyncio.get_running_loop()
        push.interrupted_s = loop.time()
        self._enter(SyncState.PAUSING)
        await self._rollout.interrupt(self._options.interrupt_mode, self._options.interrupt_timeout_s)
        push.pause_s = loop.time() - push.interrupted_s

    async def _commit(self, push: _Push[Replica]) -> None:
        """Swap on every replica whose digest is verified; the others wait for the next attempt."""
        self._enter(SyncState.COMMITTING)
        proved, push.proved = self._still_alive(push.proved, push), []
        failures: dict[str, str] = {}
        self._calls.begin()
        await self._calls.each(proved, failures, lambda r: r.commit(push.version))
        serving = self._sort(push, proved, failures, relayed=False)
        self._plans.committed(proved, serving)
        push.serving += serving

    async def _readmit_serving(self, push: _Push[Replica]) -> list[Replica]:
        """Call `readmit` for restarted replicas that now serve the version; these."""
        back: list[Replica] = []
        for replica in list(push.serving):
            if self._returning.get(replica.name) is not replica:  # of the returning ones, some leave meanwhile
                continue
            await self._readmit(self._returning.pop(replica.name))
            back.append(replica)
            self._removed.pop(replica.name, None)
            logger.info("Parameter sync: %s rejoined with version %d", replica.name, push.version)
        return back

    def _report(self, push: _Push[Replica]) -> SyncReport:
        now = asyncio.get_running_loop().time()
        assert push.interrupted_s is not None
        slots = [slot for bucket in push.buckets for slot in bucket.slots]
        report = SyncReport(
            version=push.version,
            total_s=now - push.started_s,
            pause_s=push.pause_s,
            transfer_s=push.transfer_s,
            stopped_s=now - push.interrupted_s,
            num_bytes=sum(bucket.num_bytes for bucket in push.buckets),
            sent_share=sum(slot.num_sent for slot in slots) / max(1, sum(slot.num_elements for slot in slots)),
            attempts=push.attempt,
            replicas=len(push.serving),
        )
        logger.info(
            "Parameter sync: version %d on %d replicas, %.1f MiB in %.3f s (engines stopped %.3f s, attempt %d)",
            push.version, report.replicas, report.num_bytes / 2**20, report.transfer_s, report.stopped_s, push.attempt,
        )  # fmt: skip
        return report

    def _enter(self, state: SyncState) -> None:
        self._state = state
        if self._push is not None:
            logger.debug("Parameter sync: version %d %s", self._push.version, state.value)


async def _prove(replica: UpdatedReplica, digest: str) -> None:
    held = await replica.finish_update()
    if held != digest:
        raise UpdateFailed(f"holds digest {held}, the trainer sent {digest}")
