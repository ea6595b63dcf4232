"""Mathematical answers: `answers.py` extracts the answer, it is normalised, math-verify compares. docs_roll/rewards.md
has the rules by which the two differ.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

from roll_async.rewards.answers import (
    Stated,
    check_answer_format,
    format_of,
    joined_boxes,
    split_parts,
    stated_answer,
)
from roll_async.rewards.verdict import Verdict, no_answer

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

_MAX_ANSWER_CHARS = 2000
_SEPARATOR = r"(?:,|\\,|\{,\}|\\!,|,\\!|\\ )"
_WHOLE_GROUPED = re.compile(
    rf"((?:[A-Za-z]\s?=\s?)?[-+]?\s?)(\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+)(?![\d,])"
    r"((?:\.\d+)?\s?(?:\\?%|(?:\\[A-Za-z ,!;]|[A-Za-z\s/.{}()-]|\^\{?(?:\\circ|[23])\}?)*))"
)
"""Thousands, 1,234 or 1{,}234, where the whole answer is this one number, perhaps with a unit."""
_EXPLICIT_GROUPED = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?:\{,\}|\\!,|,\\!)\d{3})+(?!\d)|(?<=[a-z}]\{)\d{1,3}(?:,\d{3})+(?=(?:\.\d+)?\})"
)
"""1{,}234 and the 1,234 of \\sqrt{1,234} are one number wherever they stand: nobody writes a list so."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d{1,100}", re.ASCII)
_HEDGE = re.compile(
    r"(?:(?:therefore|thus|hence|then|approximately|about|roughly|around|exactly|simply|just|only)\s{1,3}"
    r"|(?:\\approx|\\simeq|\u2248)\s{0,3}){1,3}",
    re.IGNORECASE,
)
"""In front of a value that is the same without it."""
_MIXED = re.compile(r"([-+]?)(\d{1,6})\s(\d{1,4})/(\d{1,4})", re.ASCII)
_SCIENTIFIC = re.compile(r"[-+]?\d{1,20}(?:\.\d{1,20})?[eE][-+]?\d{1,2}", re.ASCII)
_CURRENCY = "\u20ac\u00a3\u00a5\u20b9"
_KEYBOARD = (
    (re.compile(r"\u221a\s?(?:\(([^()]{1,100})\)|(\d{1,20}|[a-z]))"), lambda m: rf"\sqrt{{{m[1] or m[2]}}}"),
    (re.compile(r"[\u00bc-\u00be\u2153-\u215e]"), lambda m: _vulgar(m[0])),
    (re.compile(r"(?<=[\w)}])\s?\*\*\s?(?:(\d{1,6})|(?=[a-z({-]))"), lambda m: f"^{{{m[1]}}}" if m[1] else "^"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), lambda m: r"\pi "),
)
"""Roots, fractions, powers and pi as people type them."""
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]*)\}")
_INNER_SPACE = re.compile(r"\s+(?!\d)|(?<!\d)\s+")
_MAX_EXACT_DIGITS = 14  # below the 15 to which math-verify rounds
_SURELY_DIFFERENT = Decimal("2e-6")  # more than rounding to six decimals can hide
_NUMBER_AND_UNIT = re.compile(
    r"([-+]?\d+(?:\.\d+)?)\s{0,3}((?:[A-Za-z]{2,20}|[A-Za-z](?=/))(?:[ /.-]{1,2}[A-Za-z]{1,20}){0,4}(?:\^[23])?)\.?"
)
_NO_UNITS = frozenset(
    "hundred thousand million billion trillion dozen percent pi or and to mod sqrt sin cos tan log ln exp plus minus "
    "times over half squared cubed infinity inf degrees rad".split()
)
"""Words behind a number that change its value, or that begin another one."""
_PROSE = ("answer_line", "hashes", "the_answer_is", "tag")
"""Forms in which a sentence may stand around the value."""
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z$\\(*])")
_SPANS = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\s](?:[^$]*?[^$\s\\])?)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_BETWEEN_SPANS = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ONE_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d+)?(?:/\d+)?)")


class MathRule:
    """Score 1 iff the stated answer and the reference are the same number or expression.

    The reference may be an expression, text with boxes, or a GSM8K solution that ends in `#### 42`.
    """

    def __init__(self, answer_format: str = "auto") -> None:
        self._format = check_answer_format(answer_format)

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        reference = reference_answer(ground_truth)
        form = format_of(extra, self._format)
        stated = stated_answer(text, form, len(split_parts(plain(reference))))
        if stated is None:
            return no_answer(form)
        if len(stated.text) > _MAX_ANSWER_CHARS:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"the answer has {len(stated.text)} characters")
        right = same_value(value_of(stated), reference)
        return Verdict(
            score=float(right),
            acc=float(right),
            reason="" if right else f"{stated.text[:80]!r} is not {ground_truth[:80]!r}",
        )


def reference_answer(ground_truth: str) -> str:
    """The expression of a reference: after `####`, in its boxes (all of them), or all of it."""
    if "####" in ground_truth:
        return ground_truth.rpartition("####")[2].strip()
    boxed = joined_boxes(ground_truth, ground_truth.count("\\boxed")) if "\\boxed" in ground_truth else None
    return ground_truth.strip() if boxed is None else boxed


