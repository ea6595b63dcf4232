"""Traffic with one replica: what is in flight there, one call per batch of requests, one reader of its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Protocol

from roll_async.inference.protocol import EngineReport, PauseMode
from roll_async.rollout.protocol import Replica
from roll_async.rollout.requests import PendingRequest
from roll_async.schema import GenerateRequest

Spawn = Callable[[Coroutine[object, object, None], str], asyncio.Task[None]]


class Listener(Protocol):
    """Who hears from a replica."""

    def reported(self, link: ReplicaLink, report: EngineReport) -> None: ...

    def lost(self, link: ReplicaLink, reason: str) -> None:
        """The replica is dead; called at most once per call that found out."""


class ReplicaLink:
    """One replica of the manager. A dead one is reported to the listener, never raised."""

    def __init__(self, client: Replica, listener: Listener, spawn: Spawn) -> None:
        self.client = client
        self.name = client.name
        self.in_flight: dict[str, PendingRequest] = {}
        self.drained = asyncio.Event()
        """Set while nothing is in flight."""
        self.drained.set()
        self._listener, self._spawn = listener, spawn
        self._outbox: list[GenerateRequest] = []
        self._submitting = False
        self._quiet: asyncio.Event | None = None
        """Somebody waits until nothing is in the outbox or on its way."""
        self._idle: asyncio.Future[None] | None = None
        """The writer waits for something in the outbox."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def open(self) -> None:
        """Begin to read reports and to send."""
        self._tasks = (
            self._spawn(self._read(), f"reader of {self.name}"),
            self._spawn(self._write(), f"submit to {self.name}"),
        )

    def cut(self) -> list[PendingRequest]:
        """Neither read nor send any more; what was in flight."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._outbox.clear()
        orphans, self.in_flight = list(self.in_flight.values()), {}
        self.drained.set()
        return orphans

    def send(self, pending: PendingRequest) -> None:
        """The next attempt of a request; it leaves with whatever else gathered meanwhile."""
        message = pending.next_attempt()
        if not self.in_flight:
            self.drained.clear()
        self.in_flight[pending.wire_id] = pending
        self._outbox.append(message)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def recall(self) -> list[PendingRequest]:
        """What has not left yet; it is not sent, and still counts as in flight until it is detached."""
        held, self._outbox = self._outbox, []
        return [self.in_flight[message.request_id] for message in held if message.request_id in self.in_flight]

    async def stop(self, mode: PauseMode) -> None:
        """Pause the replica. A request that arrived behind the pause would wait there for its end, and the caller for
        it, so with ABORT these are aborted too.
        """
        await self._call(self.client.pause(mode))
        if mode is PauseMode.ABORT:
            await self._until_quiet()
            if late := [p.wire_id for p in self.in_flight.values()]:
                await self.abort(late)

    async def resume(self) -> None:
        """Let the replica run again."""
        await self._call(self.client.resume())

    async def abort(self, wire_ids: Sequence[str]) -> None:
        """End these attempts."""
        await self._call(self.client.abort(wire_ids))

    async def ping(self) -> None:
        """Returns when the replica has answered."""
        await self._call(self.client.load())

    def take(self, wire_id: str) -> PendingRequest | None:
        """This attempt ends here; later replies of it are late. None when it was not in flight."""
        pending = self.in_flight.pop(wire_id, None)
        if not self.in_flight:
            self.drained.set()
        return pending

    async def _call(self, work: Coroutine[object, object, object]) -> None:
        """A control call."""
        try:
            await work
        except ConnectionError as error:
            self._listener.lost(self, str(error))

    async def _until_quiet(self) -> None:
        """Until no submit is under way, or the replica is gone."""
        if self._outbox or self._submitting:
            self._quiet = quiet = self._quiet or asyncio.Event()
            await quiet.wait()

    def _now_quiet(self) -> None:
        self._submitting = False
        if self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    async def _write(self) -> None:
        """Send what gathered in the outbox, in one call; what comes meanwhile goes with the next."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._outbox:
                    self._idle = loop.create_future()
                    await self._idle
                self._submitting = True
                while self._outbox:
                    batch, self._outbox = self._outbox, []
                    await self.client.submit(batch)
                self._now_quiet()
        except ConnectionError as error:
            self._listener.lost(self, str(error))
        finally:
            self._now_quiet()

    async def _read(self) -> None:
        """Consume the reports until the replica dies or the manager closes."""
        try:
            while True:
                self._listener.reported(self, await self.client.collect())
        except ConnectionError as error:
            self._listener.lost(self, str(error))


async def ask_all(
    links: Iterable[ReplicaLink],
    what: str,
    call: Callable[[ReplicaLink], Coroutine[object, object, None]],
    timeout_s: float,
    *,
    slices: int = 1,
) -> dict[ReplicaLink, str]:
    """A control call to every replica at once. Those that failed it, with the error; empty: not done in time.

    The time is waited for in so many slices: when this process stood still itself, for however long, one of them at
    most is over, and the answers that came meanwhile are read in the next.
    """
    loop = asyncio.get_running_loop()
    calls = {loop.create_task(call(link), name=f"{what} {link.name}"): link for link in links}
    if not calls:
        return {}
    try:
        late: set[asyncio.Task[None]] = set(calls)
        for _ in range(slices):
            if late:
                _, late = await asyncio.wait(calls, timeout=max(0.0, timeout_s / slices))
    finally:
        for task in calls:
            task.cancel()
    failed = {}
    for task, link in calls.items():
        error = None if task in late else task.exception()
        if task in late:
            failed[link] = ""
        elif isinstance(error, (RuntimeError, OSError, ValueError)):
            failed[link] = f"{type(error).__name__}: {error}"
        elif error is not None:
            raise error
    return failed


async def abort_on(links: Mapping[str, ReplicaLink], running: Sequence[PendingRequest], timeout_s: float) -> bool:
    """End the present attempts of these requests, wherever they run. False: not acknowledged in time."""
    by_server: dict[str, list[str]] = {}
    for pending in running:
        if pending.server is not None:
            by_server.setdefault(pending.server, []).append(pending.wire_id)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(links[name].abort(ids) for name, ids in by_server.items() if name in links))
    except TimeoutError:
        return False
    return True


async def wait_drained(links: Iterable[ReplicaLink], timeout_s: float) -> None:
    """Until nothing is in flight anywhere, or the time is over."""
    waits = [asyncio.ensure_future(link.drained.wait()) for link in links if not link.drained.is_set()]
    if waits:
        await asyncio.wait(waits, timeout=timeout_s)
    for wait in waits:
        wait.cancel()
