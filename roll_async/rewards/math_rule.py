"""Mathematical answers: `answers.py` extracts the answer, `maths/` compares it with the reference."""

from __future__ import annotations

import re
from collections.abc import Mapping

from roll_async.rewards.answers import Stated, check_answer_format, format_of, joined_boxes, split_parts, stated_answer
from roll_async.rewards.maths.equality import NO_UNITS, same_value, without_unit
from roll_async.rewards.maths.writing import plain, readings
from roll_async.rewards.verdict import Verdict, no_answer

_MAX_ANSWER_CHARS = 2000
_PROSE = ("answer_line", "hashes", "the_answer_is", "tag")
"""Forms in which a sentence may stand around the value."""
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z$\\(*])")
_SPANS = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\\d])\$([^$\s](?:[^$]*?[^$\s\\])?)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|(?<![\\\d])\$\s([^$]*\\[A-Za-z][^$]*)\$(?!\d)",
    re.DOTALL,
)
"""With a space behind the dollar it is one only around a command: prices are written so, too."""
_BETWEEN_SPANS = re.compile(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*")
_UNKNOWN = re.compile(r"(?:\$|\\\()\s?[A-Za-z]\s?(?:\$|\\\))")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ONE_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:[, ]\d{3})+(?![\d,])(?:\.\d+)?|\d+,\d+(?![\d,])|\d+(?:\.\d+)?(?:/\d+)?)"
)


class MathRule:
    """Score 1 iff the stated answer and the reference are the same number or expression.

    The reference may be an expression, text with boxes, or a GSM8K solution that ends in `#### 42`.
    """

    def __init__(self, answer_format: str = "auto") -> None:
        self._format = check_answer_format(answer_format)

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        reference = reference_answer(ground_truth)
        form = format_of(extra, self._format)
        # `0,1` is one value, or two, which may stand in two boxes.
        parts = dict.fromkeys(len(split_parts(reading)) for reading in readings(reference))
        found = [stated for count in parts if (stated := stated_answer(text, form, count)) is not None]
        if not found:
            return no_answer(form)
        stated = max(found, key=lambda answer: len(answer.text))
        if len(stated.text) > _MAX_ANSWER_CHARS:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"the answer has {len(stated.text)} characters")
        right = any(same_value(value_of(answer), reference) for answer in found)
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
    if "=" in text and without_unit(tail) != tail:  # 3 * 6 = 18 dollars
        return tail
    if len(_WORDS.findall(text)) < 2 or "\\" in text or NO_UNITS & set(_WORDS.findall(text.lower())):
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
    if _UNKNOWN.fullmatch(spans[-1][0]) and _ONE_NUMBER.search(text, spans[-1].end()):
        return None  # the largest $n$ is 34
    first = len(spans) - 1
    while first and _BETWEEN_SPANS.fullmatch(text[spans[first - 1].end() : spans[first].start()]):
        first -= 1
    around = text[: spans[first].start()][-20:] + " " + text[spans[-1].end() :][:20]
    if NO_UNITS & set(_WORDS.findall(around.lower())) or "%" in around:
        return None
    return ", ".join(next(filter(None, span.groups())) for span in spans[first:])
