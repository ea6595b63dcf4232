"""Python's garbage collector while a process starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_without_collections() -> Iterator[None]:
    """Imports and model loading make a million objects that live as long as the process. Looking through them again
    and again costs a role two seconds of its start; one look at the end is enough, and later ones leave them out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
