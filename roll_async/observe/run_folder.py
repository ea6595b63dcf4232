"""The output folder of a run, `output_dir/exp_name/`: config, metrics, logs."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import yaml

from roll_async.observe.disk import cannot, writing
from roll_async.observe.run_record import RECORD, RunRecord, write_record

logger = logging.getLogger(__name__)

_IsSecret = Callable[[tuple[str, ...], object], bool]
"""Of a path in a config and what is there."""
_ABSENT = "(absent)"
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
_NAMED_KEYS = 5
"""Of the keys that changed since the last start, in the warning; the log has all with their values."""


class RunFolder:
    """The folder of one run. Creating it is the first thing a run writes, once it holds the lock.

    `record`: which run it is. None for the folder of a command that has no lineage (`eval`, `rollout`).
    """

    def __init__(self, output_dir: str, exp_name: str, record: RunRecord | None = None) -> None:
        self.path, self.record = Path(output_dir) / exp_name, record
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot(f"output_dir {output_dir}: cannot create {self.path}", error) from error

    def update_record(self, **changes: object) -> RunRecord:
        """Change fields of the record, on the disk as well."""
        assert self.record is not None, "a folder without lineage"
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        with writing(self.path / RECORD):
            write_record(self.path, self.record)
        return self.record

    def write_config(self, text: str, is_secret: _IsSecret = lambda *_: False) -> None:
        """The config as resolved, under a comment with the run's id. One that differs from what an earlier start wrote
        leaves that one beside it, as config.1.yaml, config.2.yaml ..., and each key that changed in the log: call
        `open_log` before. The log has no value that `is_secret` at its path.
        """
        text = text if self.record is None else f"# run {self.record.run_id}\n{text}"
        path, partial = self.path / "config.yaml", self.path / "config.partial"
        before = path.read_text() if path.is_file() else None
        if before == text:
            return
        with writing(path):
            try:
                partial.write_text(text)
                if before is not None:
                    self._keep(path, before, text, is_secret)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def _keep(self, path: Path, before: str, text: str, is_secret: _IsSecret) -> None:
        """Rename the config of the last start, and log what is different."""
        kept = self._unused_name("config", "yaml")
        path.rename(kept)
        old, new = (leaves(yaml.safe_load(config)) for config in (before, text))
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
        named = ", ".join(changed[:_NAMED_KEYS]) + (", ..." if len(changed) > _NAMED_KEYS else "")
        logger.warning(
            "the config of the last start differs in %d keys (%s); it is kept as %s", len(changed), named, kept.name
        )
        for key in changed:
            values = f"{old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}"
            logger.info("config: %s: %s", key, "a secret" if is_secret(tuple(key.split(".")), values) else values)

    def keep_trace(self) -> None:
        """Leave the trace of an earlier start as trace.1.json, trace.2.json ...: every start writes its own."""
        if (path := self.path / "trace.json").is_file():
            path.rename(self._unused_name("trace", "json"))

    def _unused_name(self, stem: str, ending: str) -> Path:
        return next(p for n in itertools.count(1) if not (p := self.path / f"{stem}.{n}.{ending}").exists())

    def role_logs(self) -> Path:
        """`logs/`: the output of ranks, engines and reward hosts, one file each."""
        folder = (self.path / "logs").absolute()
        with writing(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def log_files(self, *more_names: str) -> list[Path]:
        """run.log and files of these names."""
        return [self.path / name for name in ("run.log", *more_names)]

    def open_log(self, *more_names: str, modules: Iterable[str] = ()) -> None:
        """Everything logged by roll_async goes to run.log (and to files of these names), warnings also to stderr; what
        loggers of these modules, the user's own, log from INFO on goes to both.
        """
        root = log_to(self.log_files(*more_names))
        files = list(root.handlers)
        root.addHandler(_console(logging.WARNING))
        _keep_off_the_screen(files)
        for name in set(modules):
            own = logging.getLogger(name)
            if name.partition(".")[0] != root.name:  # these are in the files by their name
                own.setLevel(logging.INFO)
                own.handlers[:] = [*files, _console(logging.INFO)]
                own.propagate = False  # a handler of the script at the root would say it twice

    def close_log(self) -> None:
        """What is logged from now on is not of this run."""
        root = logging.getLogger("roll_async")
        for handler in root.handlers:
            handler.close()
        root.handlers.clear()
        root.propagate = True

    @property
    def last_step(self) -> int:
        """Last step with metrics; 0 = there is none."""
        return max((int(record["step"]) for record in self.read_metrics()), default=0)

    def leave_behind(self, step: int, into: Path) -> None:
        """Set what came after `step` aside in the folder `into`: the metrics as they were, the picture, what trackers
        wrote, and the exported model unless it is of `step` or an earlier one. The metrics until `step` stay.
        """
        into.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "config.yaml", "run.json"):
            if (self.path / name).is_file():
                shutil.copy2(self.path / name, into / name)  # a copy: the run goes on with what these say until `step`
        later = self.record is not None and not 0 < self.record.exported_step <= step
        for name in ("reward.png", "tensorboard", *(["hf", "hf_adapter"] if later else [])):
            if (self.path / name).exists():
                (self.path / name).rename(into / name)
        if later:
            self.update_record(exported_step=0)
        self.truncate_metrics(step)  # last: a start after a kill goes back again as long as they say more

    def truncate_metrics(self, last_step: int) -> None:
        """Remove the lines of later steps."""
        path = self.path / "metrics.jsonl"
        if path.is_file():
            kept = [json.dumps(record) for record in _records(path) if record["step"] <= last_step]
            partial = path.with_suffix(".partial")
            with writing(path):
                partial.write_text("".join(line + "\n" for line in kept))
                partial.replace(path)

    def has_validation(self, step: int) -> bool:
        """Whether a record holds the validation of the weights of this step."""
        return any(metrics.get("validation/version") == step for metrics in self.read_metrics())

    def append_metrics(self, metrics: Mapping[str, float]) -> None:
        """One line per step, on disk when this returns. What an earlier write left without its end is cut off first."""
        path, named = self.path / "metrics.jsonl", {} if self.record is None else {"run_id": self.record.run_id}
        line = json.dumps({**{key: _rounded(value) for key, value in metrics.items()}, **named}) + "\n"
        with writing(path), open(path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())

    def read_metrics(self) -> list[dict[str, float]]:
        """The metrics of all steps, without the id of the run. An incomplete last line, left by a killed run, is
        ignored. Raises ValueError, one line, for another one that is damaged.
        """
        path = self.path / "metrics.jsonl"
        records = _records(path) if path.is_file() else []
        for record in records:
            record.pop("run_id", None)
        return records


class _Console(logging.StreamHandler):
    """Standard error as it is when a record comes: while a line of the screen is live, another one is in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = _RED if record.levelno >= logging.ERROR else _YELLOW
        return f"{colour}{line}{_PLAIN}" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else line


