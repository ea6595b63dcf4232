"""Ray's failures in the words of this project."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

T = TypeVar("T")


class RoleFailed(RuntimeError):
    """A role process raised or died; the run ends with exit code 3."""


async def call(role: str, awaitable: Awaitable[T], *, own: tuple[type[BaseException], ...] = ()) -> T:
    """Await a remote call. A dead process is a ConnectionError, a failed call raises the role's own error named by
    role; those of the types `own` as they are.
    """
    try:
        return await awaitable
    except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
        raise ConnectionError(f"{role}: process is gone ({_last_line(error)})") from error
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
