"""How often our verdicts are right: answers of GSM8K test and AIME 2024 in each form models write them, near misses as
negatives, against the label and against math-verify on the whole response; 200 programs, right and subtly wrong
(graded_programs.py), in each row form.
Every difference from math-verify is listed with its reason.

    python tools/bench/grading_agreement.py --data FOLDER     FOLDER/gsm8k/test.jsonl and FOLDER/aime24/test.jsonl
"""

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.rewards.code_sandbox import CodeSandbox
from roll_async.rewards.math_rule import MathRule, reference_answer
from tools.bench.graded_programs import TASKS, program_of, runs_right

MIN_RIGHT = 0.999
NUM_SLOW = 10
UNITS = (
    r"\text{ dollars}",
    r"\text{ cm}",
    " apples",
    r"\%",
    r"^\circ",
    r"\text{ years old}",
    " km/h",
    r"\,\mathrm{kg}",
)
PAIRS = (
    ("({a},{b})", r"\left( {a} , {b} \right)"),
    (r"[{a},{b})", r"\left[{a}, {b}\right)"),
    (r"\{{{a},{b}\}}", r"\left\{{ {b}, {a} \right\}}"),
    (r"{a}, {b}", r"{b} \text{{ and }} {a}"),
    (r"(-\infty,{a})\cup({b},\infty)", r"(-\infty, {a}) \cup ({b}, \infty)"),
    (r"\frac{{{a}}}{{{b}}}", r"\dfrac{{{a}}}{{ {b} }}"),
)
"""The same object written twice; what is next to it is wrong."""


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", default="data")
    arguments.add_argument("--rows", type=int, default=None, help="of each set; all by default")
    arguments.add_argument("--part", default="0/1", help="of the tasks of the programs: 2/8 = 2, 10, 18, ...")
    arguments.add_argument("--only", choices=("answers", "programs"), default=None)
    options = arguments.parse_args()
    from tools.machine import machine_line

    print(machine_line(options), flush=True)
    part, num_parts = map(int, options.part.split("/"))
    tasks = list(enumerate(TASKS))[: options.rows][part::num_parts]
    folder = Path(options.data)
    if options.only == "programs":
        say("programs", programs(tasks))
        return 0
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        print(f"{folder} holds no gsm8k/test.jsonl; give --data", file=sys.stderr)
        return 2
    rng = random.Random(0)
    tally, differences = defaultdict(Counter), []
    for name in ("gsm8k", "aime24"):
        for gold in gold_answers(folder / name / "test.jsonl")[: options.rows]:
            number = Fraction(reference_answer(gold).replace(",", ""))
            for value, label in ((number, 1), (near_miss(number, rng), 0)):
                for form, text in forms(value, rng).items():
                    judge(name, form, text, gold, label, tally, differences)
    for form, text, gold, label in several_parts(rng, options.rows or 300):
        judge("several parts", form, text, gold, label, tally, differences)
    say("answers", tally)
    for (name, form, reason), count in Counter((d[0], d[1], d[4]) for d in differences).most_common():
        example = next(d for d in differences if (d[0], d[1], d[4]) == (name, form, reason))
        print(json.dumps({"name": f"differs from math-verify/{name}/{form}", "count": count, "reason": reason,
                          "text": example[2][-80:], "reference": example[3][-30:]}), flush=True)  # fmt: skip
    if options.only is None:
        say("programs", programs(tasks))
    return 0


