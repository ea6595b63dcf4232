"""Questions with known answers, for agents with tools: mathematics (made up, or from a file) and QA from a file."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal

from roll_async.envs.worlds.arithmetic import compute
from roll_async.envs.worlds.text_world import TextWorld

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_OF_ONE_QUESTION = ("grade", "attempts", "instructions")
_ABOUT_TOOLS = {"tools": "tool_names", "tools_kwargs": "tool_arguments"}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class QuestionsOptions:
    """`env_config` of math and qa."""

    file: str | None = None
    """JSON lines with `question` and `answer`; null = products and sums of random integers. A line may have
    `interaction_kwargs` (its own grade, attempts, instructions) and `tools`, `tools_kwargs` for the tag's tools.
    """
    digits: int = 2
    """Of the made-up numbers."""
    grade: Literal["number", "text"] = "number"
    """number: the last number written; text: the same words, without case, articles and punctuation."""
    attempts: int = 1
    instructions: str = "Answer with the result alone: <answer>42</answer>. Use the tools for what you cannot know."

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9 or self.attempts < 1:
            raise ValueError("digits must be 1 to 9 and attempts >= 1")
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"file {self.file} does not exist")


@dataclass(frozen=True, slots=True)
class Question:
    """One task."""

    question: str
    answer: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of QuestionsOptions, in place of the world's."""
    tools: Mapping[str, object] = field(default_factory=dict)
    """Keys of `info` about tools."""


class Questions(TextWorld):
    """Reward 1 for the right answer. Calls of tools do not reach it: it sees answers alone."""

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
    found = _ANSWER.findall(text) or _BOXED.findall(text)
    said = found[-1] if found else text
    if grade == "text":
        return _words(said) == _words(answer)
    numbers, wanted = _NUMBER.findall(said), _NUMBER.findall(answer)
    return bool(numbers and wanted) and _number(numbers[-1]) == _number(wanted[-1])


def _number(text: str) -> object:
    return compute(text.replace(",", ""))[0] if len(text) < 100 else text


def _words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def _made_up(rng: Random, digits: int) -> tuple[str, str]:
    low, high = 10 ** (digits - 1), 10**digits - 1
    a, b, c = (rng.randint(low, high) for _ in range(3))
    expression = rng.choice((f"{a}*{b}", f"{a}*{b}+{c}", f"{a}+{b}*{c}", f"{a}*{b}-{c}"))
    return f"{expression}=", str(compute(expression)[0])


@lru_cache(maxsize=8)
def _rows(file: str) -> list[Question]:
    """Raises ValueError for a file without questions, and for settings that a question cannot have."""
    found = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        row = json.loads(line) if line.strip() else None
        if not (isinstance(row, dict) and "question" in row and "answer" in row):
            continue
        settings = row.get("interaction_kwargs") or {}
        if not isinstance(settings, dict) or settings.keys() - _OF_ONE_QUESTION:
            raise ValueError(f"{file}:{number}: interaction_kwargs may hold {', '.join(_OF_ONE_QUESTION)}")
        tools = {key: row[name] for name, key in _ABOUT_TOOLS.items() if row.get(name) is not None}
        found.append(Question(str(row["question"]), str(row["answer"]), settings, tools))
    if not found:
        raise ValueError(f"{file} has no line with question and answer")
    return found
