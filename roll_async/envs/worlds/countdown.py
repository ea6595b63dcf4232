"""Countdown: make a target from given numbers, each used at most once."""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass
from random import Random

from roll_async.envs.worlds.arithmetic import compute, shown
from roll_async.envs.worlds.text_world import OPEN_TAG, TextWorld

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MOVES = ((operator.add, "+"), (operator.sub, "-"), (operator.mul, "*"))  # without division every target is whole


@dataclass(frozen=True, kw_only=True)
class CountdownOptions:
    """`env_config` of countdown."""

    num_numbers: int = 3
    largest: int = 20
    attempts: int = 1
    """Turns; after a wrong answer the world reports its value."""
    format_reward: float = 0.1
    """For an expression that uses only the given numbers but misses the target; on the last attempt."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_numbers <= 8 or self.largest < 2 or self.attempts < 1:
            raise ValueError("num_numbers must be 2 to 8, largest >= 2 and attempts >= 1")


class Countdown(TextWorld):
    """Every task has a solution: the target is computed from the numbers."""

    Options = CountdownOptions

    def __init__(self, options: CountdownOptions) -> None:
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The same seed, the same numbers."""
        super().reset(seed=seed)
        rng = Random(int(self.np_random.integers(2**31)))
        self._left = self._options.attempts
        while True:
            self._numbers = [rng.randint(1, self._options.largest) for _ in range(self._options.num_numbers)]
            value = self._numbers[0]
            for number in self._numbers[1:]:
                value = rng.choice(_MOVES)[0](value, number)
            # A target that is one of the numbers would be no task.
            if 0 < value <= 10 * self._options.largest and value not in self._numbers:
                break
        self._target = value
        text = f"Make {self._target} from {', '.join(map(str, self._numbers))}."
        instructions = (
            "Use the numbers given, each at most once, with + - * / and parentheses. Answer with the expression alone: "
            "<answer>(1 + 2) * 3</answer>."
        )
        return text, {"instructions": instructions, "solved": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One attempt."""
        self._left -= 1
        # Models write the result behind their expression.
        written = (_ANSWER.findall(action) or OPEN_TAG.split(action))[-1].partition("=")[0]
        try:
            value, used = compute(written)
            fits = not Counter(map(int, used)) - Counter(self._numbers) and all(n.denominator == 1 for n in used)
            said = f"That is {shown(value)}." if fits else "That uses other numbers."
            if fits and value == self._target:
                return said, 1.0, True, False, {"solved": True}
        except ValueError as error:
            fits, said = False, f"That cannot be computed: {error}."
        over = self._left <= 0
        return said, self._options.format_reward if over and fits else 0.0, over, False, {"solved": False}
