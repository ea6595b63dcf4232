"""Runs programs in a sandbox host of this machine, started once and replaced when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path

from roll_async.rewards.sandbox.protocol import ProgramResult, ProgramRun

_ROOT = str(Path(__file__).resolve().parents[3])
_GRACE_S = 10.0
"""Beyond the program's own time limit; the host needs a moment to kill and clean up."""
_START_S = 60.0
# The last one is the mark by which the processes of a run are found when its driver was killed.
_KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "ROLL_ASYNC_RUN")
_CLOSE_S = 2.0


class LocalSandbox:
    """`Runner` with one host. Not for several threads."""

    def __init__(self) -> None:
        self._host: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def run(self, run: ProgramRun) -> ProgramResult:
        """Raises RuntimeError when the host ends or is silent, twice in a row."""
        problem = ""
        for _ in range(2):
            try:
                answer = self._ask(json.dumps(asdict(run)).encode() + b"\n", run.timeout_s + _GRACE_S)
            except OSError as error:
                problem = str(error)
                self.close()
                continue
            return ProgramResult(**json.loads(answer))
        raise RuntimeError(f"the sandbox host does not work: {problem}")

    def close(self) -> None:
        """End the host; what it runs ends with it."""
        if self._host is None:
            return
        host, self._host = self._host, None
        assert host.stdin is not None and host.stdout is not None
        with suppress(BrokenPipeError):
            host.stdin.close()  # an idle host cleans up and ends
        try:
            host.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()
        host.stdout.close()

    def _ask(self, line: bytes, timeout_s: float) -> bytes:
        if self._host is None:
            self._start()
        assert self._host is not None and self._host.stdin is not None
        self._host.stdin.write(line)
        self._host.stdin.flush()
        return self._line(timeout_s)

    def _start(self) -> None:
        """With an environment that says nothing about the run."""
        kept = {k: v for k, v in os.environ.items() if k in _KEPT_ENVIRONMENT}
        self._host = subprocess.Popen(
            [sys.executable, "-B", "-m", "roll_async.rewards.sandbox.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": _ROOT, "LANG": "C.UTF-8", **kept},
        )
        self._buffer = b""
        self._line(_START_S)  # it says a first line when it is ready

    def _line(self, timeout_s: float) -> bytes:
        """Raises OSError at the end of the output and after the time-out."""
        assert self._host is not None and self._host.stdout is not None
        fd, ends_s = self._host.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            # Not `select`: it knows the first 1,024 descriptors only, and a rollout process may hold thousands.
            if not wait([fd], max(0.0, ends_s - time.monotonic())):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            data = os.read(fd, 1 << 20)
            if not data:
                raise ConnectionResetError(f"it ended with status {self._host.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
