"""What the rewards behind an HTTP address share: a session with its key, and the wait before the next attempt."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Pauses between the attempts of one call, in seconds."""

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
