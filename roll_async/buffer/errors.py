"""Errors that end a wait on the buffer, and what is told of any error: its first cause, and where it arose."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_paths

_PACKAGE = Path(__file__).resolve().parents[1]
_HELPERS = (
    "buffer/deadline.py",
    "cluster/remote.py",
    "cluster/ray_channel.py",
    "weight_sync/errors.py",
)
"""They raise what happened elsewhere."""
_LIBRARIES = tuple(Path(folder).resolve() for name, folder in get_paths().items() if name.endswith("lib"))


class EndOfData(Exception):
    """No full batch can be completed any more. `leftovers` finished groups stay in the ledger untrained."""

    def __init__(self, message: str, *, leftovers: int = 0) -> None:  # the default is for unpickling
        super().__init__(message)
        self.leftovers = leftovers


class QueueClosed(EndOfData):
    """The queue was closed by a stop; finished groups stay in the ledger."""


class StallError(RuntimeError):
    """A deadline passed without any progress. The message says who waits for what, and since when."""


class RoleFailed(RuntimeError):
    """A role process raised or died; the run ends with exit code 3."""


class RoleGone(ConnectionError):
    """A role process died."""


class Defect(Exception):
    """An error that nobody raises on purpose is its `__cause__`: a fault of this package, or of a user's own code. It
    ends the run, and nothing handles it; so it is no RuntimeError, which callers of a role expect.
    """

    @classmethod
    def of(cls, error: BaseException) -> Defect:
        """With the error as its cause, unless it is one already."""
        if isinstance(error, cls):
            return error
        cause = first_cause(error)
        defect = cls(f"{type(cause).__name__}: {cause}")
        defect.__cause__ = error
        return defect


class TooManyFailures(RuntimeError):
    """More groups were quarantined than `fault.max_failed_groups` allows; the message carries the last reasons."""


class RaisesAlways(TooManyFailures):
    """The code of a reward raised for the whole first batch."""


class LedgerError(RuntimeError):
    """The ledger cannot be used or written. The message names the file, what was being written, and the remedy."""


class DamagedLedger(LedgerError):
    """The ledger is damaged or contradicts its checkpoint: only what the checkpoint says is known."""


class OtherPrompts(LedgerError, ValueError):
    """A resumed run would read other data than before, which the user can put back."""


@contextmanager
def after_start(*passing: type[Exception]) -> Iterator[None]:
    """Around the work of a command whose start has read all that the user wrote: from here on an error that nobody
    raises on purpose is a Defect, a ValueError too. `passing`: further errors that are raised for the user.
    """
    try:
        yield
    except Exception as error:  # of any class: it is raised again, as it is or as the cause of another
        if isinstance(first_cause(error), (RuntimeError, OSError, Defect, *passing)):
            raise
        raise Defect.of(error) from error


def first_cause(error: BaseException) -> BaseException:
    """The first error of an ExceptionGroup, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Place(str):
    """A note of an exception that crossed from another process: where it arose there, as `place_of` says it."""


def place_of(error: BaseException, *, theirs: bool = False) -> str:
    """Where an error arose, as `FILE:LINE, in FUNCTION`: the last frame of this package, with `theirs` also of a user's
    code. Empty for an error that arose elsewhere.
    """
    for note in getattr(error, "__notes__", ()):  # PEP 678: an exception without notes has no such attribute
        if isinstance(note, Place):
            return note
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if _PACKAGE in file.parents:
            if file.relative_to(_PACKAGE).as_posix() not in _HELPERS:
                return f"{file.relative_to(_PACKAGE.parent)}:{frame.lineno}, in {frame.name}"
        elif theirs and file.is_file() and not any(folder in file.resolve().parents for folder in _LIBRARIES):
            return f"{file}:{frame.lineno}, in {frame.name}"
    return ""
