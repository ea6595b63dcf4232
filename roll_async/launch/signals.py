"""Ctrl-C and SIGTERM: the first ends a run after the step under way, the second at once. SIGUSR1 prints its state."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

EXIT_INTERRUPTED = 130
T = TypeVar("T")
_CLOSE_WITHIN_S = 10.0
"""Limit after a second signal; then the reaper (`cluster/reaper.py`) ends the processes that are left."""


class EndedAtOnce(KeyboardInterrupt):
    """A second Ctrl-C or SIGTERM."""


class Stoppable(Protocol):
    """A run that a signal stops; see `pipelines/rlvr.py`."""

    @property
    def trained_step(self) -> int: ...

    @property
    def states(self) -> Callable[[], list[str]]: ...

    def request_stop(self) -> None: ...


def run_to_end(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run`, also in a notebook, where a loop runs already: then in a thread, which is told of a Ctrl-C."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(copy_context().run, lambda: asyncio.run(main()))  # what the caller's context holds is read
        while True:
            try:
                return done.result()
            except KeyboardInterrupt:
                if done.done():  # the run raised it
                    raise
                for tell in _told_in_thread:
                    tell()


_told_in_thread: list[Callable[[], object]] = []
"""What a Ctrl-C calls where the loop of the run is in a thread, which gets no signals."""


def on_stop_signals(told: Callable[[], object]) -> None:
    """Call it in the running loop at Ctrl-C and SIGTERM from now on, instead of what was called before."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        _told_in_thread[:] = [partial(loop.call_soon_threadsafe, told)]
        return
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, told)


def outlive_state_requests() -> None:
    """SIGUSR1 would end a process that has no handler for it: a run whose roles are not started yet, or are closed."""
    if threading.current_thread() is not threading.main_thread():
        return  # only that one may have handlers
    line = b"\nno state to print: the roles of this run are not started, or closed\n"
    signal.signal(signal.SIGUSR1, lambda *_: os.write(2, line))  # print is not reentrant


@contextmanager
def stop_on_signals(pipeline: Stoppable, checkpoints: str) -> Iterator[None]:
    """The first signal ends the run after the step under way, its state saved. The second ends the block of this task
    at once with EndedAtOnce; if closing the roles takes longer than _CLOSE_WITHIN_S, the process exits and the reaper
    ends the roles. SIGUSR1 prints a line for each component and changes nothing.
    """
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    signals = 0

    def tell() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print_line(
                "stopping after the step under way; the state will be saved (once more: end at once, save nothing)"
            )
            pipeline.request_stop()
            return
        if signals == 2:
            trained = f"the last whole step was {pipeline.trained_step}"
            print_line(f"ending at once: steps after the newest checkpoint in {checkpoints} are not saved; {trained}")
            # Not sys.exit, which would wait for the roles that do not close.
            loop.call_later(_CLOSE_WITHIN_S, os._exit, EXIT_INTERRUPTED)
        running.cancel()

    on_stop_signals(tell)
    if is_main := threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGUSR1, lambda: print_line("\n".join(pipeline.states())))
    try:
        yield
    except asyncio.CancelledError:
        if signals < 2:
            raise
        raise EndedAtOnce from None
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGUSR1)
        outlive_state_requests()


def print_line(line: str) -> None:
    """Print a line on the console, below the progress line of the run."""
    print(f"\n{line}", file=sys.stderr, flush=True)
