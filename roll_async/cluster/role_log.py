"""What a role process logs while it starts, brought to the log of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
