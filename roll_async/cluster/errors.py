"""Failures of Ray calls as this project's errors.

    role process: method raises X -- @told --> X, or what tells X in text -- Ray --> call() in the driver: RoleFailed

An exception crosses as it is only if every process can read it. Classes of libraries and of users cross as text,
because they may not pickle, may not unpickle, or may not be there in the other process.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import Place, RoleFailed, RoleGone, first_cause, place_of
from roll_async.weight_sync.errors import EngineDead, UpdateFailed

T = TypeVar("T")

_LONGEST_REASON = 1500
"""Characters of an exception's message that are told in one line; all of it is in the traceback."""
_GONE = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
"""A large answer stays on the node of the process until it is fetched, and is lost with that node (ObjectLostError).
The last is of a process that Ray killed for its memory.
"""
_PLAIN = (str, bytes, int, float, type(None))


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
    except _GONE as error:
        raise RoleGone(f"{role}: process is gone ({_last_line(error)})") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, own):
            raise cause from error
        raise _of_role(role, cause) from error
    except RayError as error:  # Ray could not run the call, or could not read its result
        raise RoleFailed(f"{role}: {what}: {type(error).__name__}: {_last_line(error)}") from error


def _of_role(role: str, cause: BaseException) -> Exception:
    """The error of a role with the role's name, and the place where it arose there."""
    kind = type(cause)
    if kind in (ValueError, ConnectionError, EngineDead, UpdateFailed, RoleFailed, RoleGone):
        named: Exception = kind(f"{role}: {cause}")
    else:
        named = _nearest(cause)(f"{role}: {_reason(cause)}")
    if place := place_of(cause):
        named.add_note(Place(place))
    return named


def told(cls: type[T]) -> type[T]:
    """The class of a role with methods that raise only what every process can read, see `_readable`."""
    methods = {name: _told(m) for name, m in vars(cls).items() if inspect.isfunction(m) and not name.startswith("_")}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return cast(type[T], type(cls.__name__, (cls,), {**named, **methods}))


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ask(*args: object, **kwargs: object) -> object:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # of any class: it is raised again, as what crosses
            raise _readable(error)  # noqa: B904 (it may be the error itself)

    @wraps(method)
    async def ask_later(*args: object, **kwargs: object) -> object:
        try:
            return await method(*args, **kwargs)
        except Exception as error:  # of any class: it is raised again, as what crosses
            raise _readable(error)  # noqa: B904 (it may be the error itself)

    return ask_later if inspect.iscoroutinefunction(method) else ask


def _readable(error: Exception) -> BaseException:
    """The first cause of an error, with a note of where it arose. Raises what tells it in text, the nearest of
    ValueError, ConnectionError and RoleFailed, where another process might not read it.
    """
    cause = first_cause(error)
    retold = _nearest(cause)(_reason(cause))
    if place := place_of(cause, theirs=True):
        retold.add_note(Place(place))
        if not isinstance(place, Place):  # an error that ends several calls has its note already
            cause.add_note(Place(place))
    ours = type(cause).__module__.partition(".")[0] in ("builtins", "roll_async")
    if not ours or not all(isinstance(arg, _PLAIN) for arg in cause.args):
        raise retold from cause
    try:
        pickle.loads(pickle.dumps(cause))
    except Exception:  # whatever a constructor or a reducer raises: it is told in text
        raise retold from cause
    return cause


def _nearest(cause: BaseException) -> type[Exception]:
    return next((kind for kind in (ValueError, ConnectionError) if isinstance(cause, kind)), RoleFailed)


def _reason(cause: BaseException) -> str:
    """Class and message in one line, also of an exception whose message cannot be formed."""
    printed = traceback.TracebackException(type(cause), cause, None)
    printed.__notes__ = None  # its place is told apart
    text = "".join(printed.format_exception_only()).removeprefix(f"{type(cause).__module__}.")
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


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
