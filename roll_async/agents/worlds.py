"""Trajectories in worlds, and of agents.

    task --> slot of a world --> fresh world, fresh session -- trusted end --> rows
                                                            -- other end --> Ended, tried again on a fresh world

No trajectory waits for another, and one that thinks, or whose tools run, holds no slot of an engine. A trajectory whose
attempts are used up fails its group, whose slot goes to another task; it is never trained as a reward of 0. Whatever is
said in it ends it alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from roll_async.agents.counts import AgentCounts
from roll_async.agents.episode import EpisodeOptions, WorldEpisode, run_agent
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.policies import EnginePolicy
from roll_async.agents.protocol import Ending, Task
from roll_async.agents.rendering import Renderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.agents.tasks import task_of
from roll_async.envs.pool import WorldPool
from roll_async.envs.registry import WorldSpec
from roll_async.observe.outside import OutsideError, border
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.group_source import SourceCounts
from roll_async.rollout.groups import Ended, EndReason, Trajectory, TrajectoryRequest
from roll_async.rollout.tools import Toolbox
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Outcome, Reward, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TagPlan:
    """Settings of the trajectories of one tag."""

    spec: WorldSpec
    session: SessionOptions
    play: EpisodeOptions
    toolbox: Toolbox
    agent: object | None = None
    """A user-defined agent, used instead of a world."""
    max_concurrent: int = 0
    """Largest number of concurrent worlds; 0 = no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentParts:
    """Components that all trajectories share."""

    tags: Mapping[str, TagPlan]
    renderer: Renderer
    worlds: WorldPool
    validation_worlds: WorldPool | None = None
    """Those of validations beside training; None = they share `worlds`."""
    gateway: PolicyGateway | None = None
    """The model endpoint; needed by tags with an agent."""
    silence_s: float = float("inf")
    """Seconds without a turn after which an agent hangs."""
    executor: Executor | None = None
    """Thread that renders and encodes chats."""
    tell: Callable[[str, Task, Ending, Sequence[Sample]], None] | None = None
    """Called with every trajectory whose outcome is trusted: name, task, end, rows."""
    max_worlds: int = 0
    """Trajectories at the same time over all groups (num_env_groups * trajectories of a group); 0 = no limit."""
    max_validation_worlds: int = 0
    """Those of validations beside training; 0 = no limit."""
    trains: bool = True
    """False = rollout alone: `max_worlds` and the counters are of validation's trajectories, there are no others."""


