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
from typing import Generic

from roll_async.schema import WeightVersion
from roll_async.weight_sync.bucket import FILES, STAGED, Bucket, Content, UpdatePlan
from roll_async.weight_sync.canary import Canary, CanaryReport
from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.protocol import (
    OWN_DEVICES,
    DevicePhase,
    Devices,
    Replica,
    ReplicaPool,
    Rollout,
    SyncFailed,
    SyncOptions,
    SyncReport,
    SyncState,
    SyncStatus,
    UpdatedReplica,
    WeightSource,
)

logger = logging.getLogger(__name__)

_STRAGGLER_S = 30.0
_LIVENESS_INTERVAL_S = 1.0
"""How often a push checks that the replicas it waits for are alive."""
_LOST = "lost during the push"


class Held(Enum):
    """What a replica holds of the version of a push."""

    NOTHING = "nothing"  # waits for an attempt
    LATE = "late"  # missed a deadline; not tried again, which would be a second time-out, but removed at the end
    PROVED = "proved"  # its digest is the trainer's; what it has mapped must not change (`UpdatePlan.others_proved`)
    SERVING = "serving"


@dataclass(slots=True)
class _Push(Generic[Replica]):
    """The state of one push."""

    version: WeightVersion
    started_s: float
    held: dict[Replica, Held]
    """By object: a lost replica may be back under its name, without these weights. The last to change is the last."""
    canary: Canary | None = None
    """Checks what the replicas compute with the weights."""
    deadline: float = 0.0
    """Of the calls of the present transfer, or swap."""
    failed: dict[Replica, str] = field(default_factory=dict)
    """Replicas that failed in it, with the reason."""
    late: set[Replica] = field(default_factory=set)
    """Those of them that missed the deadline."""
    failures: dict[str, str] = field(default_factory=dict)
    """Name of a replica to the reason of its last failure in the whole push."""
    attempt: int = 0
    buckets: list[Bucket] = field(default_factory=list)
    """Sent in the present attempt."""
    interrupted_s: float | None = None
    pause_s: float = 0.0
    transfer_s: float = 0.0

    def holding(self, state: Held) -> list[Replica]:
        """The replicas that hold this."""
        return [replica for replica, held in self.held.items() if held is state]

    def set_held(self, replica: Replica, state: Held) -> None:
        """It holds this from now on."""
        del self.held[replica]  # also its place: the next attempt chains the replicas in this order
        self.held[replica] = state

    def begin_calls(self, timeout_s: float) -> None:
        """A transfer or a swap begins."""
        self.failed.clear()
        self.late.clear()
        self.deadline = asyncio.get_running_loop().time() + timeout_s


