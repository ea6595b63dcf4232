"""Worlds that misbehave, for the pool."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy

from roll_async.envs.protocol import GraderFailed

CIRCLE = []
CIRCLE.append(CIRCLE)
ODD = {
    "keys": ("x", 1.0, True, False, {(1, 2): "\ud83d"}),
    "digits": ("x", 1.0, True, False, {"n": 10**5000}),
    "circle": ("x", 1.0, True, False, {"n": CIRCLE}),
    "no info": ("x", 1, 1, 0, None),
    "numpy": ("x", numpy.float32(0.5), numpy.bool_(True), numpy.bool_(False), {"solved": numpy.bool_(False)}),
    "too much": ("x", 1.0, True, False, {"n": ["y" * (40 << 20)] * 2}),
    "no text": (None, 1.0, True, False, {}),
    "bytes": (b"x\xff", 1.0, True, False, {}),
    "short": ("x", 1.0, True),
    "no tuple": None,
    "no reward": ("x", None, True, False, {}),
    "word": ("x", "1.0", True, False, {}),
    "infinite": ("x", float("inf"), True, False, {}),
}


def answers():
    """Where this process writes its answers to the pool, a local of its main()."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while "channel" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["channel"].fileno()


@dataclass(frozen=True, kw_only=True)
class Options:
    sleep_s: float = 0.0
    close_hangs: bool = False


class Hostile:
    """Does what it is told."""

    Options = Options

    def __init__(self, options):
        self._options = options

    def reset(self, *, seed=None, options=None):
        print("this is not protocol")
        return f"seed {seed}", {"pid": os.getpid()}

    def step(self, action):
        match action:
            case "hang":
                time.sleep(600)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("no such thing")
            case "ungradable":
                raise GraderFailed("the judge is away")
            case "exit":
                raise SystemExit(3)
            case "spawn":
                return str(subprocess.Popen(["sleep", "300"], start_new_session=False).pid), 0.0, False, False, None
            case "babble":
                os.write(answers(), b"no answer\n")
                time.sleep(600)
            case _ if action in ODD:
                return ODD[action]
        time.sleep(self._options.sleep_s)
        return f"did {action}", 0.5, action == "end", False, {"pid": os.getpid()}

    def close(self):
        if self._options.close_hangs:
            time.sleep(600)


class Slowly:
    """Says to a file what it does, and when it has done it."""

    def __init__(self, options):
        self._path = options.path

    def _say(self, word):
        with open(self._path, "a") as file:
            file.write(word)

    def _work(self):
        self._say("begins ")
        time.sleep(0.3)
        self._say("ends ")

    def reset(self, *, seed=None, options=None):
        self._work()
        return "x", {}

    def step(self, action):
        self._work()
        return "x", 0.0, False, False, {}

    def close(self):
        self._say("closed ")

    @dataclass(frozen=True, kw_only=True)
    class Options:
        path: str


class WaitsForItsClose(Slowly):
    """As a browser: what it does ends when it is closed."""

    def __init__(self, options):
        super().__init__(options)
        self._closed = threading.Event()

    def reset(self, *, seed=None, options=None):
        return "x", {}

    def _work(self):
        self._say("begins ")
        self._closed.wait()

    def close(self):
        super().close()
        self._closed.set()


class InLoop(Hostile):
    """The same in the event loop."""

    quick = True


class Slow:
    """An async world."""

    async def reset(self, *, seed=None, options=None):
        return "ready", {}

    async def step(self, action):
        await asyncio.sleep(float(action))
        return "done", 1.0, True, False, {}


class Unmade(Slow):
    def __init__(self):
        raise OSError("no display")


class Clings(Slow):
    """Raises when it is closed."""

    async def close(self):
        raise ConnectionError("its container is gone")


class ClosesSlowly(Slow):
    async def close(self):
        await asyncio.sleep(600)
