"""A run's folder for those who look at it: `view`, `status`, `compare` and `samples`. Nothing is written but the index
of its samples, and everything may be read again while the run goes on.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from roll_async.observe.reading.advisories import advisories
from roll_async.observe.reading.sample_index import INDEX, SampleIndex
from roll_async.observe.run_folder import leaves, step_record
from roll_async.observe.run_record import read_record, state_of
from roll_async.observe.sample_dump import SAMPLES

_ABSENT = "(absent)"
_UNLIKE = ("exp_name", "output_dir", "checkpoint.output_dir", "ledger.path", "template_time")
"""Keys that differ between any two runs."""
_ERROR = re.compile(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ERROR .*")
"""A line of the log itself: texts of answers are in it, too."""
_LANE_SPANS = 4000
"""Newest spans of the trace that a reader is given."""
WAITS = {
    "rollouts": "answers of engines", "rewards": "scores", "collation": "the driver's tensors",
    "roles": "reference, teacher or critic", "weights": "weight pushes", "validation": "a validation",
    "checkpoint": "a checkpoint", "records": "the ledger",
}  # fmt: skip
"""Ends of `idle/trainer_*`: what the trainer waits for."""


class AppendedLines:
    """The whole lines of a file that grows; from its beginning again where it is another file or has been cut."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1
        self.generation = 0
        """Grows when what was read before no longer counts."""

    def new(self) -> list[str]:
        """The lines since the last call; a line without its end is left for the next one."""
        try:
            with open(self._path, "rb") as file:
                status = self._path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self.forget()
                    self._inode = status.st_ino
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if whole else []

    def forget(self) -> None:
        """Begin again at the next call."""
        self.generation, self._offset = self.generation + 1, 0


