"""The answer after a marker equals the reference, character by character."""

from __future__ import annotations

from collections.abc import Mapping

from roll_async.rewards.answers import after_thinking, final_answer, format_of
from roll_async.rewards.verdict import Verdict, no_answer


class ExactMatch:
    """Everything after the last marker, stripped, must equal the ground truth. No marker: the format is wrong. With an
    `answer_format` other than auto the answer is read in that form instead.
    """

    def __init__(self, marker: str = "=", answer_format: str = "auto") -> None:
        self._marker, self._format = marker, answer_format

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        form = format_of(extra, self._format)
        if form == "auto":
            _, found, answer = after_thinking(text).rpartition(self._marker)
            if not found:
                return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"no {self._marker!r} in the answer")
        else:
            answer = final_answer(text, form)
            if answer is None:
                return no_answer(form)
        right = answer.strip() == ground_truth.strip()
        return Verdict(
            score=float(right),
            acc=float(right),
            reason="" if right else f"{answer.strip()[:80]!r} is not {ground_truth!r}",
        )