class WorldRunner:
    """`rollout/groups.py: TrajectoryRunner` of worlds and agents, on the replicas of a manager."""

    cancels_on_abort = True

    def __init__(self, manager: EnginePool, parts: AgentParts) -> None:
        self._manager, self._parts = manager, parts
        self._policy = EnginePolicy(manager)
        self._counts = AgentCounts()
        # By whether a trajectory is counted (`_is_counted`).
        limits = {True: parts.max_worlds, False: parts.max_validation_worlds}
        self._worlds = {counted: asyncio.Semaphore(most) for counted, most in limits.items() if most}
        # A validation has slots of its own: trajectories of the training that it has set aside keep theirs.
        self._caps = {
            (tag, validation): asyncio.Semaphore(plan.max_concurrent)
            for tag, plan in parts.tags.items()
            if plan.max_concurrent
            for validation in (False, True)
        }

    async def run(self, request: TrajectoryRequest) -> Trajectory | Ended:
        """One attempt, in a world of its own: its rows, if its end is trusted."""
        ending, rows = await self._ended(request)
        if rows:
            return Trajectory(rows=tuple(rows))
        prompt = request.prompt
        where = f"{prompt.domain}, seed {prompt.extra.get('seed')}"
        text = f"{where}: {ending.outcome.value}: {ending.reason or 'no turn'}"
        if ending.outcome is Outcome.CANCELLED:
            return Ended(reason=EndReason.ABORTED, text=text)  # it says nothing about the task, which comes again
        return Ended(reason=EndReason.FAILED, text=text, can_retry=True)

    async def _ended(self, request: TrajectoryRequest) -> tuple[Ending, list[Sample]]:
        """How one attempt ended, and its rows if that is trusted. This is the border round a trajectory: what was said
        in it, and what nobody foresaw about that, ends it and nothing else.
        """
        # Counted, whatever fails before the task is known.
        name, tree, is_counted = request.name, TraceTree(), True
        try:
            with border(ConnectionError):  # no replica is left
                task = task_of(request.prompt)
                is_counted = self._is_counted(task)
                ending, session = await self._attempt(task, request)
                tree, trusted = session.tree, ending.outcome.is_trusted
                reward = Reward(score=ending.reward, metrics=ending.metrics) if trusted else None
                rows = tree.rows(name, reward=reward, outcome=ending.outcome) if trusted else []
                if rows and self._parts.tell is not None:
                    with border():
                        self._parts.tell(name, task, ending, rows)
        except OutsideError as error:
            ending, rows = Ending(outcome=Outcome.INFRA_ERROR, reason=str(error)), []
            logger.error("trajectory %s: %s; it may be a fault of roll_async", name, error, exc_info=error.__cause__)
            self._counts.unforeseen += 1
        if is_counted:
            self._counts.ended(request.prompt.domain, ending, tree)
        return ending, rows

    async def _attempt(self, task: Task, request: TrajectoryRequest) -> tuple[Ending, Session]:
        """Run one trajectory in a new world to its end."""
        plan, parts, name, scope = self._parts.tags[task.tag], self._parts, request.name, request.scope
        options = replace(plan.session, validation=task.validation)
        if request.sampling is not None:
            of_turn = plan.session.sampling.max_new_tokens  # the tag's: a validation's is of a whole answer
            options = replace(options, sampling=replace(request.sampling, max_new_tokens=of_turn))
        session = Session(name, self._policy, parts.renderer, options, parts.executor)
        # Before it waits for a slot: an abort must find it.
        scope.open.add(session)
        async with AsyncExitStack() as stack:
            # Run in reverse: no turn of the session is left when its replica is forgotten.
            stack.callback(self._manager.forget_affinity, name)
            stack.callback(scope.open.discard, session)
            stack.callback(session.end, Outcome.CANCELLED, "the trajectory is over")
            for cap in (self._worlds.get(self._is_counted(task)), self._caps.get((task.tag, task.validation))):
                if cap is not None:
                    await stack.enter_async_context(cap)
            if scope.aborted:  # while it waited for its slot
                return Ending(outcome=Outcome.CANCELLED, reason="aborted"), session
            if plan.agent is not None:
                return await self._run_agent(plan, task, session), session
            own = None if self._is_counted(task) else parts.validation_worlds
            worlds = own or parts.worlds
            world = worlds.open(plan.spec)
            stack.callback(worlds.close_soon, world)
            return await WorldEpisode(session, world, plan.toolbox, plan.play).run(task.seed), session

    @property
    def _pools(self) -> list[WorldPool]:
        return [p for p in (self._parts.worlds, self._parts.validation_worlds) if p is not None]

    def _is_counted(self, task: Task) -> bool:
        return not (task.validation and self._parts.trains)

    async def _run_agent(self, plan: TagPlan, task: Task, session: Session) -> Ending:
        gateway = self._parts.gateway
        assert gateway is not None, "agents need the gateway"
        endpoint = gateway.open(session)
        try:
            limits = {"max_seconds": plan.session.max_seconds, "silence_s": self._parts.silence_s}
            return await run_agent(plan.agent, task, session, endpoint, **limits)
        finally:
            gateway.shut(endpoint)

    def counts(self, num_retries: int) -> SourceCounts:
        """Counters since the start."""
        # Tags may share a toolbox, which counts once.
        boxes = {id(plan.toolbox): plan.toolbox for plan in self._parts.tags.values()}.values()
        return SourceCounts(
            tool_calls=sum(box.num_calls for box in boxes),
            tool_failures=sum(box.num_failures for box in boxes),
            metrics={
                **self._counts.metrics(num_retries),
                "agent/resampled_turns": float(self._policy.resampled_turns),
                "agent/lost_world_processes": float(sum(pool.killed for pool in self._pools)),
                **({} if self._parts.gateway is None else self._parts.gateway.metrics()),
            },
            ratios=self._counts.ratios(),
        )
