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

from roll_async.envs.protocol import GraderFailed, World
from roll_async.envs.registry import WorldSpec, build

_MAX_THREADS = 256


class Worlds:
    """The worlds of this process, by number."""

    def __init__(self, answers: TextIO) -> None:
        self._answers, self._lock = answers, threading.Lock()
        self._worlds: dict[int, World] = {}

    def handle(self, line: str) -> None:
        """Execute one request and return its answer."""
        request = json.loads(line)
        try:
            answer = self._do(request)
        except GraderFailed as error:
            answer = {"error": str(error), "kind": "grader"}
        except Exception as error:  # the world is user code: every exception is a failure of the world
            answer = {"error": f"{type(error).__name__}: {error}", "kind": "world"}
        text = json.dumps({"id": request["id"], **answer}, default=str)
        with self._lock:
            print(text, file=self._answers)

    def _do(self, request: dict) -> dict:
        number = request["world"]
        match request["op"]:
            case "reset":
                if number not in self._worlds:
                    world = build(WorldSpec(env_type=request["env_type"], values=request["values"]))
                    self._worlds[number] = world  # type: ignore[assignment]
                text, info = self._worlds[number].reset(seed=request["seed"])
                return {"text": text, "info": info}
            case "step":
                text, reward, terminated, truncated, info = self._worlds[number].step(request["action"])
                return {
                    "text": text,
                    "reward": float(reward),
                    "terminated": bool(terminated),
                    "truncated": bool(truncated),
                    "info": info,
                }
            case "close":
                if (world := self._worlds.pop(number, None)) is not None:
                    world.close()
                return {"text": ""}
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
