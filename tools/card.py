"""What a run takes of GPU 0 and when it took its first step, seen from outside, for runs of any program alike."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which

SETTLES_S = 30.0
LEFT_MB = 1024
"""More than before a run, and another run is still giving its memory back."""


def ask(what: str) -> str:
    """What nvidia-smi says of GPU 0; nothing where it is not there."""
    if which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--id=0", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip()


def card_name() -> str:
    return ask("name") or "unknown"


def used_mb() -> int | None:
    """MiB in use on GPU 0, by whomever."""
    found = ask("memory.used")
    return int(found) if found.isdigit() else None


class Watch:
    """Looks at a run that writes a line a step into a file: `watch()` is true once there are enough."""

    def __init__(self, steps_file: Path, steps: int, used: Callable[[], int | None] = used_mb) -> None:
        self._file, self._steps, self._used = steps_file, steps, used
        self._began_s, self._before_mb = time.monotonic(), used()
        self.first_step_s: float | None = None
        """From here to the end of the first step, as late as the look that saw it."""
        self.peak_mb: int | None = None

    def __call__(self) -> bool:
        lines = self._file.read_bytes().count(b"\n") if self._file.exists() else 0
        if lines and self.first_step_s is None:
            self.first_step_s = time.monotonic() - self._began_s
        used = self._used()
        if used is not None:
            self.peak_mb = max(used, self.peak_mb or 0)
        return lines >= self._steps

    def settle(self) -> None:
        """Wait until the card has back what the run had, SETTLES_S at most: what a killed driver has left ends soon."""
        until_s = time.monotonic() + SETTLES_S
        while self._before_mb is not None and time.monotonic() < until_s:
            used = self._used()
            if used is None or used <= self._before_mb + LEFT_MB:
                return
            time.sleep(1.0)
