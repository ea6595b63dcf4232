"""Calls across processes as typed methods: both ends take a method's name and parameters from the same Protocol.

    caller -- replica.pause(mode) --> Proxy --> Channel.invoke("pause", mode) ))) class under @served --> its target
    caller <-- value, or the error itself with its causes and the frames of the far side <-- Crossed ((( error

No Ray here: a Channel is Ray's (`ray_channel.py`), the virtual clock's, or a test's.
"""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from types import new_class
from typing import Any, Protocol, TypeVar, cast

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import Place, RoleFailed, RoleGone, StallError, first_cause, place_of

P = TypeVar("P")
T = TypeVar("T")

_LONGEST_REASON = 1500
"""Characters of an error's message that are told in one line; all of it is in the traceback."""
_MOST_CAUSES = 8
_PLAIN = (str, bytes, int, float, type(None))


class Crossed(Exception):
    """The error of a call on its way to the caller, then its causes. Pickle keeps type, arguments and notes of an error
    and drops traceback and cause: the frames travel as a note, the causes beside it.
    """

    @property
    def chain(self) -> tuple[BaseException, ...]:
        return self.args


def pack(error: BaseException) -> Crossed:
    """Copies of the error and its causes, never the error itself: one that is raised again for later calls, as that of
    a dead engine, would collect notes.
    """
    chain: list[BaseException] = []
    part: BaseException | None = first_cause(error)
    while part is not None and len(chain) < _MOST_CAUSES:
        copy = _copy(part)
        if (place := place_of(part, theirs=True)) and not any(isinstance(n, Place) for n in _notes(copy)):
            copy.add_note(Place(place))
        if part.__traceback__ is not None:  # None: a cause that crossed before, whose frames are a note already
            frames = "".join(traceback.format_tb(part.__traceback__)).rstrip()
            copy.add_note(f"Traceback in that process (most recent call last):\n{frames}")
        chain.append(copy)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return Crossed(*chain)


def unpack(crossed: Crossed) -> BaseException:
    """The error with its causes linked again."""
    for error, cause in zip(crossed.chain, crossed.chain[1:], strict=False):
        error.__cause__ = cause
    return crossed.chain[0]


def _copy(error: BaseException) -> BaseException:
    """The error as every process can read it. Classes of libraries and of users cross as text of the nearest kind: they
    may not pickle, may not unpickle, or may not be there in the other process.
    """
    try:
        return _pickled(error)
    except TypeError:
        kind = next((kind for kind in (ValueError, ConnectionError) if isinstance(error, kind)), RoleFailed)
        copy = kind(reason_of(error))
        for note in _notes(error):
            copy.add_note(note)
        return copy


def _pickled(error: BaseException) -> BaseException:
    """Raises TypeError for one that another process might not read."""
    ours = type(error).__module__.partition(".")[0] in ("builtins", "roll_async")
    if not ours or not all(isinstance(arg, _PLAIN) for arg in error.args):
        raise TypeError
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception as problem:  # whatever a constructor or a reducer raises
        raise TypeError from problem


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))  # PEP 678: an exception without notes has no such attribute


def reason_of(error: BaseException) -> str:
    """Class and message in one line, also of an exception whose message cannot be formed."""
    if type(error) is RoleFailed:  # its text names the class of what failed
        return str(error)
    printed = traceback.TracebackException(type(error), error, None)
    printed.__notes__ = None  # its place and its frames are told apart
    text = "".join(printed.format_exception_only()).removeprefix(f"{type(error).__module__}.")
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


class Channel(Protocol):
    """The way to one object in another process."""

    async def invoke(self, method: str, *args: object) -> Any:
        """The answer to a call. Raises Crossed with what the call raised, RoleGone when the process is gone."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRules:
    """What holds for all calls of one proxy."""

    role: str
    """In errors: `actor_infer-0`, `actor_train rank 3`, `rollout process`."""
    deadline_s: float | None
    """Of a call, time in the actor's queue included (fault.rpc_timeout); None = the caller owns the deadlines."""
    waits: Collection[Callable[..., object]] = ()
    """Calls without a deadline, as functions of the protocol: they wait for an event."""
    starts: Collection[Callable[..., object]] = ()
    """Calls that read what the user wrote: their ValueError is the user's to fix, with the role's name."""
    own: tuple[type[BaseException], ...] = ()
    """Errors that callers handle, raised as they are; every other one becomes the cause of a RoleFailed."""
    late: type[Exception] = StallError
    """Of a call that is not done in time. A replica that is late counts as dead: ConnectionError."""


