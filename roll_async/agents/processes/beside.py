"""A process beside this one, for calls that would hold the interpreter: JSON of long bodies, tokens of long texts.

call(function, ...) --size, pickle--> `python -m roll_async.agents.processes.beside` --size, pickle--> its result
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_SIZE = struct.Struct(">Q")
_CLOSE_S = 2.0


class Beside:
    """One process, begun with the first call; after it was lost the next call begins another. For several threads,
    whose calls follow one another.
    """

    def __init__(self, *first: object) -> None:
        """`first`: a function and its arguments, called whenever a process begins."""
        self._first = pickle.dumps(first) if first else b""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Blocks. The function is one of a module, found there by its name. Raises ValueErrors of the function, and
        RuntimeError when the process ended.
        """
        with self._lock:
            begins = self._process is None
            if self._process is None:
                self._process = self._begun()
                # Also at exit, without `close`. `_ended` is no method: that would keep this object.
                self._end = weakref.finalize(self, _ended, self._process)
            try:
                if begins and self._first:
                    _ask(self._process, self._first)
                found = _ask(self._process, pickle.dumps((function, *args)))
            except (EOFError, OSError) as error:
                self._close()
                raise RuntimeError(f"a process beside this one ended during {function.__name__}") from error
        result = pickle.loads(found)
        if isinstance(result, ValueError):
            raise result
        return result

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()

    def _begun(self) -> subprocess.Popen[bytes]:
        # Folders added while this process ran are not in its PYTHONPATH.
        path = os.pathsep.join(p for p in sys.path if p)
        return subprocess.Popen(
            [sys.executable, "-m", "roll_async.agents.processes.beside"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # No devices: every process that sees one would hold memory there.
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C must reach only the driver, which ends its processes itself
        )


def _ended(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()  # an idle process ends with its input
    try:
        process.wait(timeout=_CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _ask(process: subprocess.Popen[bytes], call: bytes) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(_SIZE.pack(len(call)))
    process.stdin.write(call)
    process.stdin.flush()
    return _frame(process.stdout)


def _frame(stream: IO[bytes]) -> bytes:
    """Raises EOFError at the end of the stream."""
    size = stream.read(_SIZE.size)
    if len(size) < _SIZE.size:
        raise EOFError
    (wanted,) = _SIZE.unpack(size)
    data = stream.read(wanted)
    if len(data) < wanted:
        raise EOFError
    return data


def main() -> None:
    """Serve until the input ends."""
    # What a function prints must not come between the answers: it goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, *args = pickle.loads(_frame(sys.stdin.buffer))
        except EOFError:
            return
        try:
            result = function(*args)
        # Any other error ends this process, which the caller is told as a RuntimeError.
        except ValueError as error:
            result = error
        said = pickle.dumps(result)
        answers.write(_SIZE.pack(len(said)))
        answers.write(said)
        answers.flush()


if __name__ == "__main__":
    main()
