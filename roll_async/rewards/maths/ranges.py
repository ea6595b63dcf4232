r"""Inequalities of one variable as the sets they are: `1 \le x < 2` is `[1,2)`, `x < 1 or x > 3` is
`(-\infty,1)\cup(3,\infty)`. Text to text: math-verify reads the sets.
"""

from __future__ import annotations

import re
from decimal import Decimal

from roll_async.rewards.maths.numerals import NUMERAL, decimal_of

_MAX_CHARS, _MAX_PARTS = 300, 12
_RELATION = re.compile(
    r"\s*(<=|>=|!=|[<>\u2264\u2265\u2260\u2208]|\\(?:leqslant|geqslant|leq|geq|neq|le|ge|lt|gt|ne|in)(?![A-Za-z])|=)\s*"
)
_SIGNS = {
    "lt": "<", "gt": ">", "\u2260": "!=", "ne": "!=", "neq": "!=", "\u2208": "in", "\u2264": "<=", "le": "<=",
    "leq": "<=", "leqslant": "<=", "\u2265": ">=", "ge": ">=", "geq": ">=", "geqslant": ">=",
}  # fmt: skip
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!=", "=": "="}
_VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|omega|phi|varphi)")
_OR = re.compile(
    r"\\text\s?\{\s*,?\s*or\s*,?\s*\}|(?<![A-Za-z\\]),?\s?or(?![A-Za-z])|\\(?:lor|vee|cup)(?![A-Za-z])|\u222a"
)
_AND = re.compile(r"\\text\s?\{\s*,?\s*and\s*,?\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z])\s*(?:(?:\\in|\u2208)\s*(?:\\mathbb\s?\{?R\}?|\u211d)\s*)?(?:\\mid|:|\|)(.*)\\\}"
)
_INTERVAL = re.compile(r"([(\[\]])([^()\[\],;]{1,80})[,;]([^()\[\],;]{1,80})([)\]\[])")
_REALS = r"(?:\\mathbb\s?\{?\s?R\s?\}?|\\R(?![A-Za-z])|\u211d)"
_ALL_BUT_ONE = re.compile(rf"{_REALS}(?:\s*(?:\\setminus|\\backslash|-)\s*\\\{{([^{{}},;]{{1,80}})\\\}})?")
_NUMERAL = re.compile(rf"([-+]?)({NUMERAL})", re.ASCII)
_DECIMAL = re.compile(r"[-+]?\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_BELOW, _ABOVE = r"(-\infty,", r",\infty)"


def range_of(answer: str) -> tuple[str, str] | None:
    r"""(variable, set) of an inequality, an interval or a union of them, `("x", "(3,\infty)")` of `x > 3`; no variable,
    "", in an interval. None for anything else.
    """
    if len(answer) > _MAX_CHARS:
        return None
    text = re.sub(r"\\(?:left|right)(?![a-z])\s?|\$|\\[()]|\+(?=\\infty)", "", answer).strip()
    builder = _BUILDER.fullmatch(text)
    variable, text = builder.groups() if builder else ("", text)
    parts, sets = _OR.split(text), []
    if len(parts) > _MAX_PARTS:
        return None
    for part in parts:
        found = _all_of(part.strip(" ,"), variable)
        if found is None or (found[0] and variable and found[0] != variable):
            return None
        variable = found[0] or variable
        sets.append(found[1])
    # `x = 1 or x = 2` is no range: math-verify knows equations.
    return None if all(one.startswith(r"\{") for one in sets) else (variable, r"\cup".join(sets))


def _all_of(text: str, variable: str) -> tuple[str, str] | None:
    """Of one inequality, or of two that hold at once, joined by `and` or a comma."""
    whole = _relation(text, variable)
    if whole is not None:
        return whole
    halves = _AND.split(text)
    by_comma = len(halves) == 1
    found = [_relation(half.strip(" ,"), variable) for half in (text.split(",") if by_comma else halves)]
    if len(found) != 2 or found[0] is None or found[1] is None or found[0][0] != found[1][0]:
        return None
    below, above = sorted((found[0][1], found[1][1]), key=lambda half_line: not half_line.startswith(_BELOW))
    if not (below.startswith(_BELOW) and above.endswith(_ABOVE)) or _BELOW + "\\infty)" in (below, above):
        return None
    high, low = below.removeprefix(_BELOW), above.removesuffix(_ABOVE)
    if by_comma:  # `x > 1, x < 2` holds between them, `x < 1, x > 2` is two answers
        if not (_DECIMAL.fullmatch(high[:-1]) and _DECIMAL.fullmatch(low[1:])):
            return None
        if Decimal(high[:-1]) < Decimal(low[1:]):
            return found[0][0], rf"{below}\cup{above}"
    return found[0][0], f"{low},{high}"


def _relation(text: str, variable: str) -> tuple[str, str] | None:
    """Of one inequality, perhaps with two signs, or one interval."""
    pieces = _RELATION.split(text)
    signs = [_SIGNS.get(name, name) for name in (sign.lstrip("\\") for sign in pieces[1::2])]
    values = [_decimal(piece.strip()) for piece in pieces[::2]]
    if not signs:
        interval = _interval(values[0])
        return None if interval is None else ("", interval)
    if not all(values) or len(signs) > 2:
        return None
    if signs == ["in"]:
        interval = _interval(values[1])
        return None if interval is None or not _VARIABLE.fullmatch(values[0]) else (values[0], interval)
    if any("," in value or ";" in value for value in values) or "in" in signs:
        return None
    if len(signs) == 2:
        return _between(values, signs)
    left, right, sign = *values, signs[0]
    if not _VARIABLE.fullmatch(left) or right == variable:
        left, right, sign = right, left, _FLIPPED[sign]
    if not _VARIABLE.fullmatch(left) or left in _VARIABLE.findall(re.sub(r"\\[A-Za-z]+", "", right)):
        return None
    return left, _half_line(right, sign)


def _half_line(value: str, sign: str) -> str:
    if sign in ("<", "<="):
        return f"{_BELOW}{value}{')' if sign == '<' else ']'}"
    if sign in (">", ">="):
        return f"{'(' if sign == '>' else '['}{value}{_ABOVE}"
    return rf"{_BELOW}{value})\cup({value}{_ABOVE}" if sign == "!=" else rf"\{{{value}\}}"


def _between(values: list[str], signs: list[str]) -> tuple[str, str] | None:
    """Of `1 < x < 2`, or `2 > x > 1`."""
    if signs[0] in (">", ">="):
        values, signs = values[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
    (low, variable, high), (first, second) = values, signs
    if not _VARIABLE.fullmatch(variable) or first not in ("<", "<=") or second not in ("<", "<="):
        return None
    return variable, f"{'(' if first == '<' else '['}{low},{high}{')' if second == '<' else ']'}"


def _interval(text: str) -> str | None:
    all_but_one = _ALL_BUT_ONE.fullmatch(text)
    if all_but_one:
        return _half_line(all_but_one[1], "!=") if all_but_one[1] else rf"{_BELOW}\infty)"
    found = _INTERVAL.fullmatch(text)
    if found is None:
        return None
    left, low, high, right = found.groups()
    # ]1,2[ is the open interval in other countries.
    return f"{'(' if left == ']' else left}{low.strip()},{high.strip()}{')' if right == '[' else right}"


def _decimal(value: str) -> str:
    number = _NUMERAL.fullmatch(value)
    return number[1] + (decimal_of(number[2]) or number[2]) if number else value
