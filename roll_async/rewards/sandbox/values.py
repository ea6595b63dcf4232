"""Values of a program on their way out of the sandbox. What arrives is made of plain built-in values only, so that
`==` on it is Python's own: an object of the program that says it equals everything arrives as nothing.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction


def encode(value: object) -> object:
    """JSON for a value and what it holds, read past any method the program may have overridden. Self-contained: a
    remote sandbox gets its source.

        (1, {"a"})  ->  ["tuple", [1, ["set", ["a"]]]]
    """
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()  # type: ignore[attr-defined]
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, float):
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
        return ["set", [encode(item) for item in frozenset.__iter__(value)]]
    if isinstance(value, set):
        return ["set", [encode(item) for item in set.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    if kind.__module__ in ("fractions", "decimal"):
        return [kind.__name__, str(value)]
    return ["object", kind.__name__]


def decode(data: object) -> object:
    """The value again; equal to nothing else for what is no built-in value. Raises ValueError for other JSON."""
    if not isinstance(data, list):
        return data
    if len(data) != 2 or not isinstance(data[0], str):
        raise ValueError(f"no encoded value: {str(data)[:80]}")
    kind, content = data
    match kind:
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(map(decode, content))
        case "list":
            return list(map(decode, content))
        case "set":
            return frozenset(map(decode, content))
        case "dict":
            return {decode(key): decode(item) for key, item in content}
        case "Fraction":
            return Fraction(content)
        case "Decimal":
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
