"""A direction from what the model wrote."""

from __future__ import annotations

import re

WORDS = ("Left", "Down", "Right", "Up")
"""In the order of gymnasium's action numbers."""
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(rows, columns) of each."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r"(?<!\w['\u2019])\b(left|down|right|up|[ldru])\b", re.IGNORECASE)


def direction(text: str) -> int | None:
    """Number of the last direction in `<answer>...</answer>`, or in the whole text without one; None when there is
    none. `Right`, `right` and `R` are the same.
    """
    answer = _ANSWER.findall(text)
    found = _WORD.findall(answer[-1] if answer else text)
    return "ldru".index(found[-1][0].lower()) if found else None
