"""What a call to a replica may raise that says which side is at fault: the library, or a push.

Raised where the libraries are called (`inference/`), told apart by the scheduler (`rollout/`) and by the push.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EngineDead(ConnectionError):
    """The library of an engine answers nothing any more. Its replica is lost; what ran there goes on elsewhere."""


class UpdateFailed(RuntimeError):
    """A replica has not taken weights in, proved or swapped them. It is alive, and the push tries again."""


@contextmanager
def update_errors(what: str) -> Iterator[None]:
    """Around what loaders and transports do in one step of an update: `what` they raise becomes one type. Without it a
    broken connection to the trainer, a ConnectionError, would read as the death of a healthy engine.
    """
    try:
        yield
    except (EngineDead, UpdateFailed):  # before OSError and RuntimeError, of which they are kinds
        raise
    except (RuntimeError, OSError, ValueError, LookupError) as error:
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "  # of a RuntimeError the text says all
        raise UpdateFailed(f"{what}: {kind}{error}") from error
