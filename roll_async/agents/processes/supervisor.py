"""Runs one command, and ends with everything that the command has started, daemons included.

    parent --the end of stdin is an order--> supervisor --starts--> the command --starts--> ...
           <--stdout: code, last lines--         <--what it prints, and orphans of all depths (PR_SET_CHILD_SUBREAPER)

When the command has ended, or the input has, which the kernel ends with the parent, every process below is killed, and
those that lose their parent so, until none is left. A process that is not started below (by a service, in a container)
is out of reach. Elsewhere than on Linux only the command's process group is ended. Run by its path with `-I -S`: it
imports nothing of the package, so that it is up in some milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0
_KEPT_BYTES = 256 << 10
_NOT_STARTED = 127


class Output:
    """One output of the command; its last bytes."""

    def __init__(self) -> None:
        self.end, self.theirs = os.pipe()
        self._kept, self._cut = b"", False
        # A process out of reach may keep the other end open: nothing here may wait for it.
        os.set_blocking(self.end, False)

    def read(self) -> bool:
        """Take what is there. False when there is nothing more, for now or at all."""
        try:
            piece = os.read(self.end, _KEPT_BYTES)
        except BlockingIOError:
            return False
        self._cut |= len(self._kept) + len(piece) > _KEPT_BYTES
        self._kept = (self._kept + piece)[-_KEPT_BYTES:]
        return bool(piece)

    def last_line(self) -> str:
        """Its last line that is not blank; a longer one than what is kept is said to be so."""
        kept = self._kept.rstrip()
        begin = max(kept.rfind(b"\n"), kept.rfind(b"\r"))
        if begin < 0 and self._cut:
            return f"a line of more than {_KEPT_BYTES} bytes"
        return kept[begin + 1 :].decode(errors="replace").strip()


def main() -> None:
    """`supervisor.py PROGRAM ARGUMENT...`. Prints {"code", "said", "errors"}: 128 + N where signal N ended the program,
    and the last lines that it printed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    # After a signal Python goes on with select (PEP 475): a byte in this pipe wakes it.
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for name in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP"):  # handled, not ignored: the command would inherit that
        signal.signal(getattr(signal, name), lambda *_: None)
    out, err = Output(), Output()
    try:
        command = subprocess.Popen(
            sys.argv[1:], stdin=subprocess.DEVNULL, stdout=out.theirs, stderr=err.theirs, start_new_session=True
        )
    except (OSError, ValueError) as error:
        _answer(_NOT_STARTED, "", f"it does not start: {error}")
    # Held open here, the outputs would never end.
    os.close(out.theirs)
    os.close(err.theirs)
    ended = _watch(command.pid, wake, {out.end: out, err.end: err})
    _end_all(command.pid, ended)
    # Nobody writes any more: what is left in the pipes.
    for output in (out, err):
        while output.read():
            pass
    code = os.waitstatus_to_exitcode(ended.get(command.pid, 0))
    _answer(code if code >= 0 else 128 - code, out.last_line(), err.last_line())


def _answer(code: int, said: str, errors: str) -> None:
    with suppress(BrokenPipeError):  # nobody wants it any more
        print(json.dumps({"code": code, "said": said, "errors": errors[:2000]}), flush=True)
    os._exit(0)


def _watch(command: int, wake: int, outputs: dict[int, Output]) -> dict[int, int]:
    """Until the command or the input has ended. Returns the status of every child that has."""
    ended: dict[int, int] = {}
    while command not in ended:
        ready = select.select([0, wake, *outputs], [], [])[0]
        # Nothing is written to the input: it can be read when it has ended.
        if 0 in ready:
            break
        for end in ready:
            if end == wake:
                os.read(wake, 4096)
                _reap(ended)
            elif not outputs[end].read():
                del outputs[end]
    return ended


def _reap(ended: dict[int, int]) -> bool:
    """Note the status of every child that has ended. False when there is no child any more."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            # A process id can be given out again; the first status is the command's.
            ended.setdefault(*found)
    except ChildProcessError:
        return False
    return True


def _end_all(group: int, ended: dict[int, int]) -> None:
    """Kill what is below this process until nothing is; whoever loses its parent so becomes a child of this process."""
    deadline = time.monotonic() + _PATIENCE_S
    while _reap(ended) and time.monotonic() < deadline:
        if sys.platform != "linux":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        stopped: set[int] = set()
        while new := _below(os.getpid()) - stopped:  # what forks all the time is stopped before it is killed
            stopped |= new
            _signal(new, signal.SIGSTOP)
        _signal(stopped, signal.SIGKILL)
        time.sleep(0.002)


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
            os.kill(process, number)


def _below(top: int) -> set[int]:
    """All processes below one; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # it may have ended meanwhile
            parent = int(stat.read().rpartition(b")")[2].split()[1])  # its name, in brackets, may hold anything
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    open_ends = [top]
    while open_ends:
        fresh = set(children.get(open_ends.pop(), ())) - found
        found |= fresh
        open_ends += fresh
    return found


if __name__ == "__main__":
    main()