class RunReader:
    """One run. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a folder that is none of a run."""
        path = Path(os.path.abspath(path))  # `.` and `..` have no name of their own
        if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl")):
            what = "has neither run.json nor metrics.jsonl" if path.is_dir() else "is no folder"
            near = (path, path / "output", path.parent, path.parent / "output", path.parent.parent)
            folder = next((each for each in near if any(each.glob("*/run.json"))), path.parent)
            raise ValueError(f"{path} {what}: give the folder of a run; `roll-async runs {folder}` lists them")
        self.path = path
        self._metrics, self._trace = AppendedLines(path / "metrics.jsonl"), AppendedLines(path / "trace.json")
        self._rows: list[dict[str, float]] = []
        self._events: list[dict[str, object]] = []
        self._read: tuple[int, int] = (0, 0)
        self._samples: SampleIndex | None = None

    @property
    def generation(self) -> int:
        """Grows when the run went back to an earlier step: rows given before no longer count."""
        return self._metrics.generation

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a step, numbers alone. Raises ValueError for a damaged line, whenever it is asked."""
        lines = self._metrics.new()
        if self._metrics.generation != self._read[0]:
            self._rows = []
        file, first = self.path / "metrics.jsonl", len(self._rows) + 1
        try:
            self._rows += [_numbers(step_record(line, f"{file}:{n}")) for n, line in enumerate(lines, first)]
        except ValueError:
            self._metrics.forget()
            raise
        self._read = (self._metrics.generation, self._read[1])
        return self._rows

    @property
    def config(self) -> dict[str, object]:
        """Values of config.yaml by their full key; empty where there is none. Raises ValueError for no YAML."""
        path = self.path / "config.yaml"
        try:
            return leaves(yaml.safe_load(path.read_bytes())) if path.is_file() else {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML ({' '.join(str(error).split())}); repair it or remove it") from error

    @property
    def samples(self) -> SampleIndex:
        """All samples where the run dumps all, else those that it keeps."""
        if self._samples is None:
            dumped = self.config.get("tracking.rollout_dump_dir")
            folder = Path(str(dumped)) if dumped and Path(str(dumped)).is_dir() else self.path / SAMPLES
            self._samples = SampleIndex(folder, self.path / INDEX)
        return self._samples

    @property
    def lanes(self) -> list[dict[str, object]]:
        """The newest spans of trainer and engines: track, slot, name, begin and end in seconds."""
        lines = self._trace.new()
        if self._trace.generation != self._read[1]:
            self._events = []
        self._read = (self._read[0], self._trace.generation)
        for line in lines:
            with suppress(ValueError):  # half of a line, which a full disk left
                self._events += [json.loads(line.rstrip(","))] if line.startswith('{"name"') else []
        tracks = {e["pid"]: e["args"]["name"] for e in self._events if e["name"] == "process_name"}  # type: ignore[index]
        spans = [e for e in self._events if e["ph"] == "X" and tracks.get(e["pid"], "groups") != "groups"]
        return [
            {
                "track": tracks[e["pid"]],
                "slot": e["tid"],
                "name": e["name"],
                "begin": e["ts"] / 1e6,  # type: ignore[operator]
                "end": (e["ts"] + e["dur"]) / 1e6,  # type: ignore[operator]
            }
            for e in spans[-_LANE_SPANS:]
        ]

    def about(self) -> dict[str, object]:
        """Name, id, state, steps, what stands out, and how the run is continued."""
        record, metrics = read_record(self.path), self.metrics
        state, reason = ("-", "") if record is None else state_of(self.path, record)
        config, last = self.config, metrics[-1] if metrics else {}
        return {
            "name": self.path.name,
            "path": str(self.path),
            "id": "-" if record is None else record.run_id,
            "started": "-" if record is None else record.started,
            "state": state,
            "reason": reason,
            "step": int(last.get("step", 0)),
            "max_steps": config.get("max_steps", "-"),
            "reward": last.get("reward/mean"),
            "loss": last.get("trainer/loss"),
            "waits": who_waits(metrics),
            "continue": "" if record is None or state in ("running", "finished") else _again(record.command),
            "advisories": advisories(metrics, config),
        }

    def last_error(self) -> str:
        """The last line of run.log with an error; empty without one."""
        log = self.path / "run.log"
        if not log.is_file():
            return ""
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 20)))  # of a long log its end
            errors = _ERROR.findall(file.read().decode(errors="replace"))
        return errors[-1] if errors else ""

    def close(self) -> None:
        """Close the index."""
        if self._samples is not None:
            self._samples.close()


def who_waits(metrics: Sequence[Mapping[str, float]], num_steps: int = 10) -> str:
    """Of the last steps: for which share of them the trainer had no work, and why; and the engines, if it has any."""
    newest = metrics[-num_steps:]
    if not newest:
        return "no step is trained yet"
    if not any(key.startswith("idle/") for row in newest for key in row):
        return ""

    def mean(key: str) -> float:
        return sum(row.get(key, 0.0) for row in newest) / len(newest)

    cause = max(WAITS, key=lambda name: mean(f"idle/trainer_{name}"))
    return (
        f"trainer without work {sum(mean(f'idle/trainer_{name}') for name in WAITS):.0%} of the last {len(newest)} "
        f"steps, most of it for {WAITS[cause]} ({mean(f'idle/trainer_{cause}'):.0%}); engines idle "
        f"{mean('idle/engines'):.0%}"
    )


def config_differences(one: RunReader, other: RunReader) -> list[tuple[str, str, str]]:
    """(key, value in one, value in the other) of the keys that say something else, without paths and names."""
    first, second = one.config, other.config
    return [
        (key, str(first.get(key, _ABSENT)), str(second.get(key, _ABSENT)))
        for key in sorted(first.keys() | second.keys())
        if first.get(key, _ABSENT) != second.get(key, _ABSENT) and key not in _UNLIKE
    ]


def visible(text: str) -> str:
    """Control characters as escapes, so that the text of an answer moves no cursor and reorders no line."""
    return "".join(c if c in "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def _again(command: Sequence[str]) -> str:
    words = [word for word in command if not word.startswith("checkpoint.resume_from=")]
    return shlex.join([*words, "checkpoint.resume_from=latest"])
