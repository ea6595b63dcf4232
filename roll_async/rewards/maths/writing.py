"""An answer as people write it, in the LaTeX that math-verify reads: currency signs, sentence ends and hedges away,
numbers joined, what is typed in place of LaTeX as LaTeX.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from functools import lru_cache

from roll_async.rewards.maths.numerals import (
    NUMERAL,
    decimal_of,
    has_decimal_comma,
    join_numerals,
    may_be_list,
    power_of_ten,
)

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_UNIT = r"(?:\s?\\?%|(?:\\[A-Za-z ,!;:]|[A-Za-z\s/.{}()~\u00b0\u00b2\u00b3-]|\^\{?(?:\\circ|[23])\}?)*)"
_WHOLE = re.compile(rf"((?:[A-Za-z]\s?=\s?)?[-+]?\s?)({NUMERAL})({_UNIT})", re.ASCII)
"""One number, 1,234 or 0,5, perhaps with a unit: its marks are no list's."""
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"\s{{0,3}}({'|'.join(_SCALES)})((?![A-Za-z]).*)")
_HEDGE = re.compile(
    r"(?:(?:therefore|thus|hence|then|approximately|about|roughly|around|exactly|simply|just|only"
    r"|(?:the\s)?(?:final\s)?answer(?:\sis)?\s?[:=]?(?!\s{1,3}[A-Za-z]{2,}\s))\s{1,3}"
    r"|(?:\\approx|\\simeq|[=\u2248])\s{0,3}){1,3}",
    re.IGNORECASE,
)
"""In front of a value that is the same without it."""
_MIXED = re.compile(r"([-+]?)(\d{1,6})\s([1-9]\d{0,3})/(\d{1,4})", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z]\s?=\s?)?(.*)", re.DOTALL)
_CURRENCY = "\u20ac\u00a3\u00a5\u20b9"
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074-\u207b"
_KEYBOARD = (
    (re.compile(r"[\u2212\ufe63\uff0d]|^[\u2013\u2010\u2011](?=\s?[\d.\\])"), lambda m: "-"),
    (re.compile(r"\u221a\s?(?:(?=\()|(\d{1,20}|[a-z]))"), lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt"),
    (re.compile(r"[\u00bc-\u00be\u2153-\u215e]"), lambda m: _vulgar(m[0])),
    (
        re.compile(rf"(?<!\dm)(?<![\scdk]m)[{_SUPERSCRIPTS}]+"),
        lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace(chr(0x2212), '-')}}}",
    ),
    (re.compile(r"(?<=[\w)}])\s?\*\*\s?(?:(\d{1,6})|(?=[a-z({-]))"), lambda m: f"^{{{m[1]}}}" if m[1] else "^"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), lambda m: r"\pi "),
    (re.compile(r"\u221e"), lambda m: r"\infty "),
    (re.compile(r"\u00b0|\\degrees?(?![A-Za-z])"), lambda m: r"^\circ "),
    (re.compile(r"\u2205|\\varnothing(?![A-Za-z])"), lambda m: r"\emptyset "),
    (re.compile(r"\\(?:mathrm|text|mathbf|operatorname)\s?\{\s?([ei])\s?\}"), lambda m: f" {m[1]}"),
    (
        re.compile(r"\\text\s?\{([^{}]*(?<![A-Za-z])(?:thousand|million|billion|trillion|dozen|more|less)[^{}]*)\}"),
        lambda m: f" {m[1]} ",
    ),
)
"""Roots, fractions, powers and pi as people type them. Of boxes of text, what changes the value: math-verify takes
those for units.
"""
_OPENS = re.compile(r"((?<![A-Za-z])\\?(?:sqrt|cbrt)|\\[dtc]?frac|\^)(?:\s?\[[^\[\]]{1,20}\])?\s?(?:\\left)?(?=\()")
_BRACKETS = re.compile(r"(?:\\(?:left|right))?[()]")
_NEXT_ARGUMENT = re.compile(r"\s?(?:\\left)?(?=\()")
_ROOTS = re.compile(r"(?<![A-Za-z\\])\\?(sqrt|cbrt)\s?(\[[^\[\]]{1,20}\])?\s?\{")


