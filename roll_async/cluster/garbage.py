"""Python's garbage collector while a process starts, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_without_collections(*, settled: bool = False) -> Iterator[None]:
    """Imports and model loading make a million objects that live as long as the process. Looking through them again
    and again costs a role two seconds of its start; one look at the end is enough.

    `settled`: what is there at the end stays to the end, and is never looked at again. For event loops: a full
    collection would hold up everything they do for a third of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        if settled:
            gc.freeze()
