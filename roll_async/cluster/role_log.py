"""Output of role processes: a file per role in the run folder; log lines of the start are also in run.log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from roll_async.observe.run_folder import redirect_output

FOLDER_VARIABLE = "ROLL_ASYNC_LOG_FOLDER"
"""Environment of every role: `logs/` of the run folder."""


def role_environment(logs: Path) -> dict[str, str]:
    """Variables of every role of a run, whose logs are in this folder."""
    return {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        FOLDER_VARIABLE: str(logs),
    }


def open_role_log() -> None:
    """Redirect all that this process and its children write to standard output and error, libraries in C included, to
    `logs/NAME.log` of the run folder, where NAME is the role's name in errors. Without that folder, or where it is not
    on this host, the output goes to Ray's own files.
    """
    folder, name = os.environ.get(FOLDER_VARIABLE), ray.get_runtime_context().get_actor_name()
    if not folder or not name or not Path(folder).is_dir():
        return
    redirect_output(Path(folder) / f"{name}.log")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """All lines that roll_async logs inside the block. A role may be on another machine, so it returns them with its
    answer.
    """
    root, handler = logging.getLogger("roll_async"), _Lines()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)  # a process that set nothing up logs from WARNING on
    try:
        yield handler.lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
