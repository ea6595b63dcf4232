"""The server side of `rollout/protocol.py: Replica`: many requests per call over one Engine."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from roll_async.inference.protocol import EngineLoad, EngineReport, PauseMode, Progress
from roll_async.inference.stop_strings import safe_end
from roll_async.observe.machine import peak_bytes
from roll_async.schema import Completion, ExpertRecord, FinishReason, GenerateRequest, cut_runs

_WINDOW_S = 0.02
"""The batching window of `collect`: so long after the first result others may join it, while other requests run. It is
a step or two of a small model.
"""
_MOST_WINDOWS = 5
"""Upper bound of windows; used while requests wait in the engine, which then does not need the next ones yet."""
_MESSAGE_S = 0.002
"""What a report and the requests that answer it take from an engine in this process, however many they are."""

PROGRESS_INTERVAL_S = 5.0
"""Interval of progress reports of running requests. When a replica dies, the tokens since its last report are lost."""

_AVERAGED = 64
"""Number of requests, about, whose seconds are averaged."""
_ABORT_AGAIN_S = 0.5
_ABORT_WITHIN_S = 10.0
"""A request that its engine has not ended by then is cancelled."""
_REMEMBERED = 4096
"""Number of ids kept of aborts that arrived before their requests."""


class HostedEngine(Protocol):
    """What the host asks of `inference/engine.py: Engine`, or of a simulated one. A dead one raises ConnectionError."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def progress(self, request_id: str, start: int) -> Completion | None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    def load(self) -> EngineLoad: ...


