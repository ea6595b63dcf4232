r"""How often `math_rule` agrees: gold answers in five surface forms, and corrupted answers in the same forms.

    python tools/bench/verification_agreement.py [--gsm8k data/gsm8k/test.jsonl] [--aime data/aime24/test.jsonl]

One line per data set and form: the share of right answers judged right (budget), and beside it how many of the
corrupted ones were judged right, which must be none.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.prompts.rows import BadRows, Columns, read_rows
from roll_async.rewards.math_rule import MathRule

BUDGET = 0.99
REASONING = "Let x = 3 and y = 4, so x + y = 7, not 12.\n"


def plain(value: Fraction) -> str:
    """As a person writes it: 18, -3, 2.5."""
    if value.denominator == 1:
        return str(value.numerator)
    return repr(float(value))


def grouped(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else plain(value)


FORMS: dict[str, Callable[[Fraction], str]] = {
    "boxed": lambda v: f"So it is \\boxed{{{plain(v)}}}.",
    "answer_line": lambda v: f"Answer: {plain(v)}",
    "fraction": lambda v: f"Hence \\boxed{{\\frac{{{v.numerator * 3}}}{{{v.denominator * 3}}}}}",
    "decimal": lambda v: f"**Answer:** {plain(v) if v.denominator > 1 else plain(v) + '.00'}",
    "units_and_commas": lambda v: f"The total is \\boxed{{\\${grouped(v)} \\text{{ dollars}}}}.",
}


def corrupted(value: Fraction) -> list[Fraction]:
    """Wrong in the ways models are: one off, a digit too many, the sign, half."""
    wrong = [value + 1, value - 1, value * 10, -value, value / 2]
    return [w for w in wrong if w != value]


def gold(path: str, question: str) -> list[tuple[str, Fraction]]:
    """Answers as text and as numbers."""
    columns = Columns(messages=None, prompt=question, ground_truth="answer")
    rows = read_rows([path], columns, BadRows())
    return [(row.ground_truth, Fraction(row.ground_truth.replace(",", ""))) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", default="data/gsm8k/test.jsonl")
    parser.add_argument("--aime", default="data/aime24/test.jsonl")
    parser.add_argument("--show", type=int, default=0, help="disagreements to print on stderr, per form")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rule = MathRule()
    for name, path, question in (("gsm8k", args.gsm8k, "question"), ("aime24", args.aime, "problem")):
        try:
            answers = gold(path, question)
        except ValueError as error:
            sys.exit(f"verification_agreement: {error}")
        for form, write in FORMS.items():
            right, accepted, tried, shown = 0, 0, 0, 0
            for text, value in answers:
                agreed = rule(REASONING + write(value), text, {}).score == 1.0
                right += agreed
                wrong = [w for w in corrupted(value) if rule(REASONING + write(w), text, {}).score == 1.0]
                tried, accepted = tried + len(corrupted(value)), accepted + len(wrong)
                if (not agreed or wrong) and shown < args.show:
                    shown += 1
                    print(f"{name} {form}: gold {text!r}: {write(value)!r} {agreed}, {wrong}", file=sys.stderr)
            rate = right / len(answers)
            line = {"name": f"agreement_{name}_{form}", "value": right, "unit": "right", "ratio": round(rate, 4)}
            line |= {"budget": BUDGET, "ok": rate >= BUDGET and not accepted, "answers": len(answers)}
            print(json.dumps({**line, "false_positives": accepted, "corrupted": tried}), flush=True)


if __name__ == "__main__":
    main()
