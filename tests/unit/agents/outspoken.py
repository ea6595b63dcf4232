"""Worlds, tools and an agent that give, raise and withhold what a test says, by the seed of their task."""

import asyncio
from contextlib import suppress

from roll_async.agents.messages import Message, TurnRequest
from roll_async.agents.tools.toolbox import function

SAYS = {}
"""By seed, then by hook (reset, step, close, tool, run): a function that gives or raises; None = nothing ever comes."""


def act(seed, hook, usual):
    does = SAYS.get(seed, {}).get(hook, lambda: usual)
    return usual if does is None else does()


async def act_slowly(seed, hook, usual):
    while SAYS.get(seed, {}).get(hook, act) is None:
        with suppress(asyncio.CancelledError):  # nor does it end when it is cancelled
            await asyncio.sleep(1e9)
    return act(seed, hook, usual)


class Quick:
    """Two steps: in the first the policy may call tools."""

    quick = True

    def reset(self, *, seed=None, options=None):
        self._seed, self._left = seed, 2
        return act(seed, "reset", (f"seed {seed}", {"state": "start"}))

    def step(self, action):
        self._left -= 1
        return act(self._seed, "step", (f"{self._left} left", 0.5, not self._left, False, {}))

    def close(self):
        return act(self._seed, "close", None)


class Slow(Quick):
    """The same with waits."""

    async def reset(self, *, seed=None, options=None):
        self._seed, self._left = seed, 2
        return await act_slowly(seed, "reset", (f"seed {seed}", {"state": "start"}))

    async def step(self, action):
        self._left -= 1
        return await act_slowly(self._seed, "step", (f"{self._left} left", 0.5, not self._left, False, {}))

    async def close(self):
        return await act_slowly(self._seed, "close", None)


class Tool:
    """What its argument, a seed, says."""

    schemas = (function("say", "Say something.", {"seed": {"type": "integer"}}),)

    async def call(self, name, arguments):
        return await act_slowly(
            arguments.get("seed") if isinstance(arguments.get("seed"), int) else None, "tool", "said"
        )


class Agent:
    """Asks the policy once, without HTTP."""

    def __init__(self, gateway, usual):
        self._gateway, self._usual = gateway, usual

    async def run(self, task, endpoint):
        messages = (Message(role="user", content=f"seed {task.seed}"),)
        await self._gateway._sessions[endpoint.api_key].turn(TurnRequest(messages=messages))
        return await act_slowly(task.seed, "run", self._usual)
