"""Moves one weight version from the trainer to every engine: stream buckets, compare digests, pause, swap, resume.

    trainer.export_weights --bucket--> replica 0..n-1 (concurrently) ; the next bucket is gathered while this one loads

With a staged transport engines generate while the weights travel and stop only for the swap; a transfer that fails
leaves them on the version they serve. Other transports load into the served weights, so engines are stopped first.
Either way a replica serves a version only after it proved that it holds it. One that keeps failing is taken out and
reported, the run goes on with the others, and it may come back with the next push.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

from roll_async.config.schema import PipelineConfig
from roll_async.schema import WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.transports import STAGED

logger = logging.getLogger(__name__)

_STRAGGLER_S = 30.0

_LOOK_EVERY_S = 1.0
"""How often a push looks whether the replicas it waits for are still there."""


class WeightSource(Protocol):
    """The trainer's side."""

    def export_weights(
        self, version: WeightVersion, transport: str, verify: str
    ) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """The plan, every bucket, then the digest."""
        ...


class UpdatedReplica(Protocol):
    """One engine replica, seen from the synchronizer. ConnectionError from any call: it is gone."""

    name: str

    async def begin_update(self, plan: UpdatePlan) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None: ...

    async def finish_update(self) -> str: ...

    async def commit(self, version: WeightVersion) -> None: ...


Replica = TypeVar("Replica", bound=UpdatedReplica)
"""What whoever owns the replicas knows them as; `put_back` gets the same objects back."""


class Rollout(Protocol):
    """Who uses the replicas."""

    async def interrupt(self, mode: str, timeout_s: float) -> None: ...

    async def release(self) -> None: ...


