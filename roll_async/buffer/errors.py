"""Errors that end a wait on the buffer, and the first cause of an ExceptionGroup."""

from __future__ import annotations


class EndOfData(Exception):
    """No full batch can be completed any more. `leftovers` finished groups stay in the ledger untrained."""

    def __init__(self, message: str, *, leftovers: int = 0) -> None:  # the default is for unpickling
        super().__init__(message)
        self.leftovers = leftovers


class QueueClosed(EndOfData):
    """The queue was closed by a stop; finished groups stay in the ledger."""


class StallError(RuntimeError):
    """A deadline passed without any progress. The message says who waits for what, and since when."""


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


def first_cause(error: BaseException) -> BaseException:
    """The first error of an ExceptionGroup, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
