"""When two mathematical answers are equal: math-verify's verdict on what `writing.py` makes of them, with small numbers
compared relatively. docs_roll/rewards.md has the rules by which the two differ.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from roll_async.rewards.maths.ranges import range_of
from roll_async.rewards.maths.writing import NUMBER, readings, writes_decimal_comma

if TYPE_CHECKING:
    from sympy import Basic, Expr, MatrixBase

_INTEGER = re.compile(r"[-+]?\d{1,100}", re.ASCII)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]*)\}")
_INNER_SPACE = re.compile(r"\s+(?!\d)|(?<!\d)\s+")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MIN_WORDS = 3  # of a sentence
_MAX_EXACT_DIGITS = 14  # below the 15 to which math-verify rounds
_SURELY_DIFFERENT = Decimal("2e-6")  # more than rounding to six decimals can hide
_NUMBER_AND_UNIT = re.compile(
    r"([-+]?\d+(?:\.\d+)?)\s{0,3}((?:[A-Za-z]{2,20}|[A-Za-z](?=[/\u00b2\u00b3]))(?:[ /.-]{1,2}[A-Za-z]{1,20}){0,4}"
    r"(?:\^[23]|[\u00b2\u00b3])?)\.?"
)
NO_UNITS = frozenset(
    "hundred thousand million billion trillion dozen percent pi or and to mod sqrt sin cos tan log ln exp plus minus "
    "times over half squared cubed infinity inf degrees rad".split()
)
"""Words behind a number that change its value, or that begin another one."""


def same_value(stated: str, reference: str) -> bool:
    """math-verify's verdict on two answers as people write them. The reference's form decides what a comma is."""
    decimal_comma = writes_decimal_comma(reference)
    references = readings(reference, decimal_comma)
    return any(_same(one, other) for one in readings(stated, decimal_comma) for other in references)


def without_unit(answer: str) -> str:
    """230 of `230 km/h`: math-verify knows units in LaTeX and reads these letters as variables."""
    found = _NUMBER_AND_UNIT.fullmatch(answer)
    if found is None or NO_UNITS & set(re.findall(r"[a-z]+", found[2].lower())):
        return answer
    return found[1]


def same_number(stated: str, reference: str) -> bool | None:
    """math-verify's verdict on two plain numbers without its parser, a thousand times as fast; None where it is not
    plain to see. It rounds to six decimals, and to 15 digits.
    """
    if not (NUMBER.fullmatch(stated) and NUMBER.fullmatch(reference)):
        return None
    if max(len(stated), len(reference)) > _MAX_EXACT_DIGITS:
        return None
    # Of the numbers as written, not of the floats nearest to them.
    one, other = Decimal(stated), Decimal(reference)
    difference = abs(one - other)
    if not difference:
        return True
    if difference > _SURELY_DIFFERENT or not _agree(difference, max(abs(one), abs(other))):
        return False
    return None


def same_expression(stated: str, reference: str) -> bool:
    """math-verify, without its own time-outs: the worker pool has one for all rewards."""
    from math_verify import verify

    gold, answer = _parsed_reference(reference), _parsed(stated)
    # A list is several forms of one answer to math-verify, a tuple is one of its own.
    if not (gold and answer and verify(list(gold), list(answer), timeout_seconds=None)):
        return False
    return gold[-1] == answer[-1] or _small_numbers_agree(gold[0], answer[0])


def _same(stated: str, reference: str) -> bool:
    # Beside a plain number alone: in another reference letters are a part of the value.
    if NUMBER.fullmatch(reference):
        stated = without_unit(stated)
    if stated == reference or _letters(stated) == _letters(reference):
        return True
    decided = same_number(stated, reference)
    if decided is None:
        decided = _same_range(stated, reference)
    return same_expression(stated, reference) if decided is None else decided


def _same_range(stated: str, reference: str) -> bool | None:
    """Of an inequality and another, or an interval. None where neither is one, or their variables differ."""
    one, other = range_of(stated), range_of(reference)
    if one is None or other is None or {one[1], other[1]} == {stated, reference}:
        return None
    if one[0] and other[0] and one[0] != other[0]:
        return None
    return one[1] == other[1] or same_expression(one[1], other[1])


@lru_cache(maxsize=4096)
def _parsed_reference(reference: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Kept: all samples of a group have the same one. An integer needs no parser, it is what most references are."""
    from sympy import Integer

    if _INTEGER.fullmatch(reference):
        return Integer(int(reference)), reference  # as parse() gives it: expression and text
    return _parsed(reference)


def _parsed(answer: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Expression and text of the whole answer, or of the value in a sentence. Left to itself math-verify takes the 3 of
    a formula it cannot read, as `3((`, for the answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if len(_WORDS.findall(answer)) >= _MIN_WORDS:
        return tuple(parse(f"${answer}$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=0))
    return tuple(parse(f"${answer}$", [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=0))


def _small_numbers_agree(gold: Basic | MatrixBase | str, answer: Basic | MatrixBase | str) -> bool:
    """Whether the small numbers of two answers that are equal to six decimals are equal relatively, too."""
    from sympy import Number, Tuple, default_sort_key

    if isinstance(gold, Number) and 100 * abs(gold) >= 1:  # most are, and need no evaluation
        return True
    try:
        one = _numbers(gold)
        if all(100 * abs(number) >= 1 for number, _ in one):
            return True
        other = _numbers(answer)
        if len(one) > 1 and not (isinstance(gold, Tuple) and isinstance(answer, Tuple)):
            one, other = (sorted(numbers, key=lambda number: default_sort_key(number[0])) for numbers in (one, other))
        return all(_agree_relatively(*pair) for pair in zip(one, other, strict=False))
    except Exception:  # what sympy raises for what a model writes has no limits; math-verify's verdict stands
        return True


def _numbers(value: Basic | MatrixBase | str) -> list[tuple[Expr, Expr]]:
    """Of a set, a point, an interval, a matrix or an equation the numbers, else the number itself: to 15 digits, and
    exactly. None of what holds unknowns.
    """
    from sympy import Eq, Expr, FiniteSet, Interval, MatrixBase, Tuple, Union

    if isinstance(value, Eq):
        return _numbers(value.rhs)
    if isinstance(value, MatrixBase):
        return [number for part in value.flat() for number in _numbers(part)]
    if isinstance(value, Interval):
        return _numbers(value.start) + _numbers(value.end)
    if isinstance(value, (FiniteSet, Tuple, Union)):
        return [number for part in value.args for number in _numbers(part)]
    exact = value.doit() if isinstance(value, Expr) else None
    return [(exact.evalf(), exact)] if exact is not None and exact.is_number else []


def _agree_relatively(one: tuple[Expr, Expr], other: tuple[Expr, Expr]) -> bool:
    from sympy import simplify

    larger = max(abs(one[0]), abs(other[0]))
    return _agree(abs(one[0] - other[0]), larger) or simplify(one[1] - other[1]).is_zero is True


def _agree(difference: Decimal | Expr, larger: Decimal | Expr) -> bool:
    """Whether two numbers, of which this is the larger one, differ by no more than rounding.

    Six decimals hide much of a small number: below 0.01 it must agree to 1 %, below a millionth to six digits. In
    integers, which multiply decimals and sympy's numbers alike.
    """
    if 100 * larger >= 1:
        return True
    return difference * (500_000 if 1_000_000 * larger < 1 else 100) <= larger


def _letters(answer: str) -> str:
    """Without boxes of text, and spaces other than between digits: `5:00 \\text{ PM}` is `5:00 PM`."""
    return _INNER_SPACE.sub("", _TEXT.sub(r"\1", answer))