class Proxy:
    """Base of an object in another process: every method of the Protocols among the bases of a sub-class is a call over
    the channel, unless the sub-class defines it itself.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for protocol in _protocols_of(cls):
            for name in calls_of(protocol):
                if getattr(cls, name) is getattr(protocol, name):
                    setattr(cls, name, _remote_call(getattr(protocol, name)))

    def __init__(self, channel: Channel, rules: CallRules) -> None:
        self._channel, self._rules = channel, rules
        self._waits = {method.__name__ for method in rules.waits}
        self._starts = {method.__name__ for method in rules.starts}

    async def _call(self, method: str, *args: object) -> Any:
        rules, answer = self._rules, self._channel.invoke(method, *args)
        try:
            if rules.deadline_s is None or method in self._waits:
                return await answer
            return await within(rules.deadline_s, answer, f"{rules.role}: {method} did not return (fault.rpc_timeout)")
        except StallError as error:
            raise rules.late(str(error)) from error
        except RoleGone as error:
            raise RoleGone(f"{rules.role}: process is gone ({error})") from error
        except Crossed as crossed:
            raised = unpack(crossed)
        raise self._named(method, raised)  # outside of the handler: Crossed would be told as its context

    def _named(self, method: str, error: BaseException) -> BaseException:
        """The error as the caller gets it."""
        role, starts = self._rules.role, method in self._starts
        error.add_note(f"answer of {role} to {method}")
        if isinstance(error, self._rules.own):
            return error
        # A ValueError of any other call is a fault of ours, whatever the user wrote.
        kinds = (ValueError, ConnectionError) if starts else (ConnectionError,)
        kind = next((kind for kind in kinds if isinstance(error, kind)), None)
        named = RoleFailed(f"{role}: {reason_of(error)}") if kind is None else kind(f"{role}: {error}")
        named.__cause__ = error
        if place := place_of(error):
            named.add_note(Place(place))
        return named


def remote(protocol: type[P], channel: Channel, rules: CallRules) -> P:
    """An object whose methods are those of the protocol, each one call over the channel."""
    return cast(P, _proxy_class(protocol)(channel, rules))


@cache
def _proxy_class(protocol: type) -> Callable[[Channel, CallRules], object]:
    def reduce(self: Proxy) -> tuple[Callable[..., object], tuple[object, ...]]:
        return remote, (protocol, self._channel, self._rules)  # a group of ranks travels to the rollout process

    return new_class(f"Remote{protocol.__name__}", (Proxy, protocol), exec_body=lambda n: n.update(__reduce__=reduce))


def _remote_call(method: Callable[..., object]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    async def call(self: Proxy, *args: object, **kwargs: object) -> Any:
        # TypeError here, not there. Arguments stay separate: Ray resolves references only at the top level.
        bound = signature.bind(self, *args, **kwargs)
        return await self._call(method.__name__, *bound.args[1:])

    return call


def _protocols_of(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if Protocol in base.__bases__]


def calls_of(protocol: type) -> list[str]:
    """Methods of a protocol and of those that it extends."""
    names = {
        name: method
        for base in reversed(_protocols_of(protocol))  # the protocol's own method takes the place of an inherited one
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    for name, method in names.items():
        assert inspect.iscoroutinefunction(method), (
            f"{protocol.__name__}.{name}: every call is a message, so it is async"
        )
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        assert inspect.Parameter.KEYWORD_ONLY not in kinds, f"{protocol.__name__}.{name}: arguments travel by position"
    return list(names)


def served(targets: Mapping[str, type], *, synchronous: bool = False) -> Callable[[type[T]], type[T]]:
    """Decorator of the class of a role's process: besides its own methods it has those of the protocols, answered by
    the attribute of that name. All of them raise Crossed. `synchronous`: one call at a time, on the main thread.
    """

    def decorate(cls: type[T]) -> type[T]:
        methods = {name: _crossing(m) for name, m in vars(cls).items() if inspect.isfunction(m) and name[0] != "_"}
        for attribute, protocol in targets.items():
            for name in set(calls_of(protocol)) - methods.keys():
                methods[name] = _crossing(_asked(attribute, name, synchronous=synchronous))
        named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        return cast(type[T], type(cls.__name__, (cls,), {**named, **methods}))

    return decorate


def _asked(attribute: str, name: str, *, synchronous: bool) -> Callable[..., Any]:
    def ask(self: object, *args: object) -> object:
        return getattr(getattr(self, attribute), name)(*args)

    async def ask_later(self: object, *args: object) -> object:
        return await getattr(getattr(self, attribute), name)(*args)

    method = ask if synchronous else ask_later
    method.__name__ = name
    return method


def _crossing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ask(*args: object, **kwargs: object) -> object:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # of any class: the caller gets it; cancellation and exits are Ray's to see
            raise pack(error) from None  # its frames travel in a note

    @wraps(method)
    async def ask_later(*args: object, **kwargs: object) -> object:
        try:
            return await method(*args, **kwargs)
        except Exception as error:  # see above
            raise pack(error) from None

    return ask_later if inspect.iscoroutinefunction(method) else ask
