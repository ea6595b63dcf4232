"""A deadline for a wait, with an error that says what did not happen in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from roll_async.buffer.errors import StallError

T = TypeVar("T")


async def within(timeout_s: float, awaitable: Awaitable[T], what: str) -> T:
    """The result, or StallError `<what> within <timeout_s> s` when it is late; `what` says which role did not do what.
    A TimeoutError that the awaitable itself raises is passed on.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise StallError(f"{what} within {timeout_s:g} s") from error
