"""The groups of ranks that a step uses, and how their calls go together: side by side where they have devices of their
own, one after another where they share some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from roll_async.trainer.protocol import CriticGroup, ScoringGroup, TrainerGroup

T = TypeVar("T")
Job = tuple[str, Callable[[], Awaitable[T]] | None]
"""(role, its call); None = it has none in this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerParts:
    """The groups of ranks of a step, by role: actor_train, reference, teachers, critic."""

    actor: TrainerGroup
    reference: ScoringGroup | None = None
    teachers: Mapping[str, ScoringGroup] = field(default_factory=dict)
    """By role: teacher, or teachers.NAME."""
    critic: CriticGroup | None = None
    sharing: Sequence[frozenset[str]] = ()
    """Sets of roles with devices or ranks in common (`roles_on_same_devices`): the activations of two of them need not
    fit into a device together. A role in no set has devices of its own.
    """

    async def work(self, jobs: Sequence[Job[T]]) -> tuple[list[T | None], float]:
        """(result of each job, seconds in which the actor's devices had none of them and other devices had).

        Jobs of roles that share devices run one after another, in their order. After an error the other jobs are
        cancelled, and it is raised when they have ended. Example: with devices of their own, a critic that takes 3 s
        and an actor that takes 1 s end after 3 s, and the actor has waited for 2.
        """
        loop, actor = asyncio.get_running_loop(), self._sharing_with("actor_train")
        results: list[T | None] = [None] * len(jobs)
        ended_s: dict[frozenset[str], float] = {}

        async def one_after_another(roles: frozenset[str]) -> None:
            for i, (role, job) in enumerate(jobs):
                if role in roles and job is not None:
                    results[i] = await job()
            ended_s[roles] = loop.time()

        # Each set once, in order; the actor's always, because the result subtracts when it ended.
        apart = dict.fromkeys([*(self._sharing_with(role) for role, job in jobs if job is not None), actor])
        running = [asyncio.create_task(one_after_another(roles), name="+".join(sorted(roles))) for roles in apart]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            # What they raise while they are cancelled must not replace the first error.
            await asyncio.gather(*running, return_exceptions=True)
        return results, max(ended_s.values()) - ended_s[actor]

    def _sharing_with(self, role: str) -> frozenset[str]:
        """Roles with devices in common with this one, itself included."""
        return next((roles for roles in self.sharing if role in roles), frozenset({role}))