class EngineHost:
    """Runs submitted requests as tasks and returns finished ones in batches."""

    def __init__(self, engine: HostedEngine, measure_memory: Callable[[], int] = peak_bytes) -> None:
        """`measure_memory`: of the engine and its processes; a simulated one has none of its own."""
        self._engine, self._measure_memory = engine, measure_memory
        self._tasks: dict[str, asyncio.Task[Completion]] = {}
        self._stops: dict[str, tuple[str, ...]] = {}
        """Stop strings of the running requests that use them."""
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        """Ids to end before they begin: their abort overtook their submit, or their task had not run yet."""
        self._completions: list[Completion] = []
        self._failures: list[tuple[str, str]] = []
        self._dead: ConnectionError | None = None
        self._news = asyncio.Event()
        self._told: dict[str, int] = {}
        """Number of reported tokens of each running request."""
        self._num_completed, self._mean_s = 0, 0.0
        """Seconds that the last requests generated, on average."""
        self._timer: asyncio.TimerHandle | None = None
        self._progress_due = False
        self._peak_bytes, self._peak_due_s = 0, 0.0

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start requests; an id that already runs is reported as a failure, the running one goes on."""
        for request in requests:
            if request.request_id in self._tasks:
                self._failures.append((request.request_id, "a request with this id is already running"))
                self._news.set()
                continue
            if request.sampling.stop_strings:
                self._stops[request.request_id] = request.sampling.stop_strings
            # `_ended` knows the request by the name.
            task = asyncio.create_task(self._generate(request), name=request.request_id)
            self._tasks[request.request_id] = task
            # Not a `finally` of `_generate`: a task that is cancelled before its first step never enters it.
            task.add_done_callback(self._ended)
        self._set_timer()

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Run one request, unless it was aborted before this task started."""
        if request.request_id in self._unwanted:
            return Completion.empty(request.request_id)
        completion = await self._engine.generate(request)
        return self._whole_text(completion) if completion.finish_reason is FinishReason.ABORT else completion

    def _whole_text(self, part: Completion) -> Completion:
        """The tokens of an unfinished response without a trailing part of a stop string."""
        stops = self._stops.get(part.request_id, ())
        end = safe_end(self._engine.decode, part.token_ids, stops) if stops else len(part.token_ids)
        if end == len(part.token_ids):
            return part
        return replace(
            part,
            token_ids=part.token_ids[:end],
            logprobs=part.logprobs[:end],
            version_runs=cut_runs(part.version_runs, 0, end),
            experts=_without_last(part.experts, len(part.token_ids) - end),
        )

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        """Every task ends as a completion, a failure, or the failure of the engine, so that no caller waits forever."""
        request_id = task.get_name()
        del self._tasks[request_id]
        self._told.pop(request_id, None)
        self._stops.pop(request_id, None)
        self._unwanted.pop(request_id, None)
        # `exception()` of a cancelled task would raise here.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._completions.append(task.result())
            self._num_completed += 1
            # The mean of the first ones, then one in which older requests count ever less.
            self._mean_s += (task.result().generation_s - self._mean_s) / min(self._num_completed, _AVERAGED)
        elif isinstance(error, ConnectionError):
            self._dead = error
        else:
            self._failures.append((request_id, f"{type(error).__name__}: {error}"))
        self._news.set()

    def _set_timer(self) -> None:
        if self._timer is None and self._tasks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PROGRESS_INTERVAL_S, self._interval_over)

    def _interval_over(self) -> None:
        self._timer, self._progress_due = None, True
        self._news.set()

    async def collect(self) -> EngineReport:
        """Wait for at least one result, then for others to join it; or for the next report of what running requests
        have generated. Raises ConnectionError when the engine is dead.
        """
        while True:
            await self._news.wait()
            await self._others_join()
            # Results from before the death are handed over first.
            if self._dead is not None and not self._completions:
                raise self._dead
            self._news.clear()
            completions, self._completions = self._completions, []
            failures, self._failures = self._failures, []
            progress = self._progress() if self._progress_due and self._dead is None else []
            if self._dead is not None:  # the next call has to find the death
                self._news.set()
            if completions or failures or progress:
                return EngineReport(
                    completions=tuple(completions),
                    failures=tuple(failures),
                    load=self._load(),
                    progress=tuple(progress),
                )

    async def _others_join(self) -> None:
        """Return after as many batching windows as there are to wait for, or when nothing runs that could join."""
        for waited in range(_MOST_WINDOWS):
            if self._dead is not None or not self._tasks or waited >= self._windows():
                return
            await asyncio.sleep(_WINDOW_S)

    def _windows(self) -> int:
        """The economic order quantity (Harris, "How many parts to make at once", 1913): a report costs `_MESSAGE_S`,
        and a slot that ended stays empty for half of the interval in every `_mean_s`, the mean duration of a request;
        their sum is least at interval = sqrt(2 * _MESSAGE_S * _mean_s).
        """
        if self._engine.load().waiting:
            return _MOST_WINDOWS
        return min(_MOST_WINDOWS, max(1, round(math.sqrt(2 * _MESSAGE_S * self._mean_s) / _WINDOW_S)))

    def _progress(self) -> list[Progress]:
        """The tokens that running requests generated since the last progress report."""
        self._progress_due = False
        self._set_timer()
        news = []
        for request_id in self._tasks:
            start = self._told.get(request_id, 0)
            piece = self._engine.progress(request_id, start)
            if piece is not None:
                piece = self._whole_text(piece)
            if piece is not None and piece.token_ids:
                news.append(Progress(start=start, piece=piece))
                self._told[request_id] = start + len(piece.token_ids)
        return news

    async def abort(self, request_ids: Sequence[str]) -> None:
        """When this returns none of the requests runs, and their results are ready for `collect`. That takes
        `_ABORT_WITHIN_S` at most. An id that is not known is remembered: its request may still be on its way, and then
        does not begin.
        """
        for request_id in request_ids:
            self._unwanted[request_id] = None
        # The oldest go first: their requests will not come any more, or have ended long ago.
        while len(self._unwanted) > _REMEMBERED:
            self._unwanted.popitem(last=False)
        left = {self._tasks[i] for i in request_ids if i in self._tasks}
        try:
            async with asyncio.timeout(_ABORT_WITHIN_S):
                await self._engine.abort(request_ids)
                while left:  # a request may have reached the engine after the abort
                    _, left = await asyncio.wait(left, timeout=_ABORT_AGAIN_S)
                    if left:
                        await self._engine.abort([task.get_name() for task in left])
        except TimeoutError:
            left = {task for task in left if not task.done()}
            for task in left:
                task.cancel()
            if left:
                # With a limit: what ignores its cancellation must not hold up the abort.
                await asyncio.wait(left, timeout=_ABORT_AGAIN_S)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load(self) -> EngineLoad:
        return self._load()

    def _load(self) -> EngineLoad:
        """The engine's load, and the number of requests on this host."""
        # They count as held: a caller would take one that is neither running nor told for lost.
        ended = (*(c.request_id for c in self._completions), *(i for i, _ in self._failures))
        if (now := asyncio.get_running_loop().time()) >= self._peak_due_s:
            # Not at every report: it reads /proc of every process of the replica.
            self._peak_bytes, self._peak_due_s = self._measure_memory(), now + PROGRESS_INTERVAL_S
        return replace(self._engine.load(), held=frozenset((*self._tasks, *ended)), peak_bytes=self._peak_bytes)


def _without_last(record: ExpertRecord | None, positions: int) -> ExpertRecord | None:
    """A record without its last positions; None when nothing is left."""
    if record is None or positions >= record.num_positions:
        return None
    size = (record.num_positions - positions) * record.num_layers * record.top_k
    return replace(record, ids=record.ids[:size])
