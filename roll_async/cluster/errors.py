"""Failures of Ray calls as this project's errors.

    role process: method raises X -- @told --> X, or what tells X in text -- Ray --> call() in the driver: RoleFailed

An exception crosses as it is only if every process can read it. Classes of libraries and of users cross as text,
because they may not pickle, may not unpickle, or may not be there in the other process.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar, cast

from ray.exceptions import RayError, RayTaskError

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import Place, RoleFailed, RoleGone, first_cause, place_of
from roll_async.cluster.ray_channel import GONE, last_line
from roll_async.cluster.remote import reason_of
from roll_async.weight_sync.errors import EngineDead, UpdateFailed

T = TypeVar("T")

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
    except GONE as error:
        raise RoleGone(f"{role}: process is gone ({last_line(error)})") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, own):
            raise cause from error
        raise _of_role(role, cause) from error
    except RayError as error:  # Ray could not run the call, or could not read its result
        raise RoleFailed(f"{role}: {what}: {type(error).__name__}: {last_line(error)}") from error


def _of_role(role: str, cause: BaseException) -> Exception:
    """The error of a role with the role's name, and the place where it arose there."""
    kind = type(cause)
    if kind in (ValueError, ConnectionError, EngineDead, UpdateFailed, RoleFailed, RoleGone):
        named: Exception = kind(f"{role}: {cause}")
    else:
        named = _nearest(cause)(f"{role}: {reason_of(cause)}")
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
    retold = _nearest(cause)(reason_of(cause))
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
