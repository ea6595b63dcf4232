"""How often our verdicts are right: answers of GSM8K test and AIME 2024 in each form models write them, near misses as
negatives, against the label and against math-verify on the whole response; programs right and wrong in each row form.
Every difference from math-verify is listed with its reason.

    python tools/bench/grading_agreement.py --data FOLDER     FOLDER/gsm8k/test.jsonl and FOLDER/aime24/test.jsonl
"""

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.rewards.code_sandbox import CodeSandbox
from roll_async.rewards.math_rule import MathRule, reference_answer

MIN_RIGHT = 0.999
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
    options = arguments.parse_args()
    folder = Path(options.data)
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
    say("programs", programs())
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

    return int(verify(parse(f"${gold}$", parsing_timeout=5), parse(text, parsing_timeout=5), timeout_seconds=5))


TASKS = (
    ("add", "a, b", "a + b", "a - b", [(1, 2), (5, 5), (-3, 2)]),
    ("largest", "xs", "max(xs)", "min(xs)", [([1, 5, 2],), ([-1, -9],)]),
    ("evens", "xs", "[x for x in xs if x % 2 == 0]", "[x for x in xs if x % 2]", [([1, 2, 4],), ([3],)]),
    ("reverse", "s", "s[::-1]", "s", [("abc",), ("ab",)]),
    ("counts", "s", "dict(Counter(s))", "list(Counter(s))", [("aab",), ("z",)]),
    ("pairs", "xs", "[list(p) for p in zip(xs, xs[1:])]", "[]", [([1, 2, 3],), ([4, 5],)]),
    ("mean", "xs", "sum(xs) / len(xs)", "sum(xs) / (len(xs) + 1)", [([1, 2],), ([2, 4, 9],)]),
    ("is_prime", "n", "n > 1 and all(n % d for d in range(2, n))", "n % 2 == 1", [(7,), (9,), (2,)]),
    ("gcd", "a, b", "math.gcd(a, b)", "a * b", [(12, 18), (7, 3)]),
    ("flatten", "xs", "[y for x in xs for y in x]", "xs", [([[1], [2, 3]],), ([[5], []],)]),
)
"""(name, parameters, right body, wrong body, arguments of the tests). Checked by hand."""


def row_forms(name, tests, values):
    """(ground truth, other columns) of one task in each form it has in public data sets."""
    call = [{"input": "\n".join(map(json.dumps, t)), "output": json.dumps(v), "testtype": "functional"}
            for t, v in zip(tests, values, strict=True)]  # fmt: skip
    prime = {"inputs": [c["input"] for c in call], "outputs": [c["output"] for c in call], "fn_name": name}
    asserts = [f"assert {name}({', '.join(map(repr, t))}) == {v!r}" for t, v in zip(tests, values, strict=True)]
    body = "\n".join("    " + a.replace(f"assert {name}(", "assert candidate(", 1) for a in asserts)
    check = f"def check(candidate):\n{body}\n"
    apps = {"inputs": [list(t) for t in tests], "outputs": [[v] for v in values], "fn_name": name}
    return {
        "LiveCodeBench": ("", {"public_test_cases": json.dumps(call), "metadata": json.dumps({"func_name": name})}),
        "DeepCoder": (json.dumps([{**c, "metadata": {"func_name": name}} for c in call]), {}),
        "PRIME": (json.dumps(prime), {}),
        "verl": (json.dumps(json.dumps(prime)), {}),
        "APPS": (json.dumps(apps), {}),
        "LeetCode": (json.dumps({"functional": f"{check}\n\ncheck({name})"}), {}),
        "HumanEval": ("", {"test": check, "entry_point": name}),
        "MBPP": ("", {"test_list": json.dumps(asserts)}),
        "pytest": (json.dumps({"pytest": f"from solution import {name}\ndef test_all():\n" + "\n".join(
            "    " + a for a in asserts)}), {}),
        "stdio": (json.dumps({"inputs": [json.dumps(list(t)) + "\n" for t in tests],
                              "outputs": [json.dumps(v) for v in values]}), {}),
    }  # fmt: skip


def programs():
    """Right, wrong and absent programs of every task in every form."""
    tally = defaultdict(Counter)
    reward = CodeSandbox(isolation="best_effort")
    for name, parameters, right, wrong, tests in TASKS:
        scope = {}
        exec(f"import math\nfrom collections import Counter\ndef {name}({parameters}):\n    return {right}", scope)
        values = [scope[name](*t) for t in tests]
        for form, (truth, extra) in row_forms(name, tests, values).items():
            absent = () if form == "stdio" else ((None, 0),)  # there the evaluators' imports are the program's own
            for body, label in ((right, 1), (wrong, 0), *absent):
                code = f"def {name}({parameters}):\n    return {body}\n" if body else "x = 1\n"
                if form == "stdio":
                    code += f"print(json.dumps({name}(*json.loads(input()))))\n"
                verdict = reward(f"```python\n{code}```", truth, extra)
                tally["programs", form]["rows"] += 1
                tally["programs", form]["right"] += verdict.score == label
                if verdict.score != label:
                    print(json.dumps({"name": f"WRONG/programs/{form}", "task": name, "reason": verdict.reason}))
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
