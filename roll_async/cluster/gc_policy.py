"""Python's garbage collector while a process starts, and in its event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_PASS_EVERY_S = 1.0
_EVERYTHING_EVERY_S = 1800.0


@contextmanager
def defer_gc_during_startup(*, settled: bool = False) -> Iterator[None]:
    """Imports and model loading make a million objects that live as long as the process. Repeated collections over them
    cost a role two seconds of its start; one at the end is enough.

    `settled`: for processes with an event loop, which must be running: from then on it is never blocked for the third
    of a second that a collection of everything takes, see `PeriodicGc`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        if settled:
            PeriodicGc.start(asyncio.get_running_loop())


class PeriodicGc:
    """Each second `gc.collect(1)`, then the survivors are frozen: later passes leave them out. A cycle that becomes
    garbage after that is found when, rarely, everything is collected. Python itself would look at
    everything whenever that has grown by a quarter: 0.1 to 0.4 s in a gateway of 1,000 trajectories.
    """

    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def start(cls, loop: asyncio.AbstractEventLoop) -> None:
        """On this loop from now on, and on no other one."""
        if cls._timer is not None:
            cls._timer.cancel()  # two timers would do the work twice
        gc.freeze()
        cls._next(loop, loop.time() + _EVERYTHING_EVERY_S)

    @classmethod
    def _next(cls, loop: asyncio.AbstractEventLoop, everything_at_s: float) -> None:
        cls._timer = loop.call_later(_PASS_EVERY_S, cls._collect, loop, everything_at_s)

    @classmethod
    def _collect(cls, loop: asyncio.AbstractEventLoop, everything_at_s: float) -> None:
        if (now := loop.time()) < everything_at_s:
            gc.collect(1)
        else:
            everything_at_s = now + _EVERYTHING_EVERY_S
            gc.unfreeze()  # a frozen cycle is not looked at otherwise, and would stay for ever
            gc.collect()
        gc.freeze()
        cls._next(loop, everything_at_s)
