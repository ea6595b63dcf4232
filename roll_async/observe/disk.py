"""Faults of the disk that a run writes to: one line with the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FAULTS = (*_FULL, errno.EROFS, errno.EIO)


class Unwritable(OSError):
    """A file of a run cannot be written: its disk is full, read-only, or broken. The message has the remedy."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises Unwritable when the file at this path cannot be written."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"cannot write {path}: {remedied(error)}") from error


def cannot(what: str, error: OSError, key: str = "output_dir") -> OSError | ValueError:
    """The error for a place that cannot be used: of the disk, or of whoever chose the place."""
    kind = Unwritable if error.errno in _DISK_FAULTS else ValueError
    return kind(f"{what}: {remedied(error, key)}")


def remedied(error: OSError, key: str = "output_dir") -> str:
    """What the operating system says, and what to do."""
    room = "make room there, or " if error.errno in _FULL else ""
    return f"{error.strerror}; {room}choose another {key}"
