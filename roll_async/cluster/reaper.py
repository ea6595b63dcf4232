"""Ends every process of a run when its driver has ended, in whatever way.

Ray's agents outlive a killed driver by a minute or more, engines start children of their own. They are recognized by
two marks: an environment variable inherited from the driver (Ray overwrites it in processes that it renames), and open
files in the folder of the embedded Ray session. This process waits for the end of its standard input, which the kernel
closes when the driver dies, also by SIGKILL, then ends all processes with a mark and removes their shared memory files.
Run as `python -m roll_async.cluster.reaper MARKER`; each input line is a folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

MARKER_VARIABLE = "ROLL_ASYNC_RUN"
_GRACE_S = 2.0
_SPARED = (os.getpid(), os.getppid())
"""This process and the driver, which is still alive when a run ends regularly."""


@contextmanager
def reaper() -> Iterator[Callable[[str], None]]:
    """Mark this process's future children, and end those that are left after the block.

    Yields a function that adds a folder: processes that hold files open in it belong to the run, too.
    """
    marker = uuid.uuid4().hex
    command = [sys.executable, "-m", "roll_async.cluster.reaper", marker]
    # In a session of its own: Ctrl-C on the terminal ends the driver's group, and this one cleans up after it.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
    assert guard.stdin is not None
    pipe = guard.stdin
    os.environ[MARKER_VARIABLE] = marker

    def add_folder(folder: str) -> None:
        pipe.write(folder + "\n")
        pipe.flush()  # the driver may be killed at any time, with what it has buffered

    try:
        yield add_folder
    finally:
        os.environ.pop(MARKER_VARIABLE, None)
        pipe.close()
        guard.wait(timeout=10 * _GRACE_S)


def marked_processes(marker: str, folders: Sequence[str]) -> list[psutil.Process]:
    """Processes of the run besides its driver; a process that may not be inspected belongs to another user."""
    return [p for p in psutil.process_iter() if p.pid not in _SPARED and _is_marked(p, marker, folders)]


def _is_marked(process: psutil.Process, marker: str, folders: Sequence[str]) -> bool:
    try:
        if process.environ().get(MARKER_VARIABLE) == marker:  # Ray's renamed processes lack it, hence the files
            return True
        return any(f.path.startswith(folder) for f in process.open_files() for folder in folders)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def main() -> None:
    """Wait for the driver's end, then sweep until nothing marked is left."""
    marker = sys.argv[1]
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    folders = [line.strip() for line in sys.stdin if line.strip()]  # blocks until the driver's end
    psutil.wait_procs(marked_processes(marker, folders), timeout=_GRACE_S)  # most end by themselves
    # In a loop: one of them may start another while the rest are ended.
    while left := marked_processes(marker, folders):
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=_GRACE_S)
    for folder in ("/dev/shm", tempfile.gettempdir()):  # shared memory stays allocated until the next boot otherwise
        for file in Path(folder).glob(f"roll_async-{marker}-*"):  # see transport/shm.py, too large to import
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
