"""How a run ends: signals and exit codes."""

import asyncio
import os
import signal

import pytest

from roll_async.buffer.errors import LedgerError, StallError
from roll_async.commands.run import exit_code
from roll_async.launch.signals import EndedAtOnce, outlive_state_requests, stop_on_signals


def test_every_error_has_its_exit_code_also_in_a_group():
    codes = {
        StallError("hangs"): 4, ConnectionError("gone"): 3, TimeoutError("late"): 3, LedgerError("full"): 3,
        ValueError("key"): 2, KeyboardInterrupt(): 130, asyncio.CancelledError(): 130, ZeroDivisionError(): None,
    }  # fmt: skip
    for error, code in codes.items():
        nested = BaseExceptionGroup("inner", [BaseExceptionGroup("outer", [error, ValueError("a later one")])])
        assert exit_code(error) == exit_code(nested) == code


class Run:
    """A run whose stop never ends, and what it was told."""

    trained_step = 7

    def states(self):
        return ["Component Statistics: Trainer waiting: step 7", "Component Statistics: Rollouter running: 3 groups"]

    def __init__(self):
        self.stops, self.closed = 0, False

    def request_stop(self):
        self.stops += 1

    async def go(self, *signals):
        with stop_on_signals(self, "folder"):
            try:
                for number in signals:
                    os.kill(os.getpid(), number)
                    await asyncio.sleep(0.05)
                await asyncio.sleep(20)
            finally:
                await asyncio.sleep(0.01)
                self.closed = True


def test_a_second_signal_ends_a_stop_that_does_not_end_and_says_what_is_lost(capsys):
    for signals in ((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)):
        run = Run()
        with pytest.raises(EndedAtOnce):
            asyncio.run(run.go(*signals))
        assert run.closed and run.stops == 1
        first, second = capsys.readouterr().err.split("\n\n")
        assert "the state will be saved" in first
        assert "steps after the newest checkpoint in folder are not saved; the last whole step was 7" in second


def test_sigusr1_prints_the_state_of_every_component_and_the_run_goes_on(capsys):
    run = Run()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run.go(signal.SIGUSR1, signal.SIGUSR1), timeout=0.3))
    assert run.stops == 0 and capsys.readouterr().err == 2 * ("\n" + "\n".join(run.states()) + "\n")


def test_sigusr1_ends_no_run_whose_roles_are_not_started_or_closed(capfd):
    outlive_state_requests()
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(Run().go(), timeout=0.1))
    signal.raise_signal(signal.SIGUSR1)
    assert capfd.readouterr().err.count("no state to print: the roles of this run are not started, or closed") == 2


def test_one_signal_leaves_the_run_to_end_by_itself():
    run = Run()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run.go(signal.SIGINT), timeout=0.3))
    assert run.stops == 1
