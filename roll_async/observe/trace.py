"""Spans of a run in the Chrome trace format, for ui.perfetto.dev, and the phases of its start. Times are seconds of the
event loop, which is the machine's monotonic clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from roll_async.observe.disk import writing

_MAX_EVENTS = 200_000
TOLD_EVERY_S = 4.0
"""A start is silent for 5 s at most; a second is for a machine that is busy with it."""
DRIVER = "driver"
Phase = tuple[str, str, float, float]
"""(role, phase, its begin, its end)."""


class Trace:
    """Collects spans by track; written at the end of every run. Past the limit the newest spans are left out
    and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[dict[str, object]] = []
        self._tracks: dict[str, int] = {}
        self._left_out = 0

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """One span. Spans of one track that overlap are stacked by the viewer as asynchronous slices."""
        if len(self._events) >= _MAX_EVENTS:
            self._left_out += 1
            return
        number = self._tracks.setdefault(track, len(self._tracks) + 1)
        # The id pairs a begin with its end.
        common = {"name": name, "cat": track, "pid": 1, "tid": number, "id": len(self._events)}
        self._events.append({**common, "ph": "b", "ts": start_s * 1e6, "args": args})  # the format has microseconds
        self._events.append({**common, "ph": "e", "ts": end_s * 1e6})

    def write(self) -> None:
        """Write all spans to the file."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in self._tracks.items()
        ]
        content = {"traceEvents": names + self._events, "otherData": {"spans_left_out": self._left_out}}
        with writing(self._path):
            self._path.write_text(json.dumps(content))


class StartTimeline:
    """Which role was in which phase of the start of a run. Roles tell by `starting` and are not handed this object:
    they are started by many hands, whose tasks and threads share a context. A process of its own has one of its own,
    whose `seconds` or `phases` travel to the driver with the answer.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The roles are started, maybe once more."""
        self._began_s = time.monotonic()
        self._under_way: dict[tuple[str, str], float] = {}
        self.phases: list[Phase] = []
        """Those that are over."""
        self._taken = False

    @contextmanager
    def current(
        self, tell: Callable[[str], None] | None = None, *, every_s: float = TOLD_EVERY_S
    ) -> Iterator[StartTimeline]:
        """Phases of the block, and of tasks that it begins, are noted here. `tell` gets a line about those under way
        every `every_s`.
        """
        token, ended = _CURRENT.set(self), threading.Event()

        def follow(tell: Callable[[str], None]) -> None:
            while not ended.wait(every_s):
                if line := self.line():
                    tell(line)

        if tell is not None:  # a thread: imports hold the event loop for seconds
            threading.Thread(target=follow, args=(tell,), name="start", daemon=True).start()
        try:
            yield self
        finally:
            ended.set()
            _CURRENT.reset(token)

    def line(self) -> str:
        """What is under way, and for how long; empty when nothing is."""
        now, under_way = time.monotonic(), list(self._under_way.items())  # a copy: other threads change it
        parts = [f"{role} {phase} {now - began:.0f} s" for (role, phase), began in under_way]
        return f"starting, {now - self._began_s:.0f} s: {', '.join(parts)}" if parts else ""

    def enter(self, role: str, phase: str) -> None:
        """The phase begins."""
        self._under_way[role, phase] = time.monotonic()

    def leave(self, role: str, phase: str, parts: Mapping[str, float]) -> None:
        """It ends. `parts`: the phases that it consisted of, one after the other, if its process tells them."""
        began, end = self._under_way.pop((role, phase), None), time.monotonic()
        if began is None or self._taken:  # a replica that joins the running run is none of its start
            return
        for name, seconds in reversed(parts.items() if parts else [(phase, end - began)]):
            self.phases.append((role, name, end - seconds, end))
            end -= seconds

    def seconds(self) -> dict[str, float]:
        """By phase, in the order of their ends; of a process that has one role."""
        return {phase: ended - began for _, phase, began, ended in self.phases}

    def take(self) -> tuple[Phase, ...]:
        """The phases of a start that is over; none when they were taken already."""
        phases, self._taken = () if self._taken else tuple(self.phases), True
        return phases

    def metrics(self, phases: Sequence[Phase]) -> dict[str, float]:
        """`start/total_s`, until the last of them has ended, and the seconds of each."""
        found = {"start/total_s": max(end for *_, end in phases) - self._began_s} if phases else {}
        return found | {f"start/{role}/{phase}_s": end - began for role, phase, began, end in phases}


_CURRENT: ContextVar[StartTimeline | None] = ContextVar("start_timeline", default=None)


@contextmanager
def starting(role: str, phase: str) -> Iterator[dict[str, float]]:
    """The role is in this phase of a start, where one is followed. Yields the `parts` of `StartTimeline.leave`."""
    timeline, parts = _CURRENT.get(), dict[str, float]()
    if timeline is None:
        yield parts
        return
    timeline.enter(role, phase)
    try:
        yield parts
    finally:
        timeline.leave(role, phase, parts)


def started_beside(phases: Sequence[Phase]) -> None:
    """Phases of another process of this machine, whose clock is the same."""
    if (timeline := _CURRENT.get()) is not None:
        timeline.phases += phases
