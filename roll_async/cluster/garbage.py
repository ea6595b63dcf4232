"""Python's garbage collector while a process starts, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_without_collections(*, settled: bool = False) -> Iterator[None]:
    """Imports and model loading make a million objects that live as long as the process. Repeated collections over them
    cost a role two seconds of its start; one at the end is enough.

    `settled`: objects that exist at the end live as long as the process and are left out of later collections. For
    event loops, which a full collection would block for a third of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        if settled:
            gc.freeze()
