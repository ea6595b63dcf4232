"""Questions with known answers, for agents with tools: mathematics (made up, or from a file) and QA from a file."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal

from roll_async.envs.worlds.arithmetic import compute
from roll_async.envs.worlds.question_rows import Question, read_questions
from roll_async.envs.worlds.text_world import OPEN_TAG, TextWorld

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_rows = lru_cache(maxsize=8)(read_questions)  # a world is made for each trajectory, the file is read once


@dataclass(frozen=True, kw_only=True)
class QuestionsOptions:
    """`env_config` of math and qa."""

    file: str | None = None
    """JSON lines with `question` and `answer`, or any file of RLVR prompts (`question_rows.py`); null = products and
    sums of random integers. A row may have `interaction_kwargs` (its own grade, attempts, instructions) and `tools`,
    `tools_kwargs` for the tag's tools.
    """
    digits: int = 2
    """Largest number of digits of the generated numbers."""
    grade: Literal["number", "text"] = "number"
    """number: the last number written; text: the same words, without case, articles and punctuation."""
    attempts: int = 1
    instructions: str = "Answer with the result alone: <answer>42</answer>. Use the tools for what you cannot know."

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9 or self.attempts < 1:
            raise ValueError("digits must be 1 to 9 and attempts >= 1")
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"file {self.file} does not exist")


class Questions(TextWorld):
    """Reward 1 for the right answer. Tool calls are not passed to it; it gets answers only."""

    Options = QuestionsOptions

    def __init__(self, options: QuestionsOptions) -> None:
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same question."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31))
        row = Question(*_made_up(Random(number), self._options.digits))
        if self._options.file is not None:
            rows = _rows(self._options.file)
            row = rows[number % len(rows)]
        self._answer, self._now = row.answer, replace(self._options, **row.settings)
        self._left = self._now.attempts
        return row.question, {"instructions": self._now.instructions, "solved": False, **row.tools}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One answer."""
        self._left -= 1
        right = same_answer(action, self._answer, self._now.grade)
        over = right or self._left <= 0
        return "Right." if right else "Wrong.", float(right), over, False, {"solved": right}


def same_answer(text: str, answer: str, grade: str) -> bool:
    """Whether the text ends with this answer: in <answer>, in \\boxed, or as its last number (the whole text)."""
    said = (_ANSWER.findall(text) or _BOXED.findall(text) or OPEN_TAG.split(text))[-1]
    if grade == "text":
        return _words(said) == _words(answer)
    numbers, wanted = _NUMBER.findall(said), _NUMBER.findall(answer)
    return bool(numbers and wanted) and _number(numbers[-1]) == _number(wanted[-1])


def _number(text: str) -> object:
    # compute() refuses very long numbers: those are compared as text.
    return compute(text.replace(",", ""))[0] if len(text) < 100 else text


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _made_up(rng: Random, digits: int) -> tuple[str, str]:
    low, high = 10 ** (digits - 1), 10**digits - 1
    a, b, c = (rng.randint(low, high) for _ in range(3))
    expression = rng.choice((f"{a}*{b}", f"{a}*{b}+{c}", f"{a}+{b}*{c}", f"{a}*{b}-{c}"))
    return f"{expression}=", str(compute(expression)[0])
