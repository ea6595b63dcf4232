"""The answer after a marker equals the reference, character by character."""

from __future__ import annotations

from collections.abc import Mapping

from roll_async.rewards.verdict import Verdict


class ExactMatch:
    """Everything after the last marker, stripped, must equal the ground truth. No marker: the format is wrong."""

    def __init__(self, marker: str = "=") -> None:
        self._marker = marker

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        _, found, answer = text.rpartition(self._marker)
        if not found:
            return Verdict(score=0.0, acc=0.0, format=0.0, reason=f"no {self._marker!r} in the answer")
        right = answer.strip() == ground_truth.strip()
        return Verdict(
            score=float(right),
            acc=float(right),
            reason="" if right else f"{answer.strip()[:80]!r} is not {ground_truth!r}",
        )