def gold_answers(path):
    """References as the data set writes them."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [str(row["answer"]) for row in rows]


def forms(value, rng):
    """The same value as models write it."""
    plain = decimal_text(value)
    grouped = f"{value.numerator:,}" if value.denominator == 1 else plain
    factor, sign = rng.choice((2, 3, 7)), "-" if value < 0 else ""
    fraction = rf"{sign}\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"
    written = rng.choice((grouped, grouped.replace(",", "{,}"), "\\$" + grouped))
    return {
        "boxed": rf"So the result is $\boxed{{{plain}}}$.",
        "boxed, unit and separators": rf"In total \boxed{{{written}{rng.choice(UNITS)}}}.",
        "boxed fraction": rf"Hence \boxed{{{fraction}}}",
        "Answer: line": f"We add them up.\nAnswer: {plain}",
        "Answer: next line": f"We add them up.\n**Answer:**\n\n${plain}$",
        "Answer: list number": f"1. We add them up.\n2. Answer: {grouped}",
        "Answer: mid-line": f"We add them up and subtract the rest. Answer: {plain}",
        "Answer: currency": f"Answer: \\${grouped}" if rng.random() < 0.5 else f"Answer: ${grouped} per day",
        "hashes": f"We add them up.\n#### {grouped}",
        "tag": f"<think>maybe 7</think>We add them up.\n<answer>{plain}</answer>",
        "the answer is": f"We add them up. So the answer is {grouped} apples.",
    }  # fmt: skip


def several_parts(rng, count):
    """(form, response, reference, label) of intervals, points, sets, lists, unions."""
    for _ in range(count):
        shape, other = rng.choice(PAIRS)
        a = rng.choice((rng.randint(1, 9), rng.randint(10, 99), rng.randint(100, 999)))
        b = a + rng.choice((rng.randint(1, 9), rng.randint(100, 999)))
        gold, right = shape.format(a=a, b=b), other.format(a=a, b=b)
        joined = f"{a}{b}"
        yield "same object", rf"\boxed{{{right}}}", gold, 1
        yield "another part", rf"\boxed{{{other.format(a=a, b=b + 1)}}}", gold, 0
        if "," in gold:
            yield "a number for a list", rf"\boxed{{{joined}}}", gold, 0
            yield "a list for a number", rf"\boxed{{{gold}}}", joined, 0


def near_miss(value, rng):
    """Another value that looks like it."""
    digits = str(abs(value.numerator))
    others = [value + 1, value - 1, value * 10, value + Fraction(1, 2), Fraction(digits[::-1]), value / 2 + 1]
    if value != 0:
        others += [-value, value * Fraction(101, 100)]
    return rng.choice([other for other in others if other != value])


def decimal_text(value):
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


RULE = MathRule()


def judge(name, form, text, gold, label, tally, differences):
    verdict = RULE(text, gold, {})
    theirs = math_verify_alone(text, reference_answer(gold))
    counts = tally[name, form]
    counts["rows"] += 1
    counts["right"] += verdict.acc == label
    counts["math-verify right"] += theirs == label
    if verdict.acc != label:
        print(json.dumps({"name": f"WRONG/{name}/{form}", "text": text, "reference": gold[-30:], "label": label}))
    if verdict.acc != theirs:
        differences.append((name, form, text, gold, reason_of(text, verdict, theirs, label)))


def reason_of(text, verdict, theirs, label):
    if not verdict.format:
        return "no stated answer here; math-verify takes any expression"
    if theirs == label:
        return "WE ARE WRONG"
    if label:
        unit = any(word in text for word in ("apples", "km/h", "per day"))
        separator = "{,}" in text or "," in text
        return "units in words" if unit else "thousands separators" if separator else "form not read by math-verify"
    return "math-verify takes a part of the response, or a text before the answer, for the answer"


def math_verify_alone(text, gold):
    from math_verify import parse, verify

    # Without its time-outs, which count the seconds of a busy machine.
    theirs = parse(text, parsing_timeout=None)
    return int(verify(_parsed_gold(gold), theirs, timeout_seconds=None))


@lru_cache(maxsize=64)
def _parsed_gold(gold):
    from math_verify import parse

    return parse(f"${gold}$", parsing_timeout=None)


def row_forms(name, tests):
    """(ground truth, other columns) of one task in each form it has in public data sets."""
    arguments, values = [list(t) for t, _ in tests], [v for _, v in tests]
    call = [{"input": "\n".join(map(json.dumps, t)), "output": json.dumps(v), "testtype": "functional"}
            for t, v in zip(arguments, values, strict=True)]  # fmt: skip
    prime = {"inputs": [c["input"] for c in call], "outputs": [c["output"] for c in call], "fn_name": name}
    asserts = [f"assert {name}({', '.join(map(repr, t))}) == {v!r}" for t, v in tests]
    body = "\n".join("    " + a.replace(f"assert {name}(", "assert candidate(", 1) for a in asserts)
    check = f"def check(candidate):\n{body}\n"
    synthetic = [{"type": "function_call", "fn_name": name, "input": t, "output": v}
                 for t, v in zip(arguments, values, strict=True)]  # fmt: skip
    return {
        "LiveCodeBench": ("", {"public_test_cases": json.dumps(call), "metadata": json.dumps({"func_name": name})}),
        "DeepCoder": (json.dumps([{**c, "metadata": {"func_name": name}} for c in call]), {}),
        "PRIME": (json.dumps(prime), {}),
        "verl": (json.dumps(json.dumps(prime)), {}),
        "APPS": (json.dumps({"inputs": arguments, "outputs": [[v] for v in values], "fn_name": name}), {}),
        "SYNTHETIC-1": (json.dumps({"language": "python", "test_cases": synthetic}), {}),
        "LeetCode": (json.dumps({"functional": f"{check}\n\ncheck({name})"}), {}),
        "LeetCode, method": ("", {"test": check, "entry_point": f"Solution().{name}"}),
        "HumanEval": ("", {"test": check, "entry_point": name}),
        "MBPP": ("", {"test_list": json.dumps(asserts)}),
        "pytest": (json.dumps({"pytest": f"from solution import {name}\ndef test_all():\n" + "\n".join(
            "    " + a for a in asserts)}), {}),
        "stdio": (json.dumps({"inputs": [json.dumps(t) + "\n" for t in arguments],
                              "outputs": [json.dumps(v) for v in values]}), {}),
    }  # fmt: skip


def in_form(form, name, program):
    """The program as a row of this form asks for it."""
    if form == "stdio":
        return program + f"print(json.dumps({name}(*json.loads(input()))))\n"
    if form == "LeetCode, method":
        method = program.replace("(", "(self, ", 1).replace(f" {name}(", f" Solution().{name}(")
        method = method.replace(f"def Solution().{name}(", f"def {name}(").replace(f"map({name},", f"map(self.{name},")
        return "class Solution:\n" + "".join(f"    {line}\n" for line in method.splitlines())
    return program


def programs(tasks):
    """Right and wrong programs of every task in every form, and for the first ones absent programs and test files. A
    label is what a plain interpreter says.
    """
    tally = defaultdict(Counter)
    reward = CodeSandbox(
        isolation="best_effort", case_timeout_s=60, timeout_s=300
    )  # a busy machine is no wrong verdict
    for number, (name, parameters, right, wrong, tests) in tasks:
        for written, label in ((right, 1), (wrong, 0)):
            reference = runs_right(name, program_of(name, parameters, written), tests)
            assert reference == label, f"{name}: the reference says {reference}, by hand it is {label}"
        for form, (truth, extra) in row_forms(name, tests).items():
            if form == "pytest" and number >= NUM_SLOW:
                continue
            # With stdio the evaluators' imports are the program's own.
            absent = () if form == "stdio" or number >= NUM_SLOW else ((None, 0),)
            for written, label in ((right, 1), (wrong, 0), *absent):
                code = in_form(form, name, program_of(name, parameters, written)) if written else "x = 1\n"
                verdict = reward(f"```python\n{code}```", truth, extra)
                tally["programs", form]["rows"] += 1
                tally["programs", form]["right"] += verdict.score == label
                if verdict.score != label:
                    print(json.dumps({"name": f"WRONG/programs/{form}", "task": name, "label": label,
                                      "reason": verdict.reason}), flush=True)  # fmt: skip
    reward._runner.close()
    return tally


def say(title, tally):
    rows = right = 0
    for (name, form), counts in tally.items():
        rows, right = rows + counts["rows"], right + counts["right"]
        share = counts["right"] / counts["rows"]
        theirs = counts["math-verify right"] / counts["rows"] if "math-verify right" in counts else None
        print(json.dumps({"name": f"grading/{name}/{form}", "rows": counts["rows"], "value": round(share, 5),
                          "math_verify": None if theirs is None else round(theirs, 5)}), flush=True)  # fmt: skip
    share = right / rows
    print(json.dumps({"name": f"grading/{title}", "value": round(share, 6), "unit": "share", "ratio": round(share, 6),
                      "budget": MIN_RIGHT, "ok": share >= MIN_RIGHT, "rows": rows}), flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
