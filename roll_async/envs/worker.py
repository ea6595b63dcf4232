"""A worker process: several worlds, each step in a thread of its own, so that one that sleeps holds no other up.

    parent --{"id", "world", "op", ...}--> stdin      stdout --{"id", "text", ...} or {"id", "error", "kind"}--> parent

Run as `python -m roll_async.envs.worker`; it ends with its input. What worlds print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from roll_async.envs.protocol import GraderFailed, World, answer_of
from roll_async.envs.registry import WorldSpec, build
from roll_async.observe.outside import OutsideError, border, message_of, place_of

_MAX_THREADS = 256
LINE_BYTES = 64 << 20
"""Of an answer, which is one line."""


class Worlds:
    """The worlds of this process, by number."""

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._lock = answers, threading.Lock()
        self._worlds: dict[int, World] = {}

    def handle(self, line: str) -> None:
        """Execute one request and return its answer."""
        request = json.loads(line)
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
        with self._lock:
            print(text, file=self._answers)

    def _do(self, request: dict) -> dict:
        number, op = request["world"], request["op"]
        match op:
            case "reset":
                if number not in self._worlds:
                    world = build(WorldSpec(env_type=request["env_type"], values=request["values"]))
                    self._worlds[number] = world  # type: ignore[assignment]
                return answer_of(op, self._worlds[number].reset(seed=request["seed"]))
            case "step":
                return answer_of(op, self._worlds[number].step(request["action"]))
            case "close":
                if (world := self._worlds.pop(number, None)) is not None:
                    world.close()
                return {}
            case other:
                raise ValueError(f"unknown op {other!r}")


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worlds = Worlds(answers)
    threads = ThreadPoolExecutor(max_workers=_MAX_THREADS)
    print("{}", file=answers)
    for line in sys.stdin:
        threads.submit(worlds.handle, line)
    os._exit(0)  # a world that hangs must not keep the process alive


if __name__ == "__main__":
    main()