class SyncState(Enum):
    """What a push is doing."""

    IDLE = "idle"
    PAUSING = "pausing"  # engines come to a stand-still
    TRANSFERRING = "transferring"  # buckets travel
    VERIFYING = "verifying"  # replicas prove what they hold
    WAITING_TO_RETRY = "waiting_to_retry"
    COMMITTING = "committing"  # proved weights become the served ones
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
    """Of one attempt to transfer, and of the swap."""
    retry_delay_s: float = 1.0

    @classmethod
    def of(cls, config: PipelineConfig, transport: str) -> SyncOptions:
        """How a weight push goes, as the config has it. `transport`: what `choose_transport` chose."""
        a = config.async_training
        return cls(
            transport=transport,
            verify=config.weight_sync.verify,
            interrupt_mode=a.interrupt.mode,
            interrupt_timeout_s=a.interrupt.timeout,
            max_retries=a.max_sync_retries,
            timeout_s=a.sync_timeout,
            retry_delay_s=a.sync_retry_delay,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One finished push."""

    version: WeightVersion
    total_s: float
    pause_s: float
    """Until the engines stood still."""
    transfer_s: float
    """Until every replica had proved what it holds, all attempts together."""
    stopped_s: float
    """From the interruption to the end of the push: no engine generated."""
    num_bytes: int
    attempts: int
    replicas: int
    """Replicas that serve the version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncStatus:
    """Where the synchronizer is, for monitoring and error messages."""

    state: SyncState
    since_s: float
    """Loop time at which this state began."""
    version: WeightVersion | None
    """Newest version the engines serve."""
    target: WeightVersion | None
    """Version being pushed."""
    attempt: int
    num_buckets: int
    """Buckets sent in this attempt."""
    num_bytes: int
    param_sync_count: int
    sync_failures: int
    failures: dict[str, str] = field(default_factory=dict)
    """Replica name to the reason of its last failure, cleared when it holds a version."""
    taken_out: tuple[str, ...] = ()


class SyncFailed(RuntimeError):
    """No replica holds the version after all retries."""


@dataclass(slots=True)
class _Push(Generic[Replica]):
    """What one push has come to."""

    version: WeightVersion
    started_s: float
    waiting: list[Replica]
    """Still to be given the weights."""
    late: list[Replica] = field(default_factory=list)
    """Did not do a call in time: not tried again in this push, nobody waits for them a second time."""
    proved: list[Replica] = field(default_factory=list)
    """Hold the weights, serve them after their commit."""
    serving: list[Replica] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    num_buckets: int = 0
    num_bytes: int = 0
    interrupted_s: float | None = None
    pause_s: float = 0.0
    transfer_s: float = 0.0


class ParameterSynchronizer(Generic[Replica]):
    """One push at a time. `state`, `status` and the counters tell what it does."""

    def __init__(
        self,
        source: WeightSource,
        rollout: Rollout,
        replicas: Callable[[], Sequence[Replica]],
        options: SyncOptions,
        *,
        weights_held: Callable[[WeightVersion], None],
        take_out: Callable[[str, str], Awaitable[None]],
        put_back: Callable[[Replica], Awaitable[None]] | None = None,
        comes_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._rollout, self._replicas, self._options = source, rollout, replicas, options
        self._weights_held, self._take_out, self._put_back = weights_held, take_out, put_back
        self._comes_back = comes_back
        self._push: _Push[Replica] | None = None
        self._returning: dict[str, Replica] = {}
        self._returned = asyncio.Event()
        self._taken_out: dict[str, None] = {}
        self._state, self._state_since_s = SyncState.IDLE, 0.0
        self._deadline = 0.0
        self._timed_out: set[int] = set()
        """Identities of replicas that were late in this attempt."""
        self.param_sync_count = 0
        self.sync_failures = 0
        self.version: WeightVersion | None = None

    @property
    def state(self) -> SyncState:
        """What the synchronizer is doing."""
        return self._state

    def status(self) -> SyncStatus:
        """Everything worth knowing at this moment."""
        push = self._push
        return SyncStatus(
            state=self._state,
            since_s=self._state_since_s,
            version=self.version,
            target=None if push is None else push.version,
            attempt=0 if push is None else push.attempt,
            num_buckets=0 if push is None else push.num_buckets,
            num_bytes=0 if push is None else push.num_bytes,
            param_sync_count=self.param_sync_count,
            sync_failures=self.sync_failures,
            failures={} if push is None else dict(push.failures),
            taken_out=tuple(self._taken_out),
        )

    def rejoin(self, replica: Replica) -> None:
        """Give a new or restarted, paused replica the weights with the next push or `welcome`, then hand it to
        `put_back`.
        """
        if self._put_back is None:
            raise ValueError("rejoin needs a synchronizer with put_back")
        self._returning[replica.name] = replica
        self._returned.set()

    @property
    def returning(self) -> bool:
        """Whether a replica waits for `welcome`."""
        return self._returned.is_set()

    async def wait_returning(self) -> None:
        """Until a replica waits for `welcome`."""
        await self._returned.wait()

    async def welcome(self, version: WeightVersion) -> None:
        """Give replicas that came back the trainer's present weights, between pushes; the others go on generating.

        `version`: the newest the present weights are known to contain. It may be newer than what the others serve.
        """
        assert self._push is None, f"welcome with version {version} during a push"
        replicas = list(self._returning.values())
        self._returned.clear()
        if not replicas:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._push = push = _Push(version=version, started_s=now, waiting=replicas, interrupted_s=now)
        try:
            await self._bring_up(push)
            await self._give_up_on_waiting(push)
            await self._welcome(push)
        finally:
            self._push = None
            self._enter(SyncState.IDLE)

    async def push(self, version: WeightVersion) -> SyncReport:
        """Bring every replica to `version`.

        Raises SyncFailed when none got there, ConnectionError when none is left.
        """
        assert self._push is None, f"push of version {version} during the push of another"
        loop = asyncio.get_running_loop()
        replicas = [*self._replicas(), *self._returning.values()]
        self._push = push = _Push(version=version, started_s=loop.time(), waiting=replicas)
        self._returned.clear()
        try:
            if self._options.transport not in STAGED:
                await self._interrupt(push)
            await self._bring_up(push)
            if not push.serving:
                await self._go_on_without(push)
            await self._give_up_on_waiting(push)
            self._enter(SyncState.RESUMING)
            await self._rollout.release()
            await self._welcome(push)
            self.version = version
            self.param_sync_count += 1
            self._weights_held(version)
            return self._report(push)
        finally:
            self._push = None
            self._enter(SyncState.IDLE)

    async def _bring_up(self, push: _Push[Replica]) -> None:
        """Transfer with retries, then swap. What fails the swap is transferred again as long as attempts are left."""
        attempts = self._options.max_retries + 1
        while True:
            while push.waiting and push.attempt < attempts:
                await self._attempt(push)
            if push.proved:
                await self._interrupt(push)
                await self._commit(push)
            if not push.waiting or push.attempt >= attempts:
                break

    async def _go_on_without(self, push: _Push[Replica]) -> None:
        """No engine holds the version: an end, unless one comes back, which then gets this version or a newer one."""
        if not self._comes_back():
            result = f"reached no engine after {max(0, push.attempt - 1)} retries: {push.failures}"
            raise SyncFailed(f"Parameter sync: version {push.version} {result}")
        await self._interrupt(push)
        logger.warning("Parameter sync: no engine is there for version %d; those that come back get it", push.version)

    async def _give_up_on_waiting(self, push: _Push[Replica]) -> None:
        for replica in self._present([*push.waiting, *push.late], push):  # who is lost is being replaced already
            await self._give_up_on(replica, push.failures[replica.name])

    async def _attempt(self, push: _Push[Replica]) -> None:
        """One transfer to all replicas that wait for it."""
        options, loop = self._options, asyncio.get_running_loop()
        if push.attempt:
            self._enter(SyncState.WAITING_TO_RETRY)
            failed = (push.version, push.attempt, push.failures)
            logger.warning("Parameter sync: version %d attempt %d failed: %s; trying again", *failed)
            await asyncio.sleep(options.retry_delay_s)
        push.waiting = self._present(push.waiting, push)
        if not push.waiting:
            return
        push.attempt += 1
        push.num_buckets = push.num_bytes = 0
        started = loop.time()
        try:
            failures = await self._transfer(push)
        except TimeoutError:  # of the trainer: no replica can have the version
            failures = {r.name: f"the trainer sent nothing within {self._late()}" for r in push.waiting}
        push.transfer_s += loop.time() - started
        self._sort(push, failures, push.proved)

    def _present(self, replicas: Sequence[Replica], push: _Push[Replica]) -> list[Replica]:
        """Without those that are gone since the push began: dead, or taken out because they did not pause. By identity:
        one that died may already be back under its name, without these weights.
        """
        there = self._there()
        present = [r for r in replicas if id(r) in there]
        gone = [r for r in replicas if id(r) not in there]
        push.failures.update({r.name: "lost during the push" for r in gone})
        return present

    def _there(self) -> set[int]:
        """Identities of all replicas alive."""
        return {id(replica) for replica in (*self._replicas(), *self._returning.values())}

    def _sort(self, push: _Push[Replica], failures: dict[str, str], good: list[Replica]) -> None:
        """Waiting replicas without a failure go to `good`. A time-out is not retried; who waited for a late neighbour
        to pass the weights on is tried again without it.
        """
        self.sync_failures += bool(failures)
        good += [r for r in push.waiting if r.name not in failures]
        failed, before_late = [], False
        for replica in push.waiting:
            late = id(replica) in self._timed_out
            if late and not before_late:
                push.late.append(replica)
            elif replica.name in failures:
                failed.append(replica)
            before_late = late
        push.waiting = failed
        push.failures = {**{r.name: push.failures[r.name] for r in push.late if r.name in push.failures}, **failures}

    async def _transfer(self, push: _Push[Replica]) -> dict[str, str]:
        """Stream one version to the waiting replicas; failure reason by replica."""
        self._enter(SyncState.TRANSFERRING)
        failures: dict[str, str] = {}
        self._timed_out.clear()
        digest = ""
        export = self._source.export_weights(push.version, self._options.transport, self._options.verify)
        self._deadline = asyncio.get_running_loop().time() + self._options.timeout_s
        try:
            while True:
                async with asyncio.timeout_at(self._deadline):
                    item = await anext(export, None)
                if item is None:
                    break
                left = [r for r in push.waiting if r.name not in failures]
                if isinstance(item, UpdatePlan):
                    plans = _chained(item, left, push.attempt)
                    await self._each(left, failures, lambda r, plans=plans: r.begin_update(plans[r.name]))
                elif isinstance(item, Bucket):
                    await self._each(left, failures, lambda r, bucket=item: r.load_bucket(bucket))
                    push.num_buckets += 1
                    push.num_bytes += item.num_bytes
                else:
                    digest = item
        finally:
            await export.aclose()  # type: ignore[attr-defined]
        self._enter(SyncState.VERIFYING)
        left = [r for r in push.waiting if r.name not in failures]
        await self._each(left, failures, lambda r: _prove(r, digest))
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
        """Swap on every replica that proved the version; the others keep waiting."""
        self._enter(SyncState.COMMITTING)
        proved, push.proved = self._present(push.proved, push), []
        failures: dict[str, str] = {}
        self._timed_out.clear()
        self._deadline = asyncio.get_running_loop().time() + self._options.timeout_s
        await self._each(proved, failures, lambda r: r.commit(push.version))
        self.sync_failures += bool(failures)
        push.serving += [r for r in proved if r.name not in failures]
        failed = [r for r in proved if r.name in failures]
        push.late += [r for r in failed if id(r) in self._timed_out]
        push.waiting += [r for r in failed if id(r) not in self._timed_out]
        push.failures = {**push.failures, **failures}

    async def _give_up_on(self, replica: Replica, reason: str) -> None:
        logger.error("Parameter sync: %s is taken out: %s", replica.name, reason)
        self._taken_out[replica.name] = None
        if self._returning.get(replica.name, replica) is not replica:
            return  # its successor waits for weights already
        self._returning.pop(replica.name, None)
        await self._take_out(replica.name, reason)

    async def _welcome(self, push: _Push[Replica]) -> None:
        """Hand over returning replicas that now serve the version."""
        for replica in [r for r in push.serving if self._returning.get(r.name) is r]:
            assert self._put_back is not None
            await self._put_back(self._returning.pop(replica.name))
            self._taken_out.pop(replica.name, None)
            logger.info("Parameter sync: %s is back with version %d", replica.name, push.version)

    def _report(self, push: _Push[Replica]) -> SyncReport:
        now = asyncio.get_running_loop().time()
        assert push.interrupted_s is not None
        report = SyncReport(
            version=push.version,
            total_s=now - push.started_s,
            pause_s=push.pause_s,
            transfer_s=push.transfer_s,
            stopped_s=now - push.interrupted_s,
            num_bytes=push.num_bytes,
            attempts=push.attempt,
            replicas=len(push.serving),
        )
        logger.info(
            "Parameter sync: version %d on %d replicas, %.1f MiB in %.3f s (engines stopped %.3f s, attempt %d)",
            push.version, report.replicas, push.num_bytes / 2**20, report.transfer_s, report.stopped_s, push.attempt,
        )  # fmt: skip
        return report

    async def _each(
        self, replicas: Sequence[Replica], failures: dict[str, str], call: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Call all at once. A replica that is not done at the deadline has failed, and is not waited for again in this
        push; the others get a deadline of their own. Once half of them are done, the rest has three times as long, or
        `_STRAGGLER_S`: one hung load must not hold the trainer and the others for a whole `sync_timeout`. Nobody waits
        for one that was removed meanwhile. What a replica can raise is its failure.
        """
        if not replicas:
            return
        loop = asyncio.get_running_loop()
        calls = {asyncio.ensure_future(call(r)): r for r in replicas}
        waiting, done = set(calls), set[asyncio.Task[None]]()
        began, deadline = loop.time(), self._deadline
        straggles_s: float | None = None
        try:
            while waiting and (left_s := deadline - loop.time()) > 0:
                ended, waiting = await asyncio.wait(
                    waiting, timeout=min(left_s, _LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED
                )
                done |= ended
                if straggles_s is None and len(replicas) > 1 and 2 * len(done) >= len(calls):
                    straggles_s = max(_STRAGGLER_S, 3 * (loop.time() - began))
                    deadline = min(deadline, loop.time() + straggles_s)
                there = self._there()
                gone = {task for task in waiting if id(calls[task]) not in there}
                waiting -= gone
                failures.update({calls[task].name: "lost during the push" for task in gone})
        finally:
            for task in calls:
                task.cancel()
        for task in waiting:
            cut = straggles_s is not None and deadline < self._deadline
            limit = f"{straggles_s:g} s after half of the replicas were" if cut else self._late()
            failures[calls[task].name] = f"not done within {limit}"
            self._timed_out.add(id(calls[task]))
        if waiting:
            self._deadline = loop.time() + self._options.timeout_s
        for task in done:
            error = task.exception()
            if isinstance(error, (RuntimeError, OSError, ValueError)):
                failures[calls[task].name] = f"{type(error).__name__}: {error}"
            elif error is not None:
                raise error

    def _late(self) -> str:
        return f"sync_timeout {self._options.timeout_s:g} s"

    def _enter(self, state: SyncState) -> None:
        self._state, self._state_since_s = state, asyncio.get_running_loop().time()
        if self._push is not None:
            logger.debug("Parameter sync: version %d %s", self._push.version, state.value)


def _chained(plan: UpdatePlan, replicas: Sequence[UpdatedReplica], attempt: int) -> dict[str, UpdatePlan]:
    """The plan for each replica: every one may pass the weights on to the next."""
    plans, upstream = {}, None
    for replica in replicas:
        plans[replica.name] = replace(plan, attempt=attempt, replica=replica.name, upstream=upstream)
        upstream = replica.name
    return plans


async def _prove(replica: UpdatedReplica, digest: str) -> None:
    held = await replica.finish_update()
    if held != digest:
        raise RuntimeError(f"holds digest {held}, the trainer sent {digest}")
