"""What the clients of an HTTP address share: a session with its key, and the attempts of one call."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of a model's server after which the same request may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """The attempts of one call and the pauses between them, in seconds."""

    first_s: float
    longest_s: float

    def pause_s(self, attempt: int) -> float:
        """Exponential, with a random part: those who were refused together do not come back together."""
        return min(self.longest_s, self.first_s * 2**attempt) * random.uniform(0.5, 1.0)

    def asked_for_s(self, header: str) -> float | None:
        """The pause a Retry-After header asks for, at most the longest; None without a number."""
        try:
            seconds = float(header)
        except ValueError:
            return None
        return min(self.longest_s, max(0.0, seconds)) if math.isfinite(seconds) else None

    async def answer(self, attempt: Callable[[], Awaitable[T | Trouble]], max_retries: int) -> T | list[Trouble]:
        """The first answer, or the trouble of every attempt when `max_retries` further ones bring none either. What
        `attempt` raises ends the call.
        """
        troubles: list[Trouble] = []
        while True:
            reply = await attempt()
            if not isinstance(reply, Trouble):
                return reply
            troubles.append(reply)
            if len(troubles) > max_retries:
                return troubles
            await asyncio.sleep(self.pause_s(len(troubles) - 1) if reply.pause_s is None else reply.pause_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """A call that failed in a way that is worth another attempt."""

    reason: str
    pause_s: float | None = None
    """What the service asked for."""
    unreadable: bool = False
    """It answered, but not what was asked for."""


def open_session(*, key: str, variable: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """A session that shows the secret in environment variable `variable` (None = none needed).

    Raises ValueError naming `key`, the config key, when the variable is not set.
    """
    import aiohttp

    headers = {}
    if variable is not None:
        secret = os.environ.get(variable)
        if not secret:
            raise ValueError(f"{key}: the environment variable {variable} is not set")
        headers["Authorization"] = f"Bearer {secret}"
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),  # the caller has slots
    )
