"""Bounds of what a client may send, and JSON as the standard has it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import NoReturn

from roll_async.agents.turn_handler import BadRequest

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""Of objects, lists, numbers and texts in a body, and as many again in the arguments of its calls: what is made of them
at once, in one call that holds the interpreter, must take milliseconds.
"""
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256


def parsed(text: str) -> object:
    """A value of JSON within the bounds. Raises BadRequest."""
    try:
        # Python's reader takes NaN and Infinity, which are no JSON.
        value = json.loads(text, parse_constant=_no_json)
    # RecursionError: the reader meets deep nesting before `measure` does.
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}") from error
    measure(value)
    return value


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def measure(value: object) -> None:
    """Raises BadRequest for a value too deep, with too many parts, with a number that is not finite, or with half of a
    character.
    """
    # Level by level: a recursion would reach Python's own limit first.
    level, size = [value], 0
    for _ in range(MAX_DEPTH):
        size += len(level)
        if size > MAX_VALUES:
            raise BadRequest(f"the body has more than {MAX_VALUES} values")
        level = [part for item in level for part in _parts(item)]
        if not level:
            return
    raise BadRequest(f"the body is nested deeper than {MAX_DEPTH}")


def _parts(value: object) -> Iterator[object]:
    match value:
        case str():
            # isascii() looks at a flag; to encode every long text takes time.
            if not value.isascii():
                _check_text(value)
        case float():
            # 1e999 is JSON, and Python reads it as infinity.
            if not math.isfinite(value):
                raise BadRequest("a number is beyond the range of floating point")
        case dict():
            yield from value.keys()
            yield from value.values()
        case list():
            yield from value


def _check_text(text: str) -> None:
    try:
        # JSON can escape one half of a pair, which no tokenizer takes.
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"a text has half of a surrogate pair at character {error.start}") from error
