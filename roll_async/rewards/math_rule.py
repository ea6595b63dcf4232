"""Mathematical answers, compared by math-verify: the last boxed expression, or the last `Answer:` line, after the
thinking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from roll_async.rewards.verdict import Verdict

_MAX_ANSWER_CHARS = 2000
_ANSWER_LINE = re.compile(r"(?im)^\W*(?:final\s+)?answer\s*(?:is)?\s*[:=]\s*(.+?)\s*$")


def final_answer(text: str) -> str | None:
    """The stated answer as LaTeX or plain text; None when none is stated."""
    text = text.rpartition("</think>")[2] if "</think>" in text else text
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(text)
    return lines[-1] if lines else None


def _last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced."""
    for start in (m.end() for m in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text)))):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if not depth:
                return text[start:position].strip()
    return None


class MathRule:
    """Score 1 iff the stated answer and the reference are the same number or expression."""

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        stated = final_answer(text)
        if stated is None:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason="no boxed expression and no Answer: line")
        if len(stated) > _MAX_ANSWER_CHARS:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"the answer has {len(stated)} characters")
        right = same_value(stated, ground_truth)
        return Verdict(
            score=float(right),
            acc=float(right),
            reason="" if right else f"{stated[:80]!r} is not {ground_truth[:80]!r}",
        )


def same_value(stated: str, reference: str) -> bool:
    """math-verify's verdict, without its own time-outs: the worker pool has one for all rewards."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if stated.strip() == reference.strip():
        return True
    extraction = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"${reference}$", extraction, parsing_timeout=None)
    answer = parse(f"${_plain(stated)}$", extraction, parsing_timeout=None)
    return bool(gold and answer and verify(gold, answer, timeout_seconds=None))


def _plain(answer: str) -> str:
    """Without currency signs and sentence ends that LaTeX would read as something else."""
    return answer.strip().strip("$").replace("\\$", "").replace("$", "").rstrip(".")
