r"""Inequalities of one variable as the sets they are: `1 \le x < 2` is `[1,2)`, `x < 1 or x > 3` is
`(-\infty,1)\cup(3,\infty)`. Text to text: math-verify reads the sets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

MAX_CHARS = 300
_MAX_PARTS = 12
_RELATION = re.compile(
    r"\s*(<=|>=|!=|[<>\u2264\u2265\u2260\u2208]|\\(?:leqslant|geqslant|leq|geq|neq|le|ge|lt|gt|ne|in)(?![A-Za-z])|=)\s*"
)
_SIGNS = {
    "<": "<", "lt": "<", ">": ">", "gt": ">", "!=": "!", "\u2260": "!", "ne": "!", "neq": "!", "=": "=", "in": "in",
    "\u2208": "in", "<=": "<=", "\u2264": "<=", "le": "<=", "leq": "<=", "leqslant": "<=", ">=": ">=", "\u2265": ">=",
    "ge": ">=", "geq": ">=", "geqslant": ">=",
}  # fmt: skip
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!": "!", "=": "="}
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|omega|phi|varphi)")
_OR = re.compile(r"\\text\s?\{\s*,?\s*or\s*,?\s*\}|(?<![A-Za-z\\]),?\s?or(?![A-Za-z])|\\(?:lor|vee|cup)(?![A-Za-z])|\u222a")
_AND = re.compile(r"\\text\s?\{\s*,?\s*and\s*,?\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_BUILDER = re.compile(
    r"\\(?:l?brace|\{)\s*([A-Za-z])\s*(?:(?:\\in|\u2208)\s*(?:\\mathbb\s?\{?R\}?|\u211d)\s*)?(?:\\mid|:|\|)(.*)\\(?:r?brace|\})"
)
_INTERVAL = re.compile(r"([(\[\]])([^()\[\],;]{1,80})[,;]([^()\[\],;]{1,80})([)\]\[])")
_REALS = re.compile(r"\\mathbb\s?\{?\s?R\s?\}?|\\R(?![A-Za-z])|\u211d|\\Reals?|all real numbers", re.IGNORECASE)
_DECIMAL = re.compile(r"[-+]?\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_LOWEST, _HIGHEST = r"-\infty", r"\infty"


class Interval(NamedTuple):
    """`[1,2)`: brackets and ends as they are written."""

    left: str
    low: str
    high: str
    right: str

    def __str__(self) -> str:
        return f"{self.left}{self.low},{self.high}{self.right}"


@dataclass(frozen=True, slots=True)
class Range:
    """A set of numbers, and the variable in whose inequalities it was written."""

    variable: str | None
    text: str


def range_of(answer: str) -> Range | None:
    r"""The set that an inequality, an interval or a union of them is; None for anything else.

    Raises nothing: `x < y` with two unknowns is the set of x below y, and a text without a value is no inequality.
    """
    if len(answer) > MAX_CHARS:
        return None
    text = re.sub(r"\\(?:left|right)(?![a-z])\s?|\$|\\[()]", "", answer).replace("\u221e", _HIGHEST).strip()
    text = text.replace(r"+\infty", _HIGHEST).replace(r"\{,\}", "{,}")
    builder = _BUILDER.fullmatch(text)
    text = builder[2] if builder else text
    parts = _OR.split(text)
    if len(parts) > _MAX_PARTS:
        return None
    variable, sets = builder[1] if builder else None, []
    for part in parts:
        found = _all_of(part.strip(" ,"), variable)
        if found is None:
            return None
        variable = found.variable or variable
        sets.append(found.text)
    return Range(variable, r"\cup".join(sets))


def _all_of(text: str, variable: str | None) -> Range | None:
    """Of what holds at once, joined by `and` or a comma."""
    whole = _relation(text, variable)
    if whole is not None:
        return whole
    parts = _AND.split(text)
    by_comma = len(parts) == 1
    parts = text.split(",") if by_comma else parts
    found = [_relation(part.strip(" ,"), variable) for part in parts]
    if len(found) != 2 or None in found:
        return None
    one, other = (item for item in found if item is not None)
    first, second = _INTERVAL.fullmatch(one.text), _INTERVAL.fullmatch(other.text)
    if not first or not second or one.variable != other.variable or one.variable is None:
        return None
    return _both(Interval(*first.groups()), Interval(*second.groups()), one.variable, by_comma)


def _both(one: Interval, other: Interval, variable: str, by_comma: bool) -> Range | None:
    """`x > 1` and `x < 2` is `(1,2)`. With a comma, `x < 1, x > 2` is two answers."""
    below, above = (one, other) if one.low == _LOWEST else (other, one)
    if below.low != _LOWEST or above.high != _HIGHEST or _HIGHEST == below.high or _LOWEST == above.low:
        return None
    if by_comma:
        if not (_DECIMAL.fullmatch(below.high) and _DECIMAL.fullmatch(above.low)):
            return None
        if Decimal(below.high) < Decimal(above.low):
            return Range(variable, rf"{below}\cup{above}")
    return Range(variable, str(Interval(above.left, above.low, below.high, below.right)))


def _relation(text: str, variable: str | None) -> Range | None:
    """Of one inequality, perhaps with two signs, or one interval."""
    pieces = [piece.strip() for piece in _RELATION.split(text)]
    if len(pieces) == 1:
        return _interval(text)
    signs = [_SIGNS[sign.lstrip("\\")] for sign in pieces[1::2]]
    values = pieces[::2]
    if not all(values):
        return None
    if len(signs) == 2 and _VARIABLE.fullmatch(values[1]):
        return _between(values, signs)
    if len(signs) != 1:
        return None
    (left, right), sign = values, signs[0]
    if sign == "in":
        inner = _interval(right) if _VARIABLE.fullmatch(left) else None
        return Range(left, inner.text) if inner else None
    if not _VARIABLE.fullmatch(left) or (variable is not None and right == variable):
        left, right, sign = right, left, _FLIPPED[sign]
    if not _VARIABLE.fullmatch(left) or left in re.findall(_VARIABLE, re.sub(r"\\[A-Za-z]+", "", right)):
        return None
    return None if "," in right or ";" in right else Range(left, _half_line(right, sign))


def _half_line(value: str, sign: str) -> str:
    if sign in ("<", "<="):
        return str(Interval("(", _LOWEST, value, ")" if sign == "<" else "]"))
    if sign in (">", ">="):
        return str(Interval("(" if sign == ">" else "[", value, _HIGHEST, ")"))
    return rf"({_LOWEST},{value})\cup({value},{_HIGHEST})" if sign == "!" else rf"\{{{value}\}}"


def _between(values: list[str], signs: list[str]) -> Range | None:
    low, variable, high = values
    first, second = signs
    if first in (">", ">=") and second in (">", ">="):
        low, high, first, second = high, low, _FLIPPED[second], _FLIPPED[first]
    if first not in ("<", "<=") or second not in ("<", "<=") or "," in low + high:
        return None
    left, right = "(" if first == "<" else "[", ")" if second == "<" else "]"
    return Range(variable, str(Interval(left, low, high, right)))


def _interval(text: str) -> Range | None:
    if _REALS.fullmatch(text):
        return Range(None, str(Interval("(", _LOWEST, _HIGHEST, ")")))
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return None
    left, low, high, right = found.groups()
    # ]1,2[ is the open interval in other countries.
    return Range(None, str(Interval("(" if left == "]" else left, low.strip(), high.strip(), ")" if right == "[" else right)))
