"""One replica as the rollout and the synchronizer see it: the real `EngineHost` over a fake engine, and a line between
them that may delay, double, lose or reorder replies, stop to answer, or break.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from roll_async.cluster.remote import CallRules, Proxy, calls_of
from roll_async.inference.engine_host import EngineHost
from roll_async.inference.protocol import EngineCapabilities, EngineReport, Progress
from roll_async.rollout.protocol import Replica
from roll_async.schema import Completion, GenerateRequest
from roll_async.simulator.parts.engine import SimEngine
from roll_async.simulator.parts.models import EngineFaults, uniform
from roll_async.weight_sync.errors import EngineDead
from roll_async.weight_sync.protocol import TakesWeights

_DOUBLE_WITHIN_S = 5.0
_NEVER_S = 1e9
_OF_ENGINE = frozenset(calls_of(TakesWeights))
_CONTROL = {"abort", "pause", "resume"}
"""Calls that a deaf replica ignores."""


class SimReplica(Proxy, Replica):
    """Calls go through the line, `collect` also through its faults. It never scores."""

    def __init__(
        self,
        engine: SimEngine,
        seed: int,
        faults: EngineFaults,
        *,
        swap_s: float = 0.0,
        submitted: Callable[[Sequence[GenerateRequest]], None] = lambda requests: None,
        host: type[EngineHost] = EngineHost,
    ) -> None:
        """`submitted` is called with the requests that arrive."""
        super().__init__(self, CallRules(role=engine.name, deadline_s=None, own=(Exception,)))
        self.name, self.engine = engine.name, engine
        self.capabilities: EngineCapabilities = engine.capabilities
        self._seed, self._faults, self._swap_s = seed, faults, swap_s
        self._submitted = submitted
        # `int()` is 0: no memory is measured.
        self._host = host(engine, measure_memory=int)  # pyright: ignore[reportArgumentType]  # never sleeps
        self._reader: asyncio.Task[None] | None = None
        self._completions: list[Completion] = []
        self._failures: list[tuple[str, str]] = []
        self._progress: list[Progress] = []
        self._broken: str | None = None
        self._news = asyncio.Event()
        self._calls = 0

    async def invoke(self, method: str, *args: object) -> Any:
        """`cluster/remote.py: Channel`: the way there, the call of the host or of the engine, the way back."""
        await self._reach(control=method in _CONTROL)
        if method == "submit":
            self._submitted(*args)  # pyright: ignore[reportArgumentType]  # as the protocol has it
        if method == "commit" and self._swap_s:
            await asyncio.sleep(self._swap_s)
        target = self.engine if method in _OF_ENGINE else self._host
        value = await getattr(target, method)(*args)
        await self._answer()
        return value

    async def collect(self) -> EngineReport:
        """Through the faulty connection if there is one, else directly from the host."""
        self._check()
        if self._faults.lets_replies_through_in_order and self._faults.crash_at_s is None:
            return await self._host.collect()
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"line of {self.name}")
        await self._news.wait()
        self._check()  # it may have died while its news were waited for
        self._news.clear()
        completions, self._completions = self._completions, []
        failures, self._failures = self._failures, []
        progress, self._progress = self._progress, []
        return EngineReport(
            completions=tuple(completions),
            failures=tuple(failures),
            load=self.engine.load(),
            progress=tuple(progress),
        )

    async def _read(self) -> None:
        """Take replies from the host and deliver each with its own delay or fault."""
        try:
            while True:
                report = await self._host.collect()
                for progress in report.progress:
                    name = f"{progress.piece.request_id}/{progress.start}"
                    self._send(name, partial(self._progressed, progress))
                for completion in report.completions:
                    self._send(completion.request_id, partial(self._arrive, completion))
                self._failures += report.failures
                self._news.set()
        except ConnectionError as error:
            self.crash(str(error))

    def _send(self, reply: str, arrive: Callable[[], None]) -> None:
        """Lose it, or let it arrive: now, later, twice."""
        loop, faults = asyncio.get_running_loop(), self._faults
        start = faults.silent_from_s
        frozen = _begun(faults.frozen_from_s) or _begun(faults.half_open_from_s)
        if frozen or (start is not None and start <= loop.time() < start + faults.silent_for_s):
            return
        name = (self._seed, self.name, reply)
        delay = faults.delay_s * uniform("delay", *name)
        if uniform("double", *name) < faults.duplicate_share:
            loop.call_later(delay + _DOUBLE_WITHIN_S * uniform("again", *name), arrive)
        if delay:
            loop.call_later(delay, arrive)
        else:
            arrive()

    def _arrive(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._news.set()

    def _progressed(self, progress: Progress) -> None:
        self._progress.append(progress)
        self._news.set()

    def crash(self, reason: str = "crashed") -> None:
        """The process is gone, and what was on the line with it."""
        if self._broken is None:
            self._broken = reason
            self.engine.die(reason)
            self._news.set()

    @property
    def ignores_calls(self) -> bool:
        """It no longer answers aborts, so that requests it still runs are no finding."""
        faults = self._faults
        silent = (faults.deaf_from_s, faults.frozen_from_s, faults.half_open_from_s, faults.errors_from_s)
        return any(map(_begun, silent))

    @property
    def alive(self) -> bool:
        """Its process runs."""
        return self._broken is None

    def _check(self) -> None:
        if self._broken is not None:
            raise ConnectionError(f"{self.name}: {self._broken}")

    async def _reach(self, *, control: bool = False) -> None:
        """Returns when the call has arrived, which may be never. `control`: of the kind that a deaf replica ignores."""
        self._check()
        self._calls += 1
        if self._faults.way_s:
            # With the number of the call: each has a latency of its own.
            await asyncio.sleep(self._faults.way_s * uniform("way", self._seed, self.name, self._calls))
            self._check()  # it may have died while the call was on its way
        if _begun(self._faults.errors_from_s):
            raise EngineDead(f"{self.name}: an illegal memory access was encountered")
        if _begun(self._faults.frozen_from_s) or (control and _begun(self._faults.deaf_from_s)):
            await asyncio.sleep(_NEVER_S)
            self._check()

    async def _answer(self) -> None:
        """The way back of a call, which a half-open line does not carry."""
        if _begun(self._faults.half_open_from_s):
            await asyncio.sleep(_NEVER_S)
            self._check()

    async def close(self) -> None:
        """End its line."""
        if self._reader is not None:
            self._reader.cancel()


def _begun(from_s: float | None) -> bool:
    return from_s is not None and asyncio.get_running_loop().time() >= from_s