@lru_cache(maxsize=4096)
def readings(answer: str, decimal_comma: bool = False) -> tuple[str, ...]:
    """What the answer may say, in LaTeX: mostly one text; two for `1,2`, which is 1.2 or a list.

    `decimal_comma` decides `1,234`: 1.234 with it, else 1234. Kept: all samples of a group have the same reference.
    """
    text = _bare(answer)
    if NUMBER.fullmatch(text):
        return (text,)
    for pattern, latex in _KEYBOARD:
        text = pattern.sub(latex, text)
    text = text.strip()
    name, value = _ASSIGNED.fullmatch(text).groups(default="")  # pyright: ignore[reportOptionalMemberAccess]
    whole = _WHOLE.fullmatch(text)
    number = decimal_of(whole[2], decimal_comma) if whole else None
    if whole and number is not None and not _MIXED.fullmatch(text):
        scaled = _SCALED.fullmatch(whole[3])
        joined = whole[1] + (f"{_SCALES[scaled[1]] * Decimal(number):f}{scaled[2]}" if scaled else number + whole[3])
        return (joined, text) if may_be_list(whole[2]) and not whole[3].strip() else (joined,)
    power = power_of_ten(join_numerals(value))
    if power is not None:  # in LaTeX the e of 1e5 is Euler's number
        return (name + power,)
    text = _MIXED.sub(r"\1\2\\frac{\3}{\4}", text) if _MIXED.fullmatch(text) else text
    return (_braced(join_numerals(text, decimal_comma)),)


def plain(answer: str) -> str:
    """The likelier one of the readings."""
    return readings(answer)[0]


def writes_decimal_comma(reference: str) -> bool:
    """Whether its commas begin decimals: `0,111`, `12,5`, `1.234,5`, not `1,234` nor `1,2,3`."""
    whole = _WHOLE.fullmatch(_bare(reference))
    return whole is not None and has_decimal_comma(whole[2])


def _bare(answer: str) -> str:
    text = answer.strip().strip("$").replace("\\$", "").replace("$", "").strip(" \t\n*`").rstrip(".").strip()
    if NUMBER.fullmatch(text):
        return text
    text = " ".join(text.split())
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf|mathbf)\s?\{\s*([-+]?[\d.,]+[^{}\\]*)\}", text)
    text = inner[1].strip() if inner else text
    hedge = _HEDGE.match(text)
    text = text[hedge.end() :] if hedge else text
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(opening).removesuffix(closing).strip()
    return text.strip(_CURRENCY + " ")


def _braced(text: str) -> str:
    r"""\sqrt{2} of `\sqrt(2)`, `2^{(1+2)/3}` of `2^((1+2)/3)`: arguments in parentheses, inner ones too. One pass."""
    heads = {head.end(): head[1] for head in _OPENS.finditer(text)}
    if not heads:
        return text
    edits, opened = [], []
    for bracket in _BRACKETS.finditer(text):
        if bracket[0][-1] == "(":
            opened.append((bracket, heads.get(bracket.end() - 1)))
        elif opened:
            opening, head = opened.pop()
            if head is None:
                continue
            edits += [(opening.span(), "{"), (bracket.span(), "}")]
            following = _NEXT_ARGUMENT.match(text, bracket.end())
            if following and head.endswith("frac"):
                heads[following.end()] = "denominator"
    for (start, end), brace in sorted(edits, reverse=True):
        text = text[:start] + brace + text[end:]
    return _ROOTS.sub(lambda m: r"\sqrt[3]{" if m[1] == "cbrt" else rf"\{m[1]}{m[2] or ''}{{", text)


def _vulgar(character: str) -> str:
    """LaTeX of the one character for a half."""
    top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"
