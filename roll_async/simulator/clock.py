"""An asyncio event loop whose clock jumps to the next timer: sleeps cost nothing, order is repeatable, and a deadlock
is an error that says who waits.

    run_virtual(main())        # a coroutine that sleeps an hour returns in microseconds

Only for code that takes time from the running loop and uses no thread, process or socket (design.md section 8).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")

_NAMED_TASKS = 12
_ROUNDS_OF_THE_END = 100_000
"""A clean-up of the largest world takes some thousands."""


class Deadlock(RuntimeError):
    """Every coroutine waits and no timer is set: nothing would ever happen again. The message names the waiters."""


class OutOfEvents(RuntimeError):
    """The run, or the clean-up behind it, did not end within its rounds: a task polls, or ignores its cancellation."""


class Killed(BaseException):  # no Exception, which the killed code could catch
    """The simulated process was killed: no cleanup of it may matter."""


class _Jump:
    """Takes the place of a selector: instead of sleeping it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        """Called once per round of the loop, with the seconds until the next timer, 0 when callbacks are ready."""
        self._loop.next_round(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0 and is moved by the loop alone."""

    def __init__(
        self,
        *,
        max_rounds: int | None = None,
        kill_in_round: int | None = None,
        on_kill: Callable[[], None] | None = None,
        on_advance: Callable[[], None] | None = None,
        threads_inline: bool = False,
    ) -> None:
        """A round runs every callback that is ready. `max_rounds`: OutOfEvents beyond them. `kill_in_round`: raise
        Killed there, after `on_kill` has put aside what a kill would leave on the disk. `on_advance`: called before the
        clock moves, when all work of an instant is done. `threads_inline`: what is given to a thread is done at once,
        in no time, instead of being refused; for code that only computes there.
        """
        super().__init__()
        self._now_s = 0.0
        self.rounds = 0
        self._max_rounds, self._kill_in_round = max_rounds, kill_in_round
        self._on_kill, self._on_advance = on_kill, on_advance
        self._threads_inline = threads_inline
        self._closing = False
        self._rounds_of_the_end = 0
        self._selector = _Jump(self)  # BaseEventLoop asks it once per round

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def spend(self, seconds: float) -> None:
        """What runs now takes so long."""
        self._now_s += seconds

    def next_round(self, timeout: float | None) -> None:
        """Move the clock, or say why it cannot move."""
        self.rounds += 1
        if self._closing:
            self._rounds_of_the_end += 1
            if self._rounds_of_the_end > _ROUNDS_OF_THE_END:
                raise OutOfEvents(f"the run is over, and these do not end when they are cancelled: {self._waiters()}")
        else:
            if self._kill_in_round is not None and self.rounds >= self._kill_in_round:
                self._closing = True  # what cleans up after the kill is not killed again
                if self._on_kill is not None:
                    self._on_kill()
                raise Killed(f"round {self.rounds}")
            if self._max_rounds is not None and self.rounds > self._max_rounds:
                self._closing = True
                raise OutOfEvents(f"not ended after {self._max_rounds} rounds, at {self._now_s:g} s: {self._waiters()}")
        if timeout is None:
            raise Deadlock(f"at {self._now_s:g} s every coroutine waits and no timer is set: {self._waiters()}")
        if timeout > 0:
            if self._on_advance is not None and not self._closing:
                self._on_advance()
            self.spend(timeout)

    def _waiters(self) -> str:
        # Sorted: `all_tasks` is a set, and the message must not differ from run to run.
        names = sorted(task.get_name() for task in asyncio.all_tasks(self) if not task.done())
        more = f" and {len(names) - _NAMED_TASKS} more" if len(names) > _NAMED_TASKS else ""
        return ", ".join(names[:_NAMED_TASKS]) + more

    def disarm(self) -> None:
        """The run is over: what cleans up behind it is not killed, and bounded by rounds of its own."""
        self._closing = True

    def _process_events(self, event_list: list[object]) -> None:  # `select` returns none
        pass

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> asyncio.Future[object]:
        """Refused: a thread would run on another clock, and the order of things would depend on the machine."""
        if not self._threads_inline:
            raise RuntimeError("code on the virtual clock must not use threads")
        done: asyncio.Future[object] = self.create_future()
        done.set_result(func(*args))
        return done

    def _write_to_self(self) -> None:
        """Wakes a selector that sleeps; this one never does."""


def run_virtual(main: Coroutine[object, object, T], loop: VirtualLoop | None = None) -> T:
    """Run `main` to its end on a virtual clock. Raises what it raises, Deadlock when nothing can happen, and
    OutOfEvents when a task that it leaves behind does not end.
    """
    clock = loop or VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        try:
            return runner.run(main)
        finally:
            clock.disarm()  # the Runner cancels what is left next, which must not be killed
