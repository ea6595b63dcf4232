"""Spans of a run in the Chrome trace format, for ui.perfetto.dev. Times are seconds of the event loop."""

from __future__ import annotations

import json
from pathlib import Path

from roll_async.observe.disk import writing

_MAX_EVENTS = 200_000


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
