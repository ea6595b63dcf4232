"""Groups of trajectories: `rollout/group_source.py: GroupSource` for agents.

    task --+-- trajectory (fresh world, fresh session) -- trusted end --> rows
           +-- ...                                     -- other end --> again on a fresh world, up to a limit
           +-- redundant ones: the first group_size that end are kept, the others are cancelled

No trajectory waits for another, and one that thinks, or whose tools run, holds no slot of an engine. A trajectory whose
attempts are used up fails its group, whose slot goes to another task; it is never trained as a reward of 0. Whatever is
said in it ends it alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from roll_async.agents.counts import AgentCounts
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.play import PlayOptions, WorldEpisode, run_agent
from roll_async.agents.policies import EnginePolicy
from roll_async.agents.protocol import Ending, Task
from roll_async.agents.rendering import Renderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.agents.tasks import task_of
from roll_async.envs.pool import WorldPool
from roll_async.envs.registry import WorldSpec
from roll_async.observe.outside import OutsideError, border
from roll_async.rollout.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate, GroupOutcome, SourceCounts
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.rollout.tools import Toolbox
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Answered, Group, Outcome, Prompt, Reward, Sample, SamplingParams, WeightVersion

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TagPlan:
    """Settings of the trajectories of one tag."""

    spec: WorldSpec
    session: SessionOptions
    play: PlayOptions
    toolbox: Toolbox
    agent: object | None = None
    """A user-defined agent, used instead of a world."""
    max_concurrent: int = 0
    """Largest number of concurrent worlds; 0 = no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOptions:
    """Size of groups, and the limits of retries."""

    group_size: int
    redundancy: int = 0
    max_worlds: int = 0
    """Trajectories at the same time over all groups (num_env_groups * trajectories of a group); 0 = no limit."""
    max_validation_worlds: int = 0
    """Those of validations beside training; 0 = no limit."""
    retries: int = 2
    """Further attempts of a trajectory that failed for a reason outside the policy."""
    filter: GroupFilter | None = None
    trains: bool = True
    """False = rollout alone: `max_worlds` and the counters are of validation's trajectories, there are no others."""


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


@dataclass(eq=False, slots=True)
class _RunningGroup:
    """A running group."""

    sessions: set[Session] = field(default_factory=set)
    tasks: list[asyncio.Task[list[Sample] | str]] = field(default_factory=list)
    aborted: bool = False
    cut_short: bool = False
    """A request of it was ended from outside, by the stop of the run."""


