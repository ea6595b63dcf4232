"""The real `WorldRunner` over fake worlds, a fake template and a fake tool: no thread, process or socket."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from roll_async.agents.episode import EpisodeOptions
from roll_async.agents.session import SessionOptions
from roll_async.agents.tools.toolbox import function, toolbox_of
from roll_async.agents.worlds import AgentParts, TagPlan, WorldRunner
from roll_async.envs.pool import WorldPool
from roll_async.envs.registry import WorldSpec
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.groups import GroupOptions, GroupRunner
from roll_async.schema import Prompt
from roll_async.simulator.agents.checks import TraceChecks
from roll_async.simulator.agents.texts import SimRenderer, TraceTexts
from roll_async.simulator.agents.worlds import HELD_OUT, Fates, WorldBook, workers
from roll_async.simulator.invariants import Watch
from roll_async.simulator.parts.roles import SimPrompts, SimTool
from roll_async.simulator.watched import SeenSource

if TYPE_CHECKING:
    from roll_async.simulator.scenario import Scenario

_TAG = "sim"


def task_prompt(number: int) -> Prompt:
    """As `agents/tasks.py` makes them: row_id and seed are the number."""
    extra = {"seed": str(number), "validation": "1" if number >= HELD_OUT else ""}
    return Prompt(row_id=str(number), token_ids=array("i"), domain=_TAG, ground_truth="", extra=extra)


def held_out_tasks(count: int) -> tuple[Prompt, ...]:
    """Tasks of a validation."""
    return tuple(task_prompt(HELD_OUT + i) for i in range(count))


def fates_of(scenario: Scenario) -> Fates:
    """Properties of the worlds of a scenario."""
    assert scenario.worlds is not None
    return Fates(scenario.seed, scenario.worlds, scenario.rewards.flat_share)


def checks_of(scenario: Scenario) -> TraceChecks:
    """What trajectories of a scenario must hold."""
    assert scenario.worlds is not None and isinstance(scenario.texts, TraceTexts)
    return TraceChecks(texts=scenario.texts, fates=fates_of(scenario), max_context=scenario.worlds.max_context)


class AgentTasks:
    """Tasks, worlds of one process of a run, and the real groups that play them."""

    def __init__(
        self, scenario: Scenario, watch: Watch, groups: type[GroupRunner], worlds: type[WorldRunner] | None
    ) -> None:
        model = scenario.worlds
        assert model is not None
        self._scenario, self._watch, self._model = scenario, watch, model
        self._groups, self._worlds = groups, worlds or WorldRunner
        self.prompts = SimPrompts(scenario.num_prompts, task_prompt)
        self.held_out = held_out_tasks(scenario.validation_prompts)
        most = 0 if model.blocking else model.max_worlds  # a worker that is given up keeps its worlds to its end
        self.book = WorldBook(fates_of(scenario), watch, max_open=most, lock_step=model.lock_step)
        self.pool = WorldPool(
            max_per_worker=model.per_worker,
            step_timeout_s=model.timeout_s,
            worker=workers(self.book, seed=scenario.seed, broken_share=model.broken_share),
        )

    def source(self, manager: EnginePool) -> GroupRunner:
        """The source of groups."""
        scenario, model = self._scenario, self._model
        name = "BlockingSimWorld" if model.blocking else "SimWorld"
        tools = scenario.tools
        boxed = [] if tools is None else [BoxedTool(SimTool(scenario.seed, tools))]
        plan = TagPlan(
            spec=WorldSpec(env_type=f"roll_async.simulator.agents.worlds.{name}", values={"book": self.book}),
            session=SessionOptions(
                sampling=scenario.scheduler.sampling,
                max_turns=model.max_turns,
                max_context=model.max_context,
                max_seconds=model.max_seconds,
                windowed=model.windowed,
            ),
            play=EpisodeOptions(max_turns=model.max_turns, windowed=model.windowed),
            toolbox=toolbox_of(boxed, timeout_s=0.0 if tools is None else tools.timeout_s),
            max_concurrent=model.max_concurrent,
        )
        options = GroupOptions(
            samples_per_group=scenario.scheduler.samples_per_group,
            sampling=None,
            redundancy=model.redundancy,
            retries=model.retries,
            filter=scenario.scheduler.filter,
        )
        parts = AgentParts(
            tags={_TAG: plan},
            renderer=SimRenderer(strips=model.strips),
            worlds=self.pool,
            max_worlds=model.max_worlds,
        )
        # SeenSource comes first: its `validate` calls that of the runner.
        seen = cast(type[GroupRunner], type("Groups", (SeenSource, self._groups), {"watch": self._watch}))
        return seen(self._worlds(manager, parts), manager, options)

    @property
    def num_left(self) -> int:
        """Worlds that have not been closed; a worker that is given up may keep some until it ends."""
        return 0 if self._model.blocking else self.book.num_open

    async def close(self) -> None:
        """End the workers."""
        await self.pool.close()


class BoxedTool:
    """`agents/tools/toolbox.py: Toolset` of the simulator's tool."""

    schemas = (function("sim", "A tool.", {}),)

    def __init__(self, tool: SimTool) -> None:
        self._tool = tool

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The result of one call."""
        return await self._tool(arguments)
