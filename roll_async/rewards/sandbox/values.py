"""Values of a program on their way out of the sandbox. What arrives is made of plain built-in values only, so that
`==` on it is Python's own: an object of the program that says it equals everything arrives as nothing.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_FRACTION = re.compile(r"-?\d{1,4000}(?:/\d{1,4000})?", re.ASCII)
_DECIMAL = re.compile(r"-?(?:\d{1,4000}(?:\.\d{1,4000})?(?:E[+-]?\d{1,4})?|Infinity|NaN)", re.ASCII)
"""Texts whose numbers are as small as they look: 1e9999999 as a fraction costs minutes."""


def encode(value: object) -> object:
    """JSON for a value and what it holds, read past any method the program may have overridden. Self-contained: a
    remote sandbox gets its source.

        (1, {"a"})  ->  ["tuple", [1, ["set", ["a"]]]]
    """
    if value is None or value is True or value is False:  # before int, which True is, too
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()  # type: ignore[attr-defined]
    if isinstance(value, int):
        number = int.__add__(value, 0)
        # Python refuses decimal numbers of more than 4,300 digits.
        return number if number.bit_length() < 10_000 else ["int", hex(number)]
    if isinstance(value, float):
        # Hexadecimal is exact, and JSON has neither infinity nor NaN.
        return ["float", float.hex(float.__add__(value, 0.0))]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    if isinstance(value, tuple):
        return ["tuple", [encode(item) for item in tuple.__iter__(value)]]
    if isinstance(value, list):
        return ["list", [encode(item) for item in list.__iter__(value)]]
    if isinstance(value, frozenset):
        return ["set", [encode(item) for item in frozenset.__iter__(value)]]  # equal to a set in Python
    if isinstance(value, set):
        return ["set", [encode(item) for item in set.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    if kind.__module__ in ("fractions", "decimal"):
        return [kind.__name__, str(value)]
    return ["object", kind.__name__]


def decode(data: object) -> object:
    """The value again; equal to nothing else for what is no built-in value. Raises ValueError for anything else: a
    program may have written it.
    """
    try:
        return _decoded(data)
    except (TypeError, ArithmeticError, IndexError, RecursionError) as error:
        raise ValueError(f"no encoded value: {type(error).__name__}") from error


def _decoded(data: object) -> object:
    if not isinstance(data, list):
        return data
    if len(data) != 2 or not isinstance(data[0], str):
        raise ValueError(f"no encoded value: {str(data)[:80]}")
    kind, content = data
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(map(_decoded, content))
        case "list":
            return list(map(_decoded, content))
        case "set":
            return frozenset(map(_decoded, content))  # it may be an item of another set
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in content}
        case "Fraction" if _FRACTION.fullmatch(content):
            return Fraction(content)
        case "Decimal" if _DECIMAL.fullmatch(content):
            return Decimal(content)
        case "object":
            return Opaque(str(content))
    raise ValueError(f"no encoded value: {kind!r}")


class Opaque:
    """A value that is not built in. It equals itself only."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"
