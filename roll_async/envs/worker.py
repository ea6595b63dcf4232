"""A worker process: several worlds, each step in a thread of its own, so that one that sleeps holds no other up.

    parent --{"id", "world", "op", ...}--> socket --{"id", "text", ...} or {"id", "error", "kind"}--> parent

Run as `python -m roll_async.envs.worker '{"fd": 3, ...}'`; it ends with its input. What worlds print goes nowhere.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from roll_async.envs.protocol import GraderFailed, World, answer_of
from roll_async.envs.registry import WorldSpec, build
from roll_async.observe.outside import OutsideError, border, message_of, place_of
from roll_async.processes.child import connect, say

_MAX_THREADS = 256
_STEP_ENDS_S = 2.0
LINE_BYTES = 64 << 20
"""Of an answer, which is one line."""


class Worlds:
    """The worlds of this process, by number."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self._worlds: dict[int, World] = {}
        self._closed: set[int] = set()
        self._busy: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """By world, which does one thing at a time: a close waits for the step of a cancelled trajectory."""

    def handle(self, line: bytes) -> None:
        """Execute one request and return its answer."""
        request = json.loads(line)
        busy = self._busy[request["world"]]
        # A step may itself wait for the close: without a limit only a reset is waited for.
        made = request["op"] == "close" and request["world"] in self._worlds
        held = busy.acquire(timeout=_STEP_ENDS_S if made else -1)
        try:
            with border(GraderFailed):
                text = json.dumps({"id": request["id"], **self._do(request)})
                if len(text) >= LINE_BYTES:
                    raise ValueError(f"text and info are {len(text)} bytes as JSON, {LINE_BYTES} are allowed")
        except GraderFailed as error:
            reason = f"{message_of(error)} [{place_of(error)}]"
            text = json.dumps({"id": request["id"], "error": reason, "kind": "grader"})
        except OutsideError as error:
            text = json.dumps({"id": request["id"], "error": str(error), "kind": "world"})
        finally:
            if held:
                busy.release()
        # Threads answer beside each other, and a long line takes several writes.
        with self._lock:
            self._channel.sendall(text.encode() + b"\n")

    def _do(self, request: dict) -> dict:
        number, op = request["world"], request["op"]
        match op:
            case "reset" if number in self._closed:
                raise ValueError("the world is closed")  # a thread may have overtaken its own
            case "reset":
                # None of the worlds meanwhile: a close waits for all that this starts.
                if (world := self._worlds.pop(number, None)) is None:
                    world = build(WorldSpec(env_type=request["env_type"], values=request["values"]))
                try:
                    return answer_of(op, world.reset(seed=request["seed"]))  # type: ignore[attr-defined]
                finally:
                    self._worlds[number] = world  # type: ignore[assignment]
            case "step":
                return answer_of(op, self._worlds[number].step(request["action"]))
            case "close":
                self._closed.add(number)
                self._busy.pop(number, None)
                if (world := self._worlds.pop(number, None)) is not None:
                    world.close()
                return {}
            case other:
                raise ValueError(f"unknown op {other!r}")


def main() -> None:
    """Serve until the input ends."""
    _, channel = connect()
    worlds = Worlds(channel)
    threads = ThreadPoolExecutor(max_workers=_MAX_THREADS)
    say(channel, {"ready": True})
    for line in channel.makefile("rb"):
        threads.submit(worlds.handle, line)
    os._exit(0)  # a world that hangs must not keep the process alive


if __name__ == "__main__":
    main()
