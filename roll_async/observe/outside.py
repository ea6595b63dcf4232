"""What others say and do: models, tools, worlds, task sources, agents, callbacks. It may be of any type and size.

    what they say --text_of, plain, number--> text that can be encoded, JSON, finite numbers: once, where it comes in
    what they raise --border--> OutsideError: type, message, place
    what they are asked --asked--> the border, and a deadline
    what they start as a task --_guarded--> its SystemExit is an error of theirs, too

`border` is the only place that catches everything; whoever uses it says what ends then: a call, a trajectory, a group.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_TEXT = 4 << 20
"""Characters; the context of the largest models holds fewer."""
LARGEST = 1e15
"""Of a reward or a metric: squares of such numbers still are numbers in float32."""
_GRACE_S = 10.0
"""For what was cancelled to clean up, such as to end its processes."""
_DEEPEST = 64
_LARGEST_BITS = 4096
"""Of an integer, 1,233 digits: Python refuses to write one of 4,301."""
_LONGEST_REASON = 500
_LIBRARY = str(Path(sysconfig.get_path("stdlib")))


class OutsideError(Exception):
    """Code of others failed, or what it said cannot be used. No RuntimeError: contextlib takes one whose cause is a
    StopIteration for that itself.
    """

    def __init__(self, said: str, place: str = "") -> None:
        """`said`: type and message; `place`: file, line and function."""
        super().__init__(f"{said} [{place}]" if place else said)
        self.said = said


@contextmanager
def border(*passing: type[BaseException]) -> Iterator[None]:
    """Whatever is raised inside becomes an OutsideError, whose cause it is. `passing` goes through, and what was asked
    for from this side: a cancellation of this task, and Ctrl-C.
    """
    token = _outside.set(True)
    _guard_tasks()
    try:
        yield
    except passing:
        raise
    except BaseException as error:  # also SystemExit, and a cancellation of their own: they end nothing of ours
        if _is_asked(error):
            raise
        name, text = type(error).__name__, message_of(error)
        raise OutsideError(f"{name}: {text}" if text else name, place_of(error)) from error
    finally:
        with suppress(ValueError):  # closed by another task, whose own this is not
            _outside.reset(token)


_outside: ContextVar[bool] = ContextVar("outside", default=False)
"""Whether code of others runs here, or in the task that started this one."""


def _guard_tasks() -> None:
    """asyncio raises the SystemExit of a task out of the event loop, past every border: a model's program that says
    `exit()` in a task of a tool would end the run.
    """
    with suppress(RuntimeError):  # no loop runs in this thread
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            loop.set_task_factory(_task)


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_guarded(work) if _outside.get() else work, loop=loop, **options)


async def _guarded(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except SystemExit as error:
        raise OutsideError(f"SystemExit: {error}", place_of(error)) from error


async def asked(
    start: Callable[[], object], read: Callable[[object], T], seconds: float, *passing: type[BaseException]
) -> T:
    """`read` of what code of others gives: `start()`, or what it awaits. Raises OutsideError as `border` does,
    TimeoutError after `seconds`, also when the code ignores that it is cancelled: it is closed then.
    """
    with border(*passing):
        found = start()
        if not inspect.isawaitable(found):
            return read(found)

    async def awaited() -> T:
        with border(*passing):
            return read(await found)

    work = awaited()
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may be left who asks for it
    try:
        await asyncio.wait({task}, timeout=seconds if seconds < math.inf else None)
    finally:
        late = not task.done()
        if late and not task.get_loop().is_closed():  # else this is the end of a loop that was broken off
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=_GRACE_S)
            finally:  # also where this task is cancelled again: the end of the event loop would wait for it for ever
                if not task.done():
                    with suppress(RuntimeError):  # of a coroutine that goes on awaiting when it is closed
                        work.close()
                    task.cancel()
    if late:
        raise TimeoutError
    return task.result()


def _is_asked(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, GeneratorExit)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop: nobody cancels it
        return False
    return task is not None and task.cancelling() > 0


def message_of(error: BaseException) -> str:
    """The beginning of its text, also of an error that cannot make its own."""
    return encodable(str(traceback.TracebackException(type(error), error, None))[:_LONGEST_REASON])


def place_of(error: BaseException) -> str:
    """`worlds/maze.py:12, in step`: the innermost frame that is not of Python's own library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_python(frame.filename)]
    return (
        f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    )


def _is_of_python(file: str) -> bool:
    # `<frozen importlib._bootstrap>`, `<string>`.
    return file.startswith("<") or file.startswith(_LIBRARY) and "site-packages" not in file


def encodable(text: str) -> str:
    """Halves of characters are replaced (lone surrogates, half an emoji in JSON): no tokenizer or file takes them."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of(value: object, longest: int = LONGEST_TEXT) -> str:
    """At most `longest` characters of a text; bytes are read as UTF-8, lists and objects written as JSON, other values
    as they print. Raises TypeError for None.
    """
    match value:
        case None:
            raise TypeError("expected text, got None")
        case str():
            text = value
        case bytes() | bytearray():
            text = value[: 4 * longest].decode(errors="replace")  # a character has 4 bytes at most
        case Mapping() | list() | tuple():
            text = json.dumps(plain(value), ensure_ascii=False)
        case _:
            text = str(value)
    return encodable(text[:longest])


def plain(value: object, depth: int = 0) -> object:
    """A value as JSON: what is neither text, a finite number, a list nor an object becomes its text. Raises ValueError
    for one that is nested too deep, and for an integer of more than a thousand digits.
    """
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    match value:
        case None | bool():  # before the numbers: a bool is an Integral
            return value
        case str():
            return encodable(value)
        case Integral():
            if int(value).bit_length() > _LARGEST_BITS:
                raise ValueError(f"an integer of {int(value).bit_length()} bits")
            return int(value)
        case Real() if math.isfinite(value):
            return float(value)
        case Mapping():
            return {encodable(str(key)): plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
    return encodable(str(value))


def number(value: object, name: str) -> float:
    """A finite number, at most LARGEST in size. Raises ValueError for anything else."""
    try:
        # `float` would take the text of a number for one.
        found = math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= LARGEST:  # written so that NaN fails, too
        raise ValueError(
            f"{name} is {found if isinstance(value, float) else repr(value)[:50]}, no finite number to use"
        )
    return found