def _console(level: int) -> logging.Handler:
    console = _Console()
    console.setLevel(level)
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    return console


def _keep_off_the_screen(files: Sequence[logging.Handler]) -> None:
    """Warnings of other libraries in this process go to these files. Without a handler they would go to stderr."""
    logging.captureWarnings(True)
    others = logging.getLogger()
    others.handlers[:] = [handler for handler in others.handlers if not isinstance(handler, _LogFile)] + list(files)


def _records(path: Path) -> list[dict[str, float]]:
    whole, _, _ = path.read_text(errors="replace").rpartition("\n")
    return [step_record(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), 1)]


def step_record(line: str, where: str) -> dict[str, float]:
    """What a line of metrics.jsonl says of its step. Raises ValueError, one line, for a damaged one."""
    try:
        record = json.loads(line)
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int | float) or not math.isfinite(step):
            raise ValueError("no record of a step")
        return record
    except (ValueError, OverflowError, RecursionError) as error:  # an integer beyond all floats; brackets without end
        raise ValueError(f"{where} is damaged ({error}); remove that line") from error


class _LogFile(logging.FileHandler):
    """What its disk does not take is lost, without a word: whatever else is written there ends the run with one."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to(files: Iterable[Path | str]) -> logging.Logger:
    """Everything logged by roll_async in this process is appended to these files, line by line beside others."""
    root = logging.getLogger("roll_async")
    root.setLevel(logging.INFO)
    root.handlers.clear()  # a second start in one process would log every line twice
    root.propagate = False
    for path in files:
        with writing(Path(path)):
            file = _LogFile(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(file)
    return root


def redirect_output(path: Path) -> None:
    """Standard output and standard error of this process and its children, and what roll_async logs, are appended to
    the file.
    """
    # O_APPEND: several processes write to one file, and none over the lines of another.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    log_to([path])


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Values of a nested config by their full key; a list is one value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        k: v for key, sub in tree.items() for k, v in leaves(sub, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.8g}")
