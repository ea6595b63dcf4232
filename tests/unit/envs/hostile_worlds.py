"""Worlds that misbehave, for the pool."""

import asyncio
import os
import time
from dataclasses import dataclass

from roll_async.envs.protocol import GraderFailed


@dataclass(frozen=True, kw_only=True)
class Options:
    sleep_s: float = 0.0


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
        time.sleep(self._options.sleep_s)
        return f"did {action}", 0.5, action == "end", False, {"pid": os.getpid()}

    def close(self):
        pass


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
