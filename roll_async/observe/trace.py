"""Spans of a run in the Chrome trace format, for ui.perfetto.dev and `roll-async view`, and the phases of its start.
Times are seconds of the event loop, which is the machine's monotonic clock.

    process = track: trainer, groups, each engine      thread = slot: spans of a track that overlap lie in several
    arrow: from a track to a span, as a push to an engine      counter: a number over time

The file is written while the run goes on, one event a line; `write` closes it.
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
    """Collects events by track. Past the limit the newest are left out and counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        """Of events that the file does not have yet."""
        self._slots: dict[str, list[float]] = {}
        """By track, the end of the last span in each slot."""
        self._count, self._arrows, self._left_out = 0, 0, 0
        self._begun = False

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """One span, in the first slot of its track that is free. `arrow_from` among the arguments: a track from which
        an arrow leads to the span, at its start.
        """
        if self._count >= _MAX_EVENTS:
            self._left_out += 1
            return
        source = args.pop("arrow_from", None)
        place = self._place(track, start_s, end_s)
        event = {"name": name, "cat": track, **place, "ph": "X", "ts": _us(start_s), "dur": _us(end_s - start_s)}
        self._add(event | {"args": args})
        if isinstance(source, str) and source in self._slots:
            self._arrows += 1
            arrow = {"name": name, "cat": "arrows", "id": self._arrows, "ts": _us(start_s)}
            self._add({**arrow, "ph": "s", "pid": self._pid(source), "tid": 1})
            self._add({**arrow, "ph": "f", "bp": "e", **place})  # bp e: to the span around this time, not the next one

    def counters(self, now_s: float, values: Mapping[str, float]) -> None:
        """Numbers as of now, each drawn as a graph of its own."""
        if self._count < _MAX_EVENTS:
            for name, value in values.items():
                self._add({"name": name, "ph": "C", "pid": 0, "tid": 0, "ts": _us(now_s), "args": {"value": value}})

    def flush(self) -> None:
        """Append what is new to the file."""
        if not self._begun:
            self._lines.insert(0, '{"traceEvents":[')
        with writing(self._path), open(self._path, "a" if self._begun else "w") as file:
            file.write("".join(line + "\n" for line in self._lines))
        self._begun, self._lines = True, []

    def write(self) -> None:
        """Append what is new, and close the file."""
        self._add({"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "counters"}}, ends="")
        self._lines.append(f'],"otherData":{{"spans_left_out":{self._left_out}}}}}')
        self.flush()

    def _place(self, track: str, start_s: float, end_s: float) -> dict[str, int]:
        """The slot that takes a span: process and thread."""
        if track not in self._slots:
            self._slots[track] = []
            self._name("process_name", self._pid(track), 0, track)
        pid, ends = self._pid(track), self._slots[track]
        slot = next((i for i, end in enumerate(ends) if end <= start_s), len(ends))
        if slot == len(ends):
            ends.append(end_s)
            self._name("thread_name", pid, slot + 1, f"slot {slot + 1}")
        ends[slot] = end_s
        return {"pid": pid, "tid": slot + 1}

    def _pid(self, track: str) -> int:
        return list(self._slots).index(track) + 1

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._add({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})

    def _add(self, event: Mapping[str, object], ends: str = ",") -> None:
        self._count += 1
        self._lines.append(json.dumps(event, separators=(",", ":")) + ends)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)  # the format has microseconds


class StartTimeline:
    """Which role was in which phase of the start of a run. Roles tell by `starting` and are not handed this object:
    they are started by many hands, whose tasks and threads share a context. A process of its own has one of its own,
    whose `seconds` or `phases` travel to the driver with the answer.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] | None = None
        """Gets a line about what is under way every few seconds; a screen that shows it live sets None."""
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
        self.tell = tell
        token, ended = _CURRENT.set(self), threading.Event()

        def follow() -> None:
            while not ended.wait(every_s):
                if self.tell is not None and (line := self.line()):
                    self.tell(line)

        if tell is not None:  # a thread: imports hold the event loop for seconds
            threading.Thread(target=follow, name="start", daemon=True).start()
        try:
            yield self
        finally:
            ended.set()
            _CURRENT.reset(token)

    def elapsed_s(self) -> float:
        """Since the roles began to start."""
        return time.monotonic() - self._began_s

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
        for name, seconds in reversed([*parts.items()] or [(phase, end - began)]):
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


def followed() -> StartTimeline:
    """The timeline of the start under way; one that nobody follows where there is none."""
    return _CURRENT.get() or StartTimeline()


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
