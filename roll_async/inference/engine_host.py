"""The server side of `rollout/protocol.py: Replica`: many requests per call over one Engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll_async.inference.protocol import Engine, EngineLoad, EngineReport, PauseMode, Progress
from roll_async.schema import Completion, GenerateRequest

_COALESCE_S = 0.02
"""After the first result, how long `collect` waits for company while other requests run: a step or two of a small
model. A message costs a millisecond of a core, which a busy machine has better use for.
"""

PROGRESS_INTERVAL_S = 5.0
"""How often running requests are told of: the death of a replica costs what it sampled in that time."""


class EngineHost:
    """Runs submitted requests as tasks and hands finished ones over in batches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[Completion]] = {}
        self._completions: list[Completion] = []
        self._failures: list[tuple[str, str]] = []
        self._dead: ConnectionError | None = None
        self._news = asyncio.Event()
        self._told: dict[str, int] = {}
        """Request to how many of its tokens were reported while it runs."""
        self._timer: asyncio.TimerHandle | None = None
        self._progress_due = False

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Start requests; an id that already runs is reported as a failure, the running one goes on."""
        for request in requests:
            if request.request_id in self._tasks:
                self._failures.append((request.request_id, "a request with this id is already running"))
                self._news.set()
                continue
            task = asyncio.create_task(self._engine.generate(request), name=request.request_id)
            self._tasks[request.request_id] = task
            task.add_done_callback(self._ended)
        self._set_timer()

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        """Every task ends as a completion, a failure, or the end of the engine: whoever waits is told."""
        request_id = task.get_name()
        del self._tasks[request_id]
        self._told.pop(request_id, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._completions.append(task.result())
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
        """Wait for at least one result, then a moment for others; or for the next time to tell what running requests
        have generated. Raises ConnectionError when the engine is dead.
        """
        while True:
            await self._news.wait()
            await asyncio.sleep(_COALESCE_S if self._tasks else 0)
            if self._dead is not None and not self._completions:
                raise self._dead
            self._news.clear()
            completions, self._completions = self._completions, []
            failures, self._failures = self._failures, []
            progress = self._progress() if self._progress_due and self._dead is None else []
            if self._dead is not None:
                self._news.set()
            if completions or failures or progress:
                return EngineReport(
                    completions=tuple(completions),
                    failures=tuple(failures),
                    load=self._engine.load(),
                    progress=tuple(progress),
                )

    def _progress(self) -> list[Progress]:
        """What running requests generated since they were told of."""
        self._progress_due = False
        self._set_timer()
        news = []
        for request_id in self._tasks:
            start = self._told.get(request_id, 0)
            piece = self._engine.progress(request_id, start)
            if piece is not None:
                news.append(Progress(start=start, piece=piece))
                self._told[request_id] = start + len(piece.token_ids)
        return news

    async def abort(self, request_ids: Sequence[str]) -> None:
        """When this returns none of the requests runs, and their results are ready for `collect`."""
        tasks = [self._tasks[i] for i in request_ids if i in self._tasks]
        await self._engine.abort(request_ids)
        if tasks:
            await asyncio.wait(tasks)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load(self) -> EngineLoad:
        return self._engine.load()
