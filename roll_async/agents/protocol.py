"""Agents of the user's own, and how a trajectory ends.

An agent is a class with `Options` (as a world has them) and

    async def run(self, task: Task, endpoint: Endpoint) -> AgentResult

It talks to the policy through `endpoint` with any client it likes, does what it does, and judges itself. An agent that
stops because the endpoint says that the trajectory has ended may simply raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.agents.gateway.server import Endpoint
from roll_async.envs.registry import load_class
from roll_async.schema import Outcome

__all__ = ["AgentResult", "Endpoint", "Ending", "Task", "is_agent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of a trajectory. Trajectories of a group have the same task."""

    tag: str
    """Key of the world in custom_envs."""
    seed: int
    """Seed of the world."""
    validation: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """The result that an agent returns."""

    reward: float
    solved: bool | None = None
    """None: solved if the reward is positive."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one trajectory ended."""

    outcome: Outcome
    reward: float = 0.0
    """Valid only if the outcome is trusted."""
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    story: tuple[tuple[str, str], ...] = ()
    """(role, text) of all messages, for display."""
    frames: tuple[tuple[str, ...], ...] = ()
    """Renderings of the world, as lines of text."""


def is_agent(env_type: str) -> bool:
    """Whether a dotted path names an agent and not a world."""
    return inspect.iscoroutinefunction(getattr(load_class(env_type), "run", None))
