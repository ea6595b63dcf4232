"""Runs a generated program inside the confined child. Everything here happens after the rights are gone.

What the harness reports goes through a pipe of its own and carries a word that is drawn anew for each run: a program
that ends early, or writes what success looks like, has not passed. A program that searches its own interpreter for the
word can still forge the result of `assert` and `pytest`; `stdio`, `call` and `values` are compared outside, with what
the program never sees.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import traceback
import types
from pathlib import Path

from roll_async.rewards.sandbox.prelude import PRELUDE, PROGRAM_MODULE, SOLUTION_FILE, own_names, with_prelude
from roll_async.rewards.sandbox.protocol import ProgramRun
from roll_async.rewards.sandbox.values import encode

_FILE = "solution.py"
_compile, _eval, _exec, _dumps, _write = compile, eval, exec, json.dumps, os.write  # a program may replace them


def run_program(run: ProgramRun, *, result_fd: int, word: str) -> int:
    """The exit status. Output goes to the standard streams, the result as JSON to `result_fd`."""
    _clean_interpreter()
    # New ones: those of the host have buffers, and its sys.stdin may have read ahead.
    streams = [os.fdopen(0, "r", encoding="utf-8"), os.fdopen(1, "w"), os.fdopen(2, "w")]
    sys.stdin, sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    status, result = 0, None
    try:
        match run.kind:
            case "stdio":
                _execute(run, "__main__")
            case "call":
                result = {"value": _call(run)}
            case "assert":
                names = _execute(run, "solution")
                _run_code(f"{run.setup}\n{run.test}" if run.setup else run.test, "test.py", names)
                result = {"passed": 1, "total": 1}
            case "values":
                result = {"values": _values(run)}
            case "pytest":
                result = _pytest(run)
    except SystemExit as ending:
        status = _exit_status(ending)
    except BaseException:  # whatever the program raised is its own
        status = 1
        traceback.print_exc(file=sys.stderr)
    status = _finish(status)
    if result is not None:
        _write(result_fd, _dumps({**result, "word": word}, default=_plain).encode())
    return status


def _clean_interpreter() -> None:
    """As a fresh interpreter would be: no modules of the host, its folder not on the path."""
    root = str(Path(__file__).resolve().parents[3])
    sys.path[:] = ["", *(p for p in sys.path if p not in ("", root))]
    sys.argv = [_FILE]
    sys.dont_write_bytecode = True
    for name in [n for n in sys.modules if n.partition(".")[0] == "roll_async"]:
        del sys.modules[name]


def _execute(run: ProgramRun, name: str) -> dict[str, object]:
    """Run the program; the names its test may use."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=_FILE)
    # dataclasses and pickle look up there where a class comes from.
    sys.modules[name] = module
    before: dict[str, object] = {}
    if run.prelude:
        _run_code(PRELUDE, "prelude", module.__dict__)
        before = dict(module.__dict__)
    _run_code(run.code, _FILE, module.__dict__)
    return own_names(module.__dict__, before)


def _run_code(code: str, file: str, names: dict[str, object]) -> None:
    """As a file of its own: what `from __future__` says in this one is not said there."""
    _exec(_compile(code, file, "exec", dont_inherit=True), names)


def _values(run: ProgramRun) -> list[object]:
    names = _execute(run, "solution")
    if run.setup:
        _run_code(run.setup, "test.py", names)
    codes = [_compile(expression, "test.py", "eval", dont_inherit=True) for expression in run.expressions]
    return [encode(_eval(code, names)) for code in codes]


def _call(run: ProgramRun) -> object:
    names = _execute(run, "solution")
    function = names.get(run.function)
    if function is None and "Solution" in names:
        function = getattr(names["Solution"](), run.function)  # type: ignore[operator]
    if function is None:
        raise NameError(f"the program defines no {run.function!r}")
    return function(*run.arguments)  # type: ignore[operator]


def _pytest(run: ProgramRun) -> dict[str, object]:
    import pytest

    Path("pytest.ini").write_text("[pytest]\n")  # the root of the collection is here and not in a folder above
    if run.prelude:
        Path(f"{PROGRAM_MODULE}.py").write_text(with_prelude(run.code))
    Path(_FILE).write_text(SOLUTION_FILE if run.prelude else run.code)
    Path("test_solution.py").write_text(run.test)
    counts = {"passed": 0, "total": 0}

    class Counter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            # A test whose setup fails or skips has no call.
            if report.when == "call" or (report.when == "setup" and not report.passed):
                counts["total"] += 1
                counts["passed"] += report.passed

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            counts["total"] += report.failed  # a file that cannot be collected is one failed test

    options = "-q --no-header -p no:cacheprovider -p no:faulthandler -c pytest.ini --rootdir=.".split()
    pytest.main([*options, "test_solution.py"], plugins=[Counter()])
    return dict(counts)


def _finish(status: int) -> int:
    """Wait for threads the program left behind, as Python does, and flush."""
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return status or 1
    return status


def _exit_status(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return (ending.code or 0) & 0xFF  # as the system keeps it
    print(ending.code, file=sys.stderr)
    return 1


def _plain(value: object) -> object:
    """Values JSON does not know: numbers of other libraries as numbers; the rest, sets too, equals nothing expected."""
    return value.tolist() if type(value).__module__ == "numpy" else repr(value)  # type: ignore[attr-defined]
