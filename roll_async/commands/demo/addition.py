"""The demo task: addition of multi-digit numbers with a digit-by-digit scratchpad.

`58+367=` is answered `8+7+0=15;5+6+1=12;0+3+1=4;=425`: one step per digit from the right (digits and carry), then the
sum.
The length of an answer grows with its digits, so lengths vary as they do in real reasoning.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ALPHABET = "0123456789+=;"


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model sees."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What must follow the last `=`."""
        return str(self.left + self.right)

    def solution(
        self, rng: random.Random | None = None, wrong_digits: float = 0.0, forgotten_carries: float = 0.0
    ) -> str:
        """The scratchpad and the sum. With `rng` each computed digit is any digit with probability `wrong_digits`, and
        each carry is forgotten with probability `forgotten_carries`: the next column adds 0, and so does the sum.
        """

        def stated(number: int | str) -> str:
            if rng is None:
                return str(number)
            return "".join(rng.choice("0123456789") if rng.random() < wrong_digits else c for c in str(number))

        steps, digits, carry = [], "", 0
        left, right = str(self.left)[::-1], str(self.right)[::-1]
        last = max(len(left), len(right)) - 1
        for position in range(last + 1):
            a = int(left[position]) if position < len(left) else 0
            b = int(right[position]) if position < len(right) else 0
            total = a + b + carry
            steps.append(f"{a}+{b}+{carry}={stated(total)};")
            digits = (str(total) if position == last else str(total % 10)) + digits
            carry = total // 10
            if rng is not None and carry and rng.random() < forgotten_carries:
                carry = 0
        return "".join(steps) + f"={stated(int(digits))}"


HEAVY_TAIL_DIGITS = 24


def problems(count: int, *, seed: int, max_digits: int = 3, heavy_tail: bool = False) -> list[Problem]:
    """Distinct problems; each operand has 1 to `max_digits` digits with equal probability. With `heavy_tail` up to
    HEAVY_TAIL_DIGITS, by a Pareto distribution from 2 on, exponent 2: the longest answers are five times the mean, and
    stay so however well they are learned.
    """
    rng = random.Random(seed)

    def digits() -> int:
        return min(HEAVY_TAIL_DIGITS, int(2 * rng.paretovariate(2))) if heavy_tail else rng.randint(1, max_digits)

    found: dict[Problem, None] = {}
    while len(found) < count:
        left, right = (rng.randrange(10 ** digits()) for _ in range(2))
        found[Problem(left, right)] = None
    return list(found)