class AgentGroups:
    """Runs groups of trajectories on the replicas of a manager."""

    def __init__(self, manager: AsyncLLMServerManager, parts: AgentParts, options: GroupOptions) -> None:
        self._manager, self._parts, self._options = manager, parts, options
        self._policy = EnginePolicy(manager)
        self._counts = AgentCounts()
        self._running: dict[int, _RunningGroup] = {}
        limits = {True: options.max_worlds, False: options.max_validation_worlds}
        self._worlds = {counted: asyncio.Semaphore(most) for counted, most in limits.items() if most}
        # A validation has slots of its own: trajectories of the training that it has set aside keep theirs.
        self._caps = {
            (tag, validation): asyncio.Semaphore(plan.max_concurrent)
            for tag, plan in parts.tags.items()
            if plan.max_concurrent
            for validation in (False, True)
        }

    async def run_group(
        self, prompt: Prompt, *, group_id: int, attempt: int = 0, admitted_version: WeightVersion = 0
    ) -> GroupOutcome:
        """One group. Every path ends in an outcome; only cancellation and the loss of all replicas are raised."""
        loop, options = asyncio.get_running_loop(), self._options
        admitted, name = loop.time(), f"{group_id}.{attempt}"
        running = self._running[group_id] = _RunningGroup()
        try:
            running.tasks = [
                loop.create_task(self._trajectory(prompt, f"{name}/{i}", running))
                for i in range(options.group_size + options.redundancy)
            ]
            kept, problems = await self._first(running.tasks, options.group_size)
        finally:
            await _cancel(running.tasks)
            del self._running[group_id]
        if running.aborted:
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted")
        if len(kept) < options.group_size and running.cut_short:
            return GroupOutcome(fate=GroupFate.REQUEUED, reason="aborted")
        if len(kept) < options.group_size:
            reason = f"{len(kept)} of {options.group_size} trajectories ended with trust; {problems[-1]}"
            return GroupOutcome(fate=GroupFate.FAILED, reason=reason)
        group = Group(
            group_id=group_id,
            prompt=prompt,
            samples=tuple(row for rows in kept for row in rows),
            admitted_version=admitted_version,
            admitted_s=admitted,
            finished_s=loop.time(),
        )
        return self._judge(group)

    def _judge(self, group: Group) -> GroupOutcome:
        if self._options.filter is None:
            return GroupOutcome(fate=GroupFate.KEPT, group=group)
        return self._options.filter.judge(group)

    async def _first(
        self, tasks: Sequence[asyncio.Task[list[Sample] | str]], wanted: int
    ) -> tuple[list[list[Sample]], list[str]]:
        """(rows of the first `wanted` trajectories that end with trust, why others did not); gives up when there cannot
        be as many.
        """
        kept: list[list[Sample]] = []
        problems: list[str] = []
        pending = set(tasks)
        while pending and len(kept) < wanted <= len(kept) + len(pending):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for ended in sorted(done, key=tasks.index):
                result = "aborted" if ended.cancelled() else ended.result()
                if isinstance(result, str):
                    problems.append(result)
                elif len(kept) < wanted:
                    kept.append(result)
        return kept, problems

    async def _trajectory(
        self, prompt: Prompt, name: str, running: _RunningGroup, sampling: SamplingParams | None = None
    ) -> list[Sample] | str:
        """The rows of one trajectory with a trusted outcome, or the reason why there are none."""
        pause_s, reason = _FIRST_RETRY_S, ""
        for attempt in range(self._options.retries + 1):
            if attempt:
                self._counts.retried()
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_RETRY_S, 2 * pause_s)
            this = f"{name}~{attempt}" if attempt else name
            ending, rows = await self._ended(prompt, this, running, sampling)
            if rows:
                return rows
            where = f"{prompt.domain}, seed {prompt.extra.get('seed')}"
            reason = f"{where}: {ending.outcome.value}: {ending.reason or 'no turn'}"
            if ending.outcome is Outcome.CANCELLED:
                running.cut_short = True  # it says nothing about the task, which comes again
                break
            logger.warning("trajectory %s: %s", this, reason)
        return reason

    async def _ended(
        self, prompt: Prompt, name: str, running: _RunningGroup, sampling: SamplingParams | None
    ) -> tuple[Ending, list[Sample]]:
        """How one attempt ended, and its rows if that is trusted. This is the border round a trajectory: what was said
        in it, and what nobody foresaw about that, ends it and nothing else.
        """
        tree, is_counted = TraceTree(), True
        try:
            with border(ConnectionError):  # no replica is left
                task = task_of(prompt)
                is_counted = self._is_counted(task)
                ending, session = await self._attempt(task, name, running, sampling)
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
            self._counts.ended(prompt.domain, ending, tree)
        return ending, rows

    async def _attempt(
        self, task: Task, name: str, running: _RunningGroup, sampling: SamplingParams | None
    ) -> tuple[Ending, Session]:
        """Run one trajectory in a new world to its end."""
        plan, parts = self._parts.tags[task.tag], self._parts
        options = replace(plan.session, foreground=task.validation)
        if sampling is not None:
            of_turn = plan.session.sampling.max_new_tokens
            options = replace(options, sampling=replace(sampling, max_new_tokens=of_turn))
        session = Session(name, self._policy, parts.renderer, options, parts.executor)
        running.sessions.add(session)
        async with AsyncExitStack() as stack:
            stack.callback(self._manager.forget_affinity, name)
            stack.callback(running.sessions.discard, session)
            stack.callback(session.end, Outcome.CANCELLED, "the trajectory is over")
            for cap in (self._worlds.get(self._is_counted(task)), self._caps.get((task.tag, task.validation))):
                if cap is not None:
                    await stack.enter_async_context(cap)
            if running.aborted:
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
        return not (task.validation and self._options.trains)

    async def _run_agent(self, plan: TagPlan, task: Task, session: Session) -> Ending:
        gateway = self._parts.gateway
        assert gateway is not None, "agents need the gateway"
        endpoint = gateway.open(session)
        try:
            limits = {"max_seconds": plan.session.max_seconds, "silence_s": self._parts.silence_s}
            return await run_agent(plan.agent, task, session, endpoint, **limits)
        finally:
            gateway.shut(endpoint)

    async def abort_groups(self, group_ids: Iterable[int]) -> None:
        """End these groups as REQUEUED; their requests have ended when this returns."""
        chosen = [self._running[i] for i in group_ids if i in self._running]
        for running in chosen:
            running.aborted = True
            for session in running.sessions:
                session.stop(Outcome.CANCELLED, "aborted")
        await self._manager.abort([i for r in chosen for session in r.sessions for i in session.open_requests])
        for running in chosen:
            for task in running.tasks:
                if not task.done():
                    task.cancel()

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Answered]:
        """One trajectory per prompt; failed ones are left out, logged."""
        running = _RunningGroup()
        running.tasks = [
            asyncio.ensure_future(self._trajectory(p, f"{name}/{i}", running, sampling)) for i, p in enumerate(prompts)
        ]
        try:
            done = await asyncio.gather(*running.tasks)
        finally:
            await _cancel(running.tasks)
        return [(prompt, rows) for prompt, rows in zip(prompts, done, strict=True) if isinstance(rows, list)]

    def counts(self) -> SourceCounts:
        """Counters since the start."""
        boxes = {id(plan.toolbox): plan.toolbox for plan in self._parts.tags.values()}.values()
        return SourceCounts(
            tool_calls=sum(box.num_calls for box in boxes),
            tool_failures=sum(box.num_failures for box in boxes),
            metrics={
                **self._counts.metrics(),
                "agent/resampled_turns": float(self._policy.resampled_turns),
                "agent/lost_world_processes": float(sum(pool.killed for pool in self._pools)),
                **({} if self._parts.gateway is None else self._parts.gateway.metrics()),
            },
            ratios=self._counts.ratios(),
        )


async def _cancel(tasks: Sequence[asyncio.Task[list[Sample] | str]]) -> None:
    """Cancel the tasks and wait until none of them runs."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # the error is raised by the task that is awaited
