"""How a run ends: signals and exit codes."""

import asyncio
import os
import re
import signal
import traceback

import pytest

from roll_async.buffer.errors import Defect, LedgerError, RoleFailed, StallError, after_start
from roll_async.commands.run import ended, exit_code, origin, shown_cause
from roll_async.launch.signals import EndedAtOnce, outlive_state_requests, stop_on_signals


def test_every_error_has_its_exit_code_also_in_a_group():
    codes = {
        StallError("hangs"): 4, ConnectionError("gone"): 3, TimeoutError("late"): 3, LedgerError("full"): 3,
        ValueError("key"): 2, KeyboardInterrupt(): 130, asyncio.CancelledError(): 130, ZeroDivisionError(): None,
    }  # fmt: skip
    for error, code in codes.items():
        nested = BaseExceptionGroup("inner", [BaseExceptionGroup("outer", [error, ValueError("a later one")])])
        assert exit_code(error) == exit_code(nested) == code


class OfUser(ValueError):
    """Of what the user can fix although the run has begun."""


def test_after_the_start_an_error_that_nobody_raises_on_purpose_is_no_bad_usage_and_shows_its_line():
    def broken():
        with after_start(OfUser):
            try:
                int("x")
            except ValueError as error:
                raise ExceptionGroup("loops", [error, ConnectionError("a later one")]) from None

    with pytest.raises(Defect) as raised:
        broken()
    error = raised.value
    assert exit_code(error) is None and str(shown_cause(error)) == "invalid literal for int() with base 10: 'x'"
    assert re.fullmatch(r" \[.*/test_launch\.py:\d+, in broken; the whole way is in run\.log\]", origin(error))
    whole = "".join(traceback.format_exception(error))
    assert 'int("x")' in whole and "a later one" in whole


@pytest.mark.parametrize("error", [StallError("late"), RoleFailed("rank 0: KeyError"), OSError(), OfUser("too many")])
def test_after_the_start_an_error_that_says_what_happened_stays_what_it_is(error):
    with pytest.raises(type(error)) as raised, after_start(OfUser):
        raise error
    assert raised.value is error


def test_a_command_without_a_log_shows_the_whole_way_to_a_defect(capsys):
    def work():
        with after_start():
            return int("x")

    assert ended("eval", work) == 3
    assert "ValueError: invalid literal" in (shown := capsys.readouterr().err) and "in work" in shown


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
