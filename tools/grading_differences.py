"""The table of docs_roll/rewards.md: where `math_rule`'s verdict differs from math-verify's on the whole response. Both
verdicts are computed; a row in which they do not differ is an error.

    python -m tools.grading_differences             prints the table
    python -m tools.grading_differences --write     writes it into the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from roll_async.rewards.math_rule import MathRule, reference_answer
from tools.bench.grading_agreement import math_verify_alone

PAGE = Path(__file__).resolve().parents[1] / "docs_roll" / "rewards.md"
HEADER = "| response, reference | math-verify | here | rule |\n|---|---|---|---|\n"
CASES = (
    ("there are 18 apples", "18", "a value must be stated; `last_number` reads it"),
    (r"<think>\boxed{2}</think> 3", "2", "thinking is no answer"),
    (r"\boxed{1,250 dollars}", "1250", "units in words"),
    (r"\boxed{5\text{ million}}", "5", "a word that changes the value is no unit"),
    (r"\boxed{12\text{ or more}}", "12", "a word that changes the value is no unit"),
    (r"\boxed{10\,000}", "10000", "thousands separators"),
    (r"\boxed{10 000}", "10000", "thousands separators"),
    (r"\boxed{12,5}", "12.5", "decimal comma"),
    (r"\boxed{1.234,5}", "1234.5", "decimal comma"),
    (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", "repeating decimals"),
    (r"\boxed{0.0}", r"1.6\times 10^{-19}", "small numbers relatively"),
    (r"\boxed{0.0000001}", "0.0000002", "small numbers relatively"),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", "small numbers relatively"),
    (r"\boxed{\sqrt(2)}", r"\sqrt{2}", "arguments in parentheses"),
    (r"\boxed{2^((1+2)/3)}", "2", "arguments in parentheses"),
    (r"\boxed{2 1/2}", "2.5", "what people type"),
    (r"\boxed{1.5e3}", "1500", "what people type"),
    (r"\boxed{x>3}", r"(3,\infty)", "an inequality is a set"),
    (r"\boxed{[1,2)}", r"1\le x \text{ and } x<2", "an inequality is a set"),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"x<1 \text{ or } x>2", "an inequality is a set"),
    (r"\boxed{]1,2[}", "(1,2)", "open intervals of other countries"),
)
"""Response, reference, the rule that decides."""


def table() -> str:
    """The rows, as Markdown. Raises ValueError for a case without a difference."""
    rule, rows = MathRule(), []
    for text, reference, why in CASES:
        verdict = rule(text, reference, {})
        here = "no answer" if not verdict.format else "right" if verdict.acc else "wrong"
        theirs = "right" if math_verify_alone(text, reference_answer(reference)) else "wrong"
        if here == theirs or "no answer" == here and theirs == "wrong":
            raise ValueError(f"{text} against {reference} is {here} to both: no row of this table")
        rows.append(f"| `{text}`, `{reference}` | {theirs} | {here} | {why} |\n")
    return HEADER + "".join(rows)


def with_table(page: str) -> str:
    """The page with the table of today."""
    before, found, rest = page.partition(HEADER)
    if not found:
        raise ValueError(f"{PAGE} has no table that begins {HEADER.splitlines()[0]!r}")
    return before + table() + re.sub(r"\A(?:\|.*\n)*", "", rest)


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
