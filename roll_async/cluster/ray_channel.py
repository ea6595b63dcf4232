"""Ray under the typed calls of `remote.py`: a channel to one actor, and Ray's failures as this project's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from roll_async.buffer.errors import RoleGone
from roll_async.cluster.remote import Crossed, pack

GONE = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
"""A large answer stays on the node of the process until it is fetched, and is lost with that node (ObjectLostError).
The last is of a process that Ray killed for its memory.
"""
_CANCEL_WITHIN_S = 5.0
"""How long a cancelled call may take to end."""


class RayChannel:
    """`remote.py: Channel` to an actor whose class is under `@served`."""

    def __init__(self, actor: ActorHandle, *, ends_cancelled: bool = False) -> None:
        """`ends_cancelled`: a call whose wait is cancelled is cancelled over there too, and has ended when the wait
        does: the next call must not overtake it.
        """
        self.actor, self._ends_cancelled = actor, ends_cancelled

    async def invoke(self, method: str, *args: object) -> Any:
        ref = getattr(self.actor, method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            if self._ends_cancelled:
                ray.cancel(ref)
                await wait_ended([ref], _CANCEL_WITHIN_S)
            raise
        except GONE as error:
            raise RoleGone(last_line(error)) from error
        except RayTaskError as error:
            raised = error.cause if isinstance(error.cause, Crossed) else pack(error.cause)
        except RayError as error:  # Ray could not run the call, or could not read its result
            raised = pack(error)
        raise raised  # outside of the handlers: Ray's error would be told as its context


def last_line(error: BaseException) -> str:
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
