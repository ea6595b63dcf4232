"""What role processes say: a file per role in the run folder, and what is logged at the start also in run.log."""

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


def open_role_log() -> None:
    """Everything this process and its children write to standard output and error, libraries in C included, goes to
    `logs/NAME.log` of the run folder, NAME as the role is called in errors. Where nobody named a folder, or it is not
    on this host, Ray's own files keep it.
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
    """Everything roll_async logs inside the block, line by line. A role may be on another machine: it hands the lines
    over with its answer.
    """
    root, handler = logging.getLogger("roll_async"), _Lines()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
