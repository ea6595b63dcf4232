"""Sources of the turns of a session: the engines of a run, or one engine in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from roll_async.agents.turn_handler import BadRequest
from roll_async.rollout.dispatch.requests import Interrupted
from roll_async.schema import Completion, GenerateRequest


class TokenSource(Protocol):
    """What `EnginePolicy` needs of `rollout/dispatch/engine_pool.py`."""

    async def generate(
        self, request: GenerateRequest, *, conversation: str | None = None, validation: bool = False
    ) -> Completion: ...


class EnginePolicy:
    """The engines of a run. All turns of a trajectory go to its replica while that lives, which has their prefix."""

    def __init__(self, manager: TokenSource) -> None:
        self._manager = manager
        self.resampled_turns = 0
        """Turns sampled anew because a weight push discarded them (interrupt.mode abort)."""

    async def generate(self, request: GenerateRequest, *, conversation: str, validation: bool) -> Completion:
        """One turn; a push with mode abort costs this turn, never the trajectory."""
        attempt = request
        for number in range(1, 1 << 30):
            try:
                return await self._manager.generate(attempt, conversation=conversation, validation=validation)
            except Interrupted:
                self.resampled_turns += 1
                # A new id: what still comes of the aborted request is not this one's.
                attempt = replace(request, request_id=f"{request.request_id}~{number}")
        raise AssertionError("unreachable")


class OneEnginePolicy:
    """One engine of this process, without a scheduler: `roll-async serve-policy`."""

    def __init__(self, generate: Callable[[GenerateRequest], Awaitable[Completion]]) -> None:
        self._generate = generate

    async def generate(self, request: GenerateRequest, *, conversation: str, validation: bool) -> Completion:
        """Raises BadRequest for what the engine does not take, such as stop strings of one that was started without."""
        try:
            return await self._generate(request)
        except ValueError as error:
            raise BadRequest(f"the engine refuses it: {error}") from error
