"""Traffic with one replica: what is in flight there, one call per batch of requests, one reader of its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING

from roll_async.inference.protocol import EngineLoad, PauseMode
from roll_async.rollout.attempts import Attempt, AttemptState
from roll_async.rollout.protocol import Replica

if TYPE_CHECKING:
    from roll_async.rollout.dispatch.engine_pool import EnginePool

Spawn = Callable[[Coroutine[object, object, None], str], asyncio.Task[None]]

LOSSES = (ConnectionError, TimeoutError)
"""The only errors of a call after which its replica counts as lost: its process is gone, its engine is dead, or it does
not answer in time. Every other error is a fault of ours, which the next replica would raise again.
"""


class ReplicaLink:
    """One replica of the manager. Its loss is reported to its pool, never raised."""

    def __init__(self, client: Replica, pool: EnginePool, spawn: Spawn) -> None:
        self.client = client
        self.name = client.name
        self.in_flight: dict[str, Attempt] = {}
        self.drained = asyncio.Event()
        """Set while nothing is in flight."""
        self.drained.set()
        self.load: EngineLoad | None = None
        """The load that the replica reported last."""
        self.foreign_requests = 0
        """Requests that ran there according to that report and are not in flight here."""
        self.checks_without_token = 0
        """Checks since its last token that found requests running (`liveness.py`)."""
        self.num_suspicions = 0
        """How often it was suspect since its last token."""
        self.leaving = False
        """It gets no further request."""
        self.busy_s = 0.0
        """Seconds with something in flight, up to the last time that it was idle."""
        self._busy_since_s: float | None = None
        self._pool, self._spawn = pool, spawn
        self._outbox: list[Attempt] = []
        self._submitting = False
        """A submit call is under way."""
        self._arrivals: list[asyncio.Future[None]] = []
        """They wait for its end."""
        self._idle: asyncio.Future[None] | None = None
        """The writer waits for something in the outbox."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._gone = asyncio.Event()

    def open(self) -> None:
        """Begin to read reports and to send."""
        self._tasks = (
            self._spawn(self._read(), f"reader of {self.name}"),
            self._spawn(self._write(), f"submit to {self.name}"),
        )

    def close(self) -> list[Attempt]:
        """Neither read nor send any more. Returns the attempts that were in flight, which are LOST now."""
        for task in self._tasks:
            if task is not asyncio.current_task():  # the reader or writer that found the loss ends by itself
                task.cancel()
        self._gone.set()
        orphans = list(self.in_flight.values())
        for attempt in orphans:
            self.end(attempt, AttemptState.LOST)
        return orphans

    @property
    def suspect(self) -> bool:
        """It has reported no token since a check suspected it: it gets one request as a probe."""
        return self.num_suspicions > 0

    def busy_until_s(self, now_s: float) -> float:
        """Seconds with something in flight since the link was opened."""
        return self.busy_s + (0.0 if self._busy_since_s is None else now_s - self._busy_since_s)

    # Attempts

    def send(self, attempt: Attempt, now_s: float) -> None:
        """Put an attempt into the outbox, whose contents are sent in one call."""
        attempt.to(AttemptState.OUTBOX)
        attempt.link, attempt.dispatched_s = self, now_s
        if not self.in_flight:
            self.drained.clear()
            self._busy_since_s = now_s
        self.in_flight[attempt.wire_id] = attempt
        self._outbox.append(attempt)
        if self._idle is not None and not self._idle.done():  # an earlier send may have woken the writer
            self._idle.set_result(None)

    def end(self, attempt: Attempt, state: AttemptState) -> None:
        """End the attempt: later replies of it are late. One that is still in the outbox is not sent."""
        attempt.to(state)
        self.in_flight.pop(attempt.wire_id, None)
        if not self.in_flight:
            self.drained.set()
            if self._busy_since_s is not None:
                self.busy_s += asyncio.get_running_loop().time() - self._busy_since_s
                self._busy_since_s = None

    def in_outbox(self) -> list[Attempt]:
        """Attempts that no submit call has taken yet."""
        return [attempt for attempt in self._outbox if attempt.state is AttemptState.OUTBOX]

    # Control calls

    async def stop(self, mode: PauseMode) -> None:
        """Pause the replica. With ABORT, requests that were on the wire are aborted, too: one that arrived after the
        pause would wait for its end, and its caller with it.
        """
        await self._call(self.client.pause(mode))
        if mode is PauseMode.ABORT:
            while self._submitting:
                await self._arrival()
            if late := [a.wire_id for a in self.in_flight.values()]:
                await self._call(self.client.abort(late))

    async def resume(self) -> None:
        """Let the replica run again."""
        await self._call(self.client.resume())

    async def abort(self, attempts: Sequence[Attempt]) -> None:
        """The replica runs none of these attempts when this returns. The abort of one that is on the wire is sent once
        it has arrived: an abort that came first would find nothing to end.
        """
        if self._submitting and any(a.state is AttemptState.ON_WIRE for a in attempts):
            await self._arrival()

        async def abort_there() -> None:  # cancelled before it begins, it has made no call that nobody awaits
            await self._call(self.client.abort([a.wire_id for a in attempts]))

        call = asyncio.ensure_future(abort_there())
        gone = asyncio.ensure_future(self._gone.wait())
        try:  # the caller does not wait for a replica that is lost meanwhile
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            gone.cancel()
        if call.done() and not call.cancelled():
            call.result()  # a loss is reported already: what is raised is a fault of ours

    async def ask_load(self) -> EngineLoad:
        """Ask the replica for its load and store it. Raises what the replica raises."""
        load = await self.client.load()
        self.record_load(load)
        self._pool.load_reported(self)
        return load

    def record_load(self, load: EngineLoad) -> None:
        """Store the load that the replica reports."""
        self.load = load
        # Below 0 while attempts are on the wire: in flight here, not yet in its counts.
        self.foreign_requests = max(0, load.running + load.waiting - len(self.in_flight))

    async def _call(self, work: Coroutine[object, object, object]) -> None:
        """A control call. The loss of the replica in it is reported."""
        try:
            await work
        except LOSSES as error:
            self._pool.lost(self, _describe(error))

    # Loops

    async def _write(self) -> None:
        """Send what is in the outbox in one call; attempts that are added meanwhile go with the next call."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._outbox:
                    self._idle = loop.create_future()
                    await self._idle
                batch, self._outbox = self.in_outbox(), []
                if not batch:
                    continue
                for attempt in batch:
                    attempt.to(AttemptState.ON_WIRE)
                self._submitting = True
                await self.client.submit([attempt.request.message(attempt.wire_id) for attempt in batch])
                self._acknowledged(batch, loop.time())
        except LOSSES as error:
            self._pool.lost(self, _describe(error))
        finally:
            self._off_wire()  # whoever waits for the submit call must not wait for ever

    def _acknowledged(self, batch: Sequence[Attempt], now_s: float) -> None:
        """The replica has these attempts. Those that ended here meanwhile without an answer are aborted there."""
        for attempt in batch:
            if attempt.state is AttemptState.ON_WIRE:
                attempt.to(AttemptState.RUNNING)
                attempt.acknowledged_s = now_s
        self._off_wire()
        if unwanted := [a for a in batch if a.state in (AttemptState.ABORTED, AttemptState.LOST)]:
            self._spawn(self.abort(unwanted), f"abort on {self.name}")

    async def _arrival(self) -> None:
        """Return when the submit call that is under way has ended."""
        arrival = asyncio.get_running_loop().create_future()
        self._arrivals.append(arrival)
        await arrival

    def _off_wire(self) -> None:
        self._submitting = False
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():  # whoever waited may have been cancelled
                arrival.set_result(None)

    async def _read(self) -> None:
        """Consume the reports until the replica dies or the manager closes."""
        while True:
            try:
                report = await self.client.collect()
            except LOSSES as error:
                self._pool.lost(self, _describe(error))
                return
            self._pool.reported(self, report)


def _describe(error: Exception) -> str:
    # A TimeoutError mostly has no text of its own.
    return str(error) if isinstance(error, ConnectionError) else f"{type(error).__name__}: {error}"


async def ask_all(
    links: Iterable[ReplicaLink],
    what: str,
    call: Callable[[ReplicaLink], Coroutine[object, object, object]],
    timeout_s: float,
    *,
    slices: int = 1,
) -> dict[ReplicaLink, str]:
    """A control call to every replica at once. Returns the replicas that were lost in it, with the error; an empty
    error means that the call was not done in time. Raises every other error of a call.

    The time limit is waited for in `slices`: if this process itself was suspended, for however long, at most one slice
    has passed, and the answers that came meanwhile are read in the next.
    """
    loop = asyncio.get_running_loop()
    calls = {loop.create_task(call(link), name=f"{what} {link.name}"): link for link in links}
    if not calls:
        return {}
    try:
        late: set[asyncio.Task[object]] = set(calls)
        for _ in range(slices):
            if late:
                _, late = await asyncio.wait(calls, timeout=max(0.0, timeout_s / slices))
    finally:
        for task in calls:
            task.cancel()
    failed = {}
    for task, link in calls.items():
        error = None if task in late else task.exception()  # of a late task, not done yet, it would raise
        if task in late:
            failed[link] = ""
        elif isinstance(error, LOSSES):
            failed[link] = _describe(error)
        elif error is not None:
            raise error
    return failed


async def wait_drained(links: Iterable[ReplicaLink], timeout_s: float) -> None:
    """Wait until nothing is in flight anywhere, or the time is over."""
    waits = [asyncio.ensure_future(link.drained.wait()) for link in links if not link.drained.is_set()]
    if waits:
        await asyncio.wait(waits, timeout=timeout_s)
    for wait in waits:
        wait.cancel()
