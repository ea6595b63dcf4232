"""A world with seeded faults, and agents of a user's own."""

import asyncio
import os
import random
import time
from dataclasses import dataclass

import aiohttp

from roll_async.agents.protocol import AgentResult
from roll_async.agents.tools.toolbox import function
from roll_async.envs.protocol import GraderFailed


@dataclass(frozen=True, kw_only=True)
class FaultyOptions:
    hang_share: float = 0.0
    crash_share: float = 0.0
    ungraded_share: float = 0.0
    turns: int = 3


class Faulty:
    """Three turns, then solved when the last answer holds a `t`. Faults are drawn anew by every world."""

    Options = FaultyOptions

    def __init__(self, options):
        self._options, self._rng = options, random.Random(os.urandom(8))

    def reset(self, *, seed=None, options=None):
        self._left = self._options.turns
        return f"seed {seed}", {"state": "start"}

    def step(self, action):
        if self._rng.random() < self._options.hang_share:
            time.sleep(600)
        if self._rng.random() < self._options.crash_share:
            os._exit(1)
        self._left -= 1
        if not self._left and self._rng.random() < self._options.ungraded_share:
            raise GraderFailed("the judge is away")
        reward = 1.0 if not self._left and "t" in action else 0.0
        return f"{self._left} left", reward, not self._left, False, {"state": f"{self._left}"}

    def close(self):
        pass


class Quick(Faulty):
    """The same in the event loop: for tests without hung and crashing steps."""

    quick = True


class Ruled(Quick):
    """With rules, and a suffix that looks like a placeholder."""

    def reset(self, *, seed=None, options=None):
        text, info = super().reset(seed=seed)
        return text, {**info, "instructions": "Say the.", "suffix": "{history}"}


class Clocked(Quick):
    """Its time is over with its last turn, solved or not."""

    def step(self, action):
        text, reward, ended, _, info = super().step(action)
        return text, reward, ended and reward > 0, ended, info


class Unjudged(Quick):
    """Its grader divided zero by zero."""

    def step(self, action):
        text, reward, ended, truncated, info = super().step(action)
        return text, float("nan") if ended else reward, ended, truncated, info


class Lookup:
    """A tool with one function."""

    schemas = (function("lookup", "Look something up.", {}),)

    async def call(self, name, arguments):
        return "nothing"


class TwoTurnAgent:
    """An agent that knows only HTTP."""

    async def run(self, task, endpoint):
        messages = [{"role": "user", "content": f"seed {task.seed}"}]
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {endpoint.api_key}"}) as http:
            for _ in range(2):
                body = {"model": endpoint.model, "messages": messages}
                async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    said = (await response.json())["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "go on"}]
        return AgentResult(reward=float("t" in said["content"]))


class EndlessAgent(TwoTurnAgent):
    """Never stops by itself."""

    async def run(self, task, endpoint):
        while True:
            await super().run(task, endpoint)


class StubbornAgent(TwoTurnAgent):
    """Asks for one turn more than it may have, and has its result all the same."""

    async def run(self, task, endpoint):
        result = await super().run(task, endpoint)
        body = {"messages": [{"role": "user", "content": "one more"}]}
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {endpoint.api_key}"}) as http,
            http.post(f"{endpoint.base_url}/chat/completions", json=body) as response,
        ):
            assert response.status == 400
        return result


class LeavingAgent:
    """Has its result while a request of it is under way."""

    async def run(self, task, endpoint):
        body = {"messages": [{"role": "user", "content": f"seed {task.seed}"}]}
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {endpoint.api_key}"}) as http:
            async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
            asked = asyncio.ensure_future(http.post(f"{endpoint.base_url}/chat/completions", json=body))
            await asyncio.wait({asked}, timeout=0.1)
            asked.cancel()
        return AgentResult(reward=1.0)


class BrokenAgent:
    """Raises before it has done anything."""

    async def run(self, task, endpoint):
        raise KeyError("config")


class UnjudgedAgent(TwoTurnAgent):
    """Its grader divided zero by zero."""

    async def run(self, task, endpoint):
        await super().run(task, endpoint)
        return AgentResult(reward=float("nan"))


class HangingAgent(TwoTurnAgent):
    """Two turns, then it waits for something that never comes."""

    async def run(self, task, endpoint):
        await super().run(task, endpoint)
        await asyncio.Event().wait()


class DeafAgent:
    """Waits from the beginning for something that never comes."""

    async def run(self, task, endpoint):
        await asyncio.Event().wait()


class ImpatientAgent(TwoTurnAgent):
    """A client of its own gives up."""

    async def run(self, task, endpoint):
        await super().run(task, endpoint)
        raise TimeoutError("the agent's own database")
