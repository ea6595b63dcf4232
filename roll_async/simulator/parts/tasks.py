"""The tasks of a simulated run, and the source that makes groups of them: answers to prompts, or (`agents/worlds.py`)
trajectories in worlds.
"""

from __future__ import annotations

from typing import cast

from roll_async.rollout.chat_scheduler import ChatCompletionScheduler
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.simulator.invariants import Watch
from roll_async.simulator.parts.roles import SimPrompts, SimScorer, SimTool, chat_prompt, held_out
from roll_async.simulator.parts.text import Texts, tools_of
from roll_async.simulator.scenario import Scenario
from roll_async.simulator.watched import SeenSource


class ChatTasks:
    """Prompts, and the real scheduler on fakes."""

    num_left = 0
    """Worlds left open: there are none."""

    def __init__(self, scenario: Scenario, watch: Watch, scheduler: type[ChatCompletionScheduler]) -> None:
        self._scenario, self._watch, self._scheduler = scenario, watch, scheduler
        self.prompts = SimPrompts(scenario.num_prompts, chat_prompt)
        self.held_out = held_out(scenario.validation_prompts)

    def source(self, manager: EnginePool) -> ChatCompletionScheduler:
        """The source of groups."""
        scenario, texts, tools = self._scenario, self._scenario.texts, None
        if scenario.tools is not None:
            assert isinstance(texts, Texts)
            tools = tools_of(scenario.tools, texts, SimTool(scenario.seed, scenario.tools))
        # SeenSource comes first: its `validate` calls that of the scheduler.
        seen = cast(
            type[ChatCompletionScheduler], type("Scheduler", (SeenSource, self._scheduler), {"watch": self._watch})
        )
        return seen(manager, SimScorer(scenario.seed, scenario.rewards), scenario.scheduler, tools=tools)

    async def close(self) -> None:
        """Nothing is open."""