class ParameterSynchronizer(Generic[Replica]):
    """One push at a time; `status` is a snapshot of it."""

    def __init__(
        self,
        source: WeightSource,
        rollout: Rollout,
        engines: ReplicaPool[Replica],
        options: SyncOptions,
        *,
        weights_held: Callable[[WeightVersion], None],
        validators: ReplicaPool[Replica] | None = None,
        canary: Canary | None = None,
        devices: Devices = OWN_DEVICES,
    ) -> None:
        """`validators`: get weights only while they are held, the other `engines` with every push."""
        self._source, self._rollout, self._engines, self._options = source, rollout, engines, options
        self._devices, self._weights_held, self._canary = devices, weights_held, canary
        self._push: _Push[Replica] | None = None
        self._returned = asyncio.Event()
        self._pools = [engines] if validators is None else [engines, validators]
        for pool in self._pools:
            pool.attach(self._returned)
        self._removed: dict[str, None] = {}
        self._state = SyncState.IDLE
        self._limit = f"sync_timeout {options.timeout_s:g} s"
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

    @property
    def returning(self) -> bool:
        """Whether a held replica waits for `resync_returned`."""
        return self._returned.is_set()

    async def wait_for_returned(self) -> None:
        """Return when a held replica waits for `resync_returned`."""
        await self._returned.wait()

    async def resync_returned(self, version: WeightVersion) -> None:
        """Give held replicas the trainer's current weights, between pushes; the others continue generating.

        `version`: the newest whose training the current weights contain in full. The others may serve an older one.
        Raises EngineMismatch as `push` does.
        """
        assert self._push is None, f"resync_returned with version {version} during a push"
        now = asyncio.get_running_loop().time()
        held = dict.fromkeys(self._held(), Held.NOTHING)
        self._push = push = _Push(version=version, started_s=now, held=held, interrupted_s=now)  # pauses nobody
        self._returned.clear()
        try:
            await self._transfer_and_commit(push)
            await self._remove_failed(push)
            back = await self._rejoin_serving(push)
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
        held = dict.fromkeys(self._present(), Held.NOTHING)
        now = asyncio.get_running_loop().time()
        self._push = push = _Push(version=version, started_s=now, held=held, canary=self._canary)
        self._returned.clear()
        try:
            if self._canary is not None:
                await self._canary.before_push(version)
            if self._options.transport not in STAGED:
                await self._interrupt(push)
            await self._transfer_and_commit(push)
            if not push.holding(Held.SERVING):
                await self._continue_without_engines(push)
            await self._remove_failed(push)
            self._enter(SyncState.RESUMING)
            await self._rollout.release()
            self.version = version
            self.param_sync_count += 1
            self._weights_held(version)
            report = self._report(push)  # engines generate: those that return need not hold the queue, or the figures
            await self._rejoin_serving(push)
            if self._canary is not None:
                await self._canary.score_on_engines(version, push.holding(Held.SERVING))
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
            while push.holding(Held.NOTHING) and push.attempt < attempts:
                await self._attempt(push)
            if push.holding(Held.PROVED):
                await self._interrupt(push)
                if push.canary is not None:
                    push.canary.score_on_trainer(push.version)
                await self._commit(push)
            if not push.holding(Held.NOTHING) or push.attempt >= attempts:
                break

    async def _continue_without_engines(self, push: _Push[Replica]) -> None:
        """No engine holds the version: the push fails, unless a replica is being restarted, which is then given this
        version or a newer one.
        """
        if not self._engines.expects_return:
            result = f"reached no engine after {max(0, push.attempt - 1)} retries: {push.failures}"
            raise SyncFailed(f"Parameter sync: version {push.version} {result}")
        await self._interrupt(push)
        logger.warning("Parameter sync: no engine holds version %d; restarted replicas will get it", push.version)

    async def _remove_failed(self, push: _Push[Replica]) -> None:
        """Remove the replicas that do not hold the version. Dead ones have been removed already."""
        for replica in (*self._still_alive(push, Held.NOTHING), *self._still_alive(push, Held.LATE)):
            reason = push.failures[replica.name]
            logger.error("Parameter sync: %s is removed: %s", replica.name, reason)
            self._removed[replica.name] = None
            await (self._holder(replica) or self._engines).reject(replica, reason)

    async def _attempt(self, push: _Push[Replica]) -> None:
        """One transfer to all replicas that wait for it."""
        options, loop = self._options, asyncio.get_running_loop()
        if push.attempt:
            self._enter(SyncState.WAITING_TO_RETRY)
            failed = (push.version, push.attempt, push.failures)
            logger.warning("Parameter sync: version %d attempt %d failed: %s; trying again", *failed)
            await asyncio.sleep(options.retry_delay_s)
        tried = self._still_alive(push, Held.NOTHING)
        if not tried:
            return
        push.attempt += 1
        push.buckets = []
        started = loop.time()
        try:
            await self._transfer(push, tried)
        except TimeoutError:  # the trainer was late: no replica can have the version
            push.failed = dict.fromkeys(tried, f"the trainer sent nothing within {self._limit}")
        push.transfer_s += loop.time() - started
        proved = self._sort(push, tried, Held.PROVED, relayed=options.transport not in FILES)
        self._plans.transferred(tried, proved)

    def _still_alive(self, push: _Push[Replica], state: Held) -> list[Replica]:
        """The replicas that hold this, without those lost since the push began: dead, or removed because they did not
        pause.
        """
        alive = set(self._present())
        for replica in push.holding(state):
            if replica not in alive:
                push.failures[replica.name] = _LOST
                del push.held[replica]
        return push.holding(state)

    def _present(self) -> list[Replica]:
        """All replicas alive."""
        return [*self._engines.clients, *self._held()]

    def _held(self) -> list[Replica]:
        return [replica for pool in self._pools for replica in pool.holding.values()]

    def _holder(self, replica: Replica) -> ReplicaPool[Replica] | None:
        """The pool where it is held. By object: a restarted one may have its name."""
        return next((pool for pool in self._pools if pool.holding.get(replica.name) is replica), None)

    def _sort(self, push: _Push[Replica], tried: Sequence[Replica], goal: Held, *, relayed: bool) -> list[Replica]:
        """The replicas that reached the goal; the others wait for the next attempt. A time-out is not retried; with
        `relayed`, a replica whose upstream neighbour timed out is tried again without it.
        """
        self.sync_failures += bool(push.failed)
        upstream_late = False
        for replica in tried:
            late = replica in push.late
            if late and not (relayed and upstream_late):
                push.set_held(replica, Held.LATE)
            else:
                push.set_held(replica, Held.NOTHING if replica in push.failed else goal)
            upstream_late = late  # in a chain the next one may be late because of this one
        reached = [r for r in tried if r not in push.failed]
        for replica in reached:
            push.failures.pop(replica.name, None)
        push.failures.update({r.name: reason for r, reason in push.failed.items()})
        return reached

    async def _transfer(self, push: _Push[Replica], receivers: Sequence[Replica]) -> None:
        """Stream one version to these replicas and compare the digests."""
        self._enter(SyncState.TRANSFERRING)
        digest = ""
        # After the canary, which scores with all of the trainer's state; before the first bucket, which needs a place.
        await self._devices.phase(DevicePhase.PUSH)
        plan = replace(self._plans.next(push.version, receivers), others_proved=bool(push.holding(Held.PROVED)))
        export = self._source.export_weights(plan)
        push.begin_calls(self._options.timeout_s)
        try:
            while True:
                async with asyncio.timeout_at(push.deadline):
                    item = await anext(export, None)
                if item is None:
                    break
                if isinstance(item, UpdatePlan):
                    plans = item.chained([r.name for r in receivers], push.attempt)
                    await self._call_each(push, receivers, lambda r, plans=plans: r.begin_update(plans[r.name]))
                elif isinstance(item, Bucket):
                    await self._call_each(push, receivers, lambda r, bucket=item: r.load_bucket(bucket))
                    push.buckets.append(item)
                else:
                    digest = item
        finally:
            # Before another attempt begins: the ranks send one export at a time.
            await export.aclose()  # type: ignore[attr-defined]
        self._enter(SyncState.VERIFYING)
        await self._call_each(push, receivers, lambda r: _prove(r, digest))

    async def _call_each(
        self, push: _Push[Replica], replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Call all replicas concurrently that did not fail before. One that is not done at the deadline has failed for
        this push, and the others get a new deadline. Once half of them are done, the rest have three times as long, at
        least `_STRAGGLER_S`, so that one hung load does not hold up the others for a whole `sync_timeout`; calls that
        failed say nothing about how long it takes. The wait for a replica ends when it is removed. Losses and failed
        updates go to `push.failed`, every other error is raised.
        """
        calls = {asyncio.ensure_future(call(r)): r for r in replicas if r not in push.failed}
        if not calls:
            return
        loop = asyncio.get_running_loop()
        waiting, done = set(calls), set[asyncio.Task[None]]()
        began, deadline = loop.time(), push.deadline
        straggles_s: float | None = None
        try:
            while waiting and (left_s := deadline - loop.time()) > 0:
                ended, waiting = await asyncio.wait(
                    waiting, timeout=min(left_s, _LIVENESS_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
                )
                done |= ended
                good = sum(task.exception() is None for task in done)
                if straggles_s is None and len(calls) > 1 and 2 * good >= len(calls):
                    straggles_s = max(_STRAGGLER_S, 3 * (loop.time() - began))
                    deadline = min(deadline, loop.time() + straggles_s)
                alive = set(self._present())
                lost = {task for task in waiting if calls[task] not in alive}
                waiting -= lost
                push.failed.update({calls[task]: _LOST for task in lost})
        finally:
            for task in calls:
                task.cancel()  # also those given up: the next attempt calls the same replicas
        for task in waiting:
            cut = straggles_s is not None and deadline < push.deadline
            limit = f"{straggles_s:g} s after half of the replicas were" if cut else self._limit
            push.failed[calls[task]] = f"not done within {limit}"
            push.late.add(calls[task])
        if waiting:
            push.deadline = loop.time() + self._options.timeout_s
        for task in done:
            error = task.exception()
            # A replica that was lost is tried again, too, until its owner has noticed it.
            if isinstance(error, (UpdateFailed, ConnectionError, TimeoutError)):
                push.failed[calls[task]] = f"{type(error).__name__}: {error}"
            elif error is not None:
                raise error

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
        proved = self._still_alive(push, Held.PROVED)
        push.begin_calls(self._options.timeout_s)
        await self._call_each(push, proved, lambda r: r.commit(push.version))
        self._plans.committed(proved, self._sort(push, proved, Held.SERVING, relayed=False))

    async def _rejoin_serving(self, push: _Push[Replica]) -> list[Replica]:
        """Let held replicas run that now serve the version; these."""
        back: list[Replica] = []
        for replica in push.holding(Held.SERVING):
            if (pool := self._holder(replica)) is None:  # it has served before, or left meanwhile
                continue
            await pool.rejoin(replica)
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
            replicas=len(push.holding(Held.SERVING)),
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


class ExportPlanner(Generic[Replica]):
    """What the next export sends: as little as the replicas that get it allow. All of them get the same, so one that
    holds less decides.
    """

    def __init__(self, plan: UpdatePlan, *, sparse: bool, adapters: bool) -> None:
        """`plan`: what all exports have in common. `sparse`, `adapters`: see `SyncOptions`."""
        self._plan, self._sparse, self._adapters = plan, sparse, adapters
        self._export = 0
        self._holders: set[Replica] = set()
        """They hold what the last export sent."""
        self._frozen: set[Replica] = set()
        """They hold the weights below the adapters, which never change."""

    def next(self, version: WeightVersion, receivers: Sequence[Replica]) -> UpdatePlan:
        """The plan of the next export, which goes to `receivers`."""
        plan = replace(self._plan, version=version)
        if self._adapters:
            held = self._frozen.issuperset(receivers)
            return replace(plan, content=Content.ADAPTERS if held else Content.WHOLE)
        if not self._sparse:
            return plan
        base = self._export if self._holders.issuperset(receivers) else None
        self._holders, self._export = set(), self._export + 1  # an export that breaks off is nobody's base
        return replace(plan, export=self._export, base=base)

    def transferred(self, receivers: Sequence[Replica], proved: Sequence[Replica]) -> None:
        """The transfer is over; `proved`: those of the receivers that proved what they got."""
        self._holders = set(proved)
        self._frozen -= set(receivers) - set(proved)  # a replica that failed gets everything the next time

    def committed(self, receivers: Sequence[Replica], serving: Sequence[Replica]) -> None:
        """The swap is over; `serving`: those of the receivers that serve the version."""
        self._frozen -= set(receivers) - set(serving)
        self._holders &= set(serving)  # a base is what was committed, not what was proved
        if self._adapters:
            self._frozen |= set(serving)


async def _prove(replica: UpdatedReplica, digest: str) -> None:
    held = await replica.finish_update()
    if held != digest:
        raise UpdateFailed(f"holds digest {held}, the trainer sent {digest}")
