"""How often `math_rule` agrees with gold answers of GSM8K test and AIME 2024, by surface form, and how often it takes a
corrupted answer for a right one. Through real reward workers, as in a run.

    python tools/bench/math_agreement.py --data FOLDER      FOLDER/gsm8k/test.jsonl and FOLDER/aime24/test.jsonl
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.rewards.math_rule import reference_answer
from roll_async.rewards.pool import PoolOptions, RewardPool
from roll_async.schema import RewardStatus

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
MIN_RATE, MAX_FALSE = 0.99, 0.001


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", default="data")
    arguments.add_argument("--rows", type=int, default=None, help="of each set; all by default")
    arguments.add_argument("--workers", type=int, default=2)
    options = arguments.parse_args()
    folder = Path(options.data)
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        print(f"{folder} holds no gsm8k/test.jsonl; give --data", file=sys.stderr)
        return 2
    golds = {name: gold_answers(folder / name / "test.jsonl")[: options.rows] for name in ("gsm8k", "aime24")}
    asyncio.run(measure(golds, options.workers))
    return 0


def gold_answers(path):
    """References as the data set writes them."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [str(row["answer"]) for row in rows]


def forms(value, rng):
    """The same value in five forms, as a model writes them."""
    plain = decimal_text(value)
    exact = value.denominator in (1, 2, 4, 5, 8, 10, 20, 25, 50, 100)
    grouped = f"{value.numerator:,}" if value.denominator == 1 else plain
    currency = rng.choice(
        (rf"\${grouped}", grouped + rng.choice(UNITS), grouped.replace(",", "{,}") + rng.choice(UNITS))
    )
    factor = rng.choice((2, 3, 7))
    sign = "-" if value < 0 else ""
    fraction = rf"{sign}\frac{{{abs(value.numerator) * factor}}}{{{value.denominator * factor}}}"
    return {
        "boxed": rf"So the result is $\boxed{{{plain}}}$.",
        "Answer: line": f"We add them up.\nAnswer: {plain}",
        "fraction": rf"Hence \boxed{{{fraction}}}",
        "decimal": rf"Hence \boxed{{{plain if '.' in plain else plain + '.00'}}}" if exact else rf"\boxed{{{plain}}}",
        "units, commas": rf"In total \boxed{{{currency}}}.",
    }


def corrupted(value, rng):
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


async def measure(golds, workers):
    pool = RewardPool(PoolOptions(reward="math_rule", num_workers=workers, timeout_s=20.0))
    await pool.start()
    rng, right, wrong, states = random.Random(0), defaultdict(list), defaultdict(list), Counter()

    async def ask(text, gold, into):
        reward = await pool.score(text, gold, {})
        states[reward.status.value] += 1
        into.append((reward.status is RewardStatus.OK and reward.score == 1.0, text, gold))

    for name, answers in golds.items():
        work = []
        for gold in answers:
            value = Fraction(reference_answer(gold).replace(",", ""))
            for form, text in forms(value, rng).items():
                work.append(ask(text, gold, right[name, form]))
            for form, text in forms(corrupted(value, rng), rng).items():
                work.append(ask(text, gold, wrong[name, form]))
        await asyncio.gather(*work)
    await pool.close()
    for (name, form), answers in right.items():
        say(f"agreement/{name}/{form}", answers, MIN_RATE, upper=False)
        say(f"false positives/{name}/{form}", wrong[name, form], MAX_FALSE, upper=True)
    print(json.dumps({"name": "agreement/states", **states}))


def say(name, answers, budget, *, upper):
    rate = sum(ok for ok, _, _ in answers) / len(answers)
    surprises = [(text[-60:], gold[-20:]) for ok, text, gold in answers if ok == upper][:5]
    line = {"name": name, "value": round(rate, 5), "unit": "share", "ratio": round(rate, 5), "budget": budget}
    kept = rate <= budget if upper else rate >= budget
    print(json.dumps({**line, "upper": upper, "ok": kept, "rows": len(answers), "surprises": surprises}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
