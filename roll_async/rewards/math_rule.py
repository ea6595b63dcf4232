"""Mathematical answers, compared by math-verify: the last boxed expression, or the last `Answer:` line, after the
thinking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from roll_async.rewards.answers import final_answer
from roll_async.rewards.verdict import Verdict

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

_MAX_ANSWER_CHARS = 2000
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\\,|\{,\}|\\!,)\d{3})+(?![\d,])")
"""Thousands: 1,234 or 1{,}234. With a list like 1,2,3 it has nothing in common."""


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d{1,100}", re.ASCII)
_MAX_EXACT_DIGITS = 14
_SURELY_DIFFERENT = Decimal("2e-6")
_NUMBER_AND_UNIT = re.compile(
    r"([-+]?\d+(?:\.\d+)?)\s{0,3}((?:[A-Za-z]{2,20}|[A-Za-z](?=/))(?:[ /.-]{1,2}[A-Za-z]{1,20}){0,4}(?:\^[23])?)\.?"
)
_NO_UNITS = frozenset(
    "hundred thousand million billion trillion dozen percent pi or and to mod sqrt sin cos tan log ln exp plus minus "
    "times over half squared cubed infinity inf degrees rad".split()
)
"""Words behind a number that change its value, or that begin another one."""


class MathRule:
    """Score 1 iff the stated answer and the reference are the same number or expression.

    The reference may be an expression, text with a box, or a GSM8K solution that ends in `#### 42`.
    """

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        stated = final_answer(text)
        if stated is None:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason="no boxed expression and no Answer: line")
        if len(stated) > _MAX_ANSWER_CHARS:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"the answer has {len(stated)} characters")
        right = same_value(stated, reference_answer(ground_truth))
        return Verdict(
            score=float(right),
            acc=float(right),
            reason="" if right else f"{stated[:80]!r} is not {ground_truth[:80]!r}",
        )


def reference_answer(ground_truth: str) -> str:
    """The expression of a reference: after `####`, in its box, or all of it."""
    if "####" in ground_truth:
        return ground_truth.rpartition("####")[2].strip()
    boxed = final_answer(ground_truth) if "\\boxed" in ground_truth else None
    return ground_truth.strip() if boxed is None else boxed


def same_value(stated: str, reference: str) -> bool:
    """math-verify's verdict on two answers as people write them."""
    stated, reference = _plain(stated), _plain(reference)
    if _NUMBER.fullmatch(reference):
        stated = _without_unit(stated)
    if stated == reference:
        return True
    decided = same_number(stated, reference)
    return same_expression(stated, reference) if decided is None else decided


def same_expression(stated: str, reference: str) -> bool:
    """math-verify, without its own time-outs: the worker pool has one for all rewards."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = _parsed_reference(reference)
    answer = parse(f"${stated}$", extraction, parsing_timeout=0)
    return bool(gold and answer and verify(list(gold), answer, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed_reference(reference: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Kept: all samples of a group have the same one. An integer needs no parser, it is what most references are."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from sympy import Integer

    if _INTEGER.fullmatch(reference):
        return Integer(int(reference)), reference
    return tuple(parse(f"${reference}$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=0))


def same_number(stated: str, reference: str) -> bool | None:
    """math-verify's verdict on two plain numbers without its parser, a thousand times as fast; None where it is not
    plain to see. It rounds to six decimals, and to 15 digits.
    """
    if not (_NUMBER.fullmatch(stated) and _NUMBER.fullmatch(reference)):
        return None
    if max(len(stated), len(reference)) > _MAX_EXACT_DIGITS:
        return None
    difference = abs(Decimal(stated) - Decimal(reference))
    return not difference if not difference or difference > _SURELY_DIFFERENT else None


def _plain(answer: str) -> str:
    """Without currency signs, thousands separators and sentence ends, which LaTeX would read as something else."""
    text = answer.strip().strip("$").replace("\\$", "").replace("$", "").strip().rstrip(".").strip()
    return _GROUPED.sub(lambda m: re.sub(r"[^\d]", "", m[0]), text)


def _without_unit(answer: str) -> str:
    """230 of `230 km/h`: math-verify knows units in LaTeX and reads these letters as variables."""
    found = _NUMBER_AND_UNIT.fullmatch(answer)
    if found is None or _NO_UNITS & set(re.findall(r"[a-z]+", found[2].lower())):
        return answer
    return found[1]