def value_of(stated: Stated) -> str:
    """The mathematical part of a stated answer: a box holds nothing else; a line or sentence is cut at its end, and its
    last formulas, or its only number, are the answer.
    """
    if stated.form not in _PROSE:
        return stated.text
    text = stated.text
    end = _SENTENCE_END.search(text)
    text = (text[: end.start()] if end else text).strip()
    formulas = _last_formulas(text)
    if formulas is not None:
        return formulas
    tail = plain(text.rpartition("=")[2])
    if "=" in text and _without_unit(tail) != tail:  # 3 * 6 = 18 dollars
        return tail
    if len(_WORDS.findall(text)) < 2 or "\\" in text or _NO_UNITS & set(_WORDS.findall(text.lower())):
        return text
    numbers = dict.fromkeys(_ONE_NUMBER.findall(text.rpartition("=")[2]))
    return next(iter(numbers)) if len(numbers) == 1 else text


def _last_formulas(text: str) -> str | None:
    r"""Content of the last `$...$` or `\(...\)`, with those before it that only a comma, `and` or `or` separates. None
    without one, and where a word beside it would change its value.
    """
    spans = list(_SPANS.finditer(text))
    if not spans:
        return None
    first = len(spans) - 1
    while first and _BETWEEN_SPANS.fullmatch(text[spans[first - 1].end() : spans[first].start()]):
        first -= 1
    around = text[: spans[first].start()][-20:] + " " + text[spans[-1].end() :][:20]
    if _NO_UNITS & set(_WORDS.findall(around.lower())) or "%" in around:
        return None
    return ", ".join(next(filter(None, span.groups())) for span in spans[first:])


def same_value(stated: str, reference: str) -> bool:
    """math-verify's verdict on two answers as people write them."""
    stated, reference = plain(stated), plain(reference)
    # Beside a plain number alone: in another reference letters are a part of the value.
    if _NUMBER.fullmatch(reference):
        stated = _without_unit(stated)
    if stated == reference or _letters(stated) == _letters(reference):
        return True
    decided = same_number(stated, reference)
    return same_expression(stated, reference) if decided is None else decided


def same_expression(stated: str, reference: str) -> bool:
    """math-verify, without its own time-outs: the worker pool has one for all rewards."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extraction = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = _parsed_reference(reference)
    answer = parse(f"${stated}$", extraction, parsing_timeout=0)
    # A list is several forms of one answer to math-verify, a tuple is one of its own.
    return bool(gold and answer and verify(list(gold), answer, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed_reference(reference: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Kept: all samples of a group have the same one. An integer needs no parser, it is what most references are."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from sympy import Integer

    if _INTEGER.fullmatch(reference):
        return Integer(int(reference)), reference  # as parse() gives it: expression and text
    return tuple(parse(f"${reference}$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=0))


def same_number(stated: str, reference: str) -> bool | None:
    """math-verify's verdict on two plain numbers without its parser, a thousand times as fast; None where it is not
    plain to see. It rounds to six decimals, and to 15 digits.
    """
    if not (_NUMBER.fullmatch(stated) and _NUMBER.fullmatch(reference)):
        return None
    if max(len(stated), len(reference)) > _MAX_EXACT_DIGITS:
        return None
    # Of the numbers as written, not of the floats nearest to them.
    difference = abs(Decimal(stated) - Decimal(reference))
    return not difference if not difference or difference > _SURELY_DIFFERENT else None


def plain(answer: str) -> str:
    """Without currency signs, sentence ends and, where the whole answer is one number, thousands separators, which
    LaTeX would read as something else.
    """
    text = answer.strip().strip("$").replace("\\$", "").replace("$", "").strip(" \t\n*`").rstrip(".").strip()
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf|mathbf)\s?\{\s*([-+]?[\d.,]+[^{}\\]*)\}", text)
    text = inner[1].strip() if inner else text
    hedge = _HEDGE.match(text)
    text = text[hedge.end() :] if hedge else text
    text = text.strip(_CURRENCY + " ")
    if _NUMBER.fullmatch(text):
        return text
    if _SCIENTIFIC.fullmatch(text):
        return f"{Decimal(text):f}"  # in LaTeX the e of 1e5 is Euler's number
    for pattern, latex in _KEYBOARD:
        text = pattern.sub(latex, text)
    text = _MIXED.sub(r"\1\2\\frac{\3}{\4}", text) if _MIXED.fullmatch(text) else text
    whole = _WHOLE_GROUPED.fullmatch(text)
    if whole:
        return whole[1] + re.sub(r"\D", "", whole[2]) + whole[3]
    return _EXPLICIT_GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), text)


def _letters(answer: str) -> str:
    """Without boxes of text, and spaces other than between digits: `5:00 \\text{ PM}` is `5:00 PM`."""
    return _INNER_SPACE.sub("", _TEXT.sub(r"\1", answer))


def _vulgar(character: str) -> str:
    """LaTeX of the one character for a half."""
    top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _without_unit(answer: str) -> str:
    """230 of `230 km/h`: math-verify knows units in LaTeX and reads these letters as variables."""
    found = _NUMBER_AND_UNIT.fullmatch(answer)
    if found is None or _NO_UNITS & set(re.findall(r"[a-z]+", found[2].lower())):
        return answer
    return found[1]
