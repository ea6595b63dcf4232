"""Failures of Ray calls as this project's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from roll_async.buffer.deadline import within

T = TypeVar("T")


class RoleFailed(RuntimeError):
    """A role process raised or died; the run ends with exit code 3."""


class RoleGone(ConnectionError):
    """A role process died."""


async def call(
    role: str,
    what: str,
    awaitable: Awaitable[T],
    *,
    timeout_s: float | None,
    own: tuple[type[BaseException], ...] = (),
) -> T:
    """Await the remote call `what`. Raises RoleGone for a dead process, StallError when there is no answer within
    `timeout_s` (fault.rpc_timeout; time in the actor's queue counts), and the error of a failed call with the role's
    name; errors of the types `own` are raised unchanged.

    `timeout_s` None is for calls that wait for an event. The caller's docstring says who owns the deadline then.
    """
    try:
        if timeout_s is None:
            return await awaitable
        return await within(timeout_s, awaitable, f"{role}: {what} did not return (fault.rpc_timeout)")
    except (ActorDiedError, ActorUnavailableError, RayActorError, ObjectLostError) as error:
        # A large answer stays on the node of the process until it is fetched, and is lost with that node.
        raise RoleGone(f"{role}: process is gone ({_last_line(error)})") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, own):
            raise cause from error
        if isinstance(cause, (ValueError, ConnectionError)):
            raise type(cause)(f"{role}: {cause}") from error
        raise RoleFailed(
            f"{role}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        ) from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


async def wait_ended(refs: Sequence[ray.ObjectRef], timeout_s: float) -> None:
    """Wait up to `timeout_s` until these calls have ended, with or without an error. Their errors are marked as
    retrieved: an actor that is killed meanwhile would otherwise leave a traceback on the console.
    """
    calls = [asyncio.wrap_future(ref.future()) for ref in refs]
    for each in calls:
        each.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    if calls:
        await asyncio.wait(calls, timeout=timeout_s)
