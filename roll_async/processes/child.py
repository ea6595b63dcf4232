"""A worker process's own side of `pool.py`: its settings and socket, one line of JSON an answer, the fork template."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable


def connect() -> tuple[dict, socket.socket]:
    """(settings of the program with `parent`, `fd` and `fork`; the socket). The end of its input is the end of the
    parent. The first answer must be `{"ready": true}`, or `{"error": why}`.
    """
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["fd"], False)  # what user code starts must not keep it open
    return settings, socket.socket(fileno=settings["fd"])


def say(channel: socket.socket, answer: dict) -> None:
    """Send one answer."""
    channel.sendall(json.dumps(answer).encode() + b"\n")


def serve_forks(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Be a template until the input ends. The message `fork` comes with a socket: `work` runs in a fork with it, and
    the answer is the number of that process. A number is a question for the exit status of that fork, once it ended.
    """
    say(control, {"ready": True})
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages it shares with all others
    while True:
        message, ends, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        if message != b"fork":
            control.sendall(b"%d" % _exit_status(int(message)))
            continue
        try:
            pid = os.fork()
        except OSError as error:
            control.sendall(f"!fork: {error}".encode())
            pid = -1
        if pid == 0:
            control.close()  # only the template answers here
            _become_worker(socket.socket(fileno=ends[0]), work)
        # The template's copy: left open, it would hide the end of the worker from the parent.
        os.close(ends[0])
        if pid > 0:
            control.sendall(b"%d" % pid)


def _exit_status(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # of a template that ended
        return -signal.SIGKILL


def _become_worker(channel: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """In the fork; never returns."""
    status = 1
    try:
        work(channel)
        status = 0
    finally:
        os._exit(status)  # what the template would do at its end is not a fork's to do
