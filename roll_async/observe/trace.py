"""Spans of a run in the Chrome trace format, for ui.perfetto.dev and `roll-async view`. Times are seconds of the event
loop.

    process = track: trainer, groups, each engine      thread = slot: spans of a track that overlap lie in several
    arrow: from a track to a span, as a push to an engine      counter: a number over time

The file is written while the run goes on, one event a line; `write` closes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from roll_async.observe.disk import writing

_MAX_EVENTS = 200_000


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
