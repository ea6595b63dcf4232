"""Verifications per second through the reward worker pool, against math-verify called directly in one process.

    python tools/bench/verification.py [--data data/gsm8k/test.jsonl] [--samples 800] [--timeout 5] [--workers 1 2]

Texts are the solutions of GSM8K with their answer boxed, half of them corrupted (the answer plus one). `plain`: the
answer as the number it is, which `math_rule` compares without a parser. `fraction`: as a fraction, so that every sample
goes through math-verify. With hanging expressions mixed in, the pool may lose, in worker seconds, what the hanging ones
take: their number x the time-out.

`ratio` is per worker, against one process alone. `ratio_to_direct_side_by_side` is against as many processes that call
math-verify directly at the same time: two threads of one core are not two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing import get_context
from multiprocessing.pool import Pool as Processes
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.prompts.rows import BadRows, Columns, final_number, read_rows
from roll_async.rewards.math_rule import MathRule
from roll_async.rewards.serving.pool import RewardPool, RewardPoolOptions
from roll_async.schema import Reward, RewardStatus

BUDGET = 0.9
HANGING_BUDGET = 1.0
ROUNDS = 4
HANGING_SHARE = 0.01
FORMS = ("plain", "fraction")
HANGING = (r"\boxed{9^{9^{9^9}}}", r"\boxed{100000000!}", r"\boxed{\sum_{i=1}^{10^{12}} \frac{1}{i}}")
_STEP_MARKS = re.compile(r"<<[^>]*>>")
Sample = tuple[str, str, bool | None]
"""(response, gold answer, verdict it must get; None = it hangs)."""


def samples(path: str, count: int, seed: int, form: str = "plain") -> list[Sample]:
    """Solutions with their answers boxed, in turn right and wrong."""
    columns = Columns(messages=None, prompt="question", ground_truth="answer")
    gold = [final_number(row.ground_truth) for row in read_rows([path], columns, BadRows())]
    with open(path, encoding="utf-8") as file:
        solutions = [_STEP_MARKS.sub("", json.loads(line)["answer"]).rpartition("####")[0] for line in file]
    assert len(gold) == len(solutions)
    found: list[Sample] = []
    for number in range(count):
        place = number % len(gold)
        right = number % 2 == 0
        value = Fraction(gold[place]) + (not right)
        if form == "fraction":
            stated = rf"\frac{{{7 * value.numerator}}}{{{7 * value.denominator}}}"
        else:
            stated = gold[place] if right else str(float(value))
        found.append((f"{solutions[place]}The answer is \\boxed{{{stated}}}.", gold[place], right))
    random.Random(seed).shuffle(found)
    return found


def with_hanging(calm: Sequence[Sample], seed: int) -> list[Sample]:
    """HANGING_SHARE of them replaced, at random places of the first nine tenths: the last ones are to be waited for."""
    mixed = list(calm)
    places = random.Random(seed).sample(range(len(mixed) * 9 // 10), max(1, round(len(mixed) * HANGING_SHARE)))
    for number, place in enumerate(places):
        mixed[place] = (HANGING[number % len(HANGING)], "7", None)
    return mixed


def direct_seconds(calm: Sequence[Sample]) -> float:
    """What a script without a pool does: math-verify on the whole text, its own time-outs off, one process."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse(r"$\frac{1}{2}$", parsing_timeout=None)
    started = time.perf_counter()
    for text, gold, right in calm:
        found = verify(
            parse(f"${gold}$", parsing_timeout=None), parse(text, parsing_timeout=None), timeout_seconds=None
        )
        assert found == right, (text, gold)
    return time.perf_counter() - started


def rule_seconds(calm: Sequence[Sample]) -> float:
    """The same reward function the workers run, called in this process."""
    rule = MathRule()
    rule(r"\boxed{\frac{1}{2}}", "0.5", {})
    started = time.perf_counter()
    for text, gold, right in calm:
        assert (rule(text, gold, {}).score == 1.0) == right, (text, gold)
    return time.perf_counter() - started


@dataclass(slots=True)
class Calm:
    """Seconds of each way to judge the same samples, by round."""

    direct: list[float] = field(default_factory=list)
    side_by_side: list[float] = field(default_factory=list)
    """All of them in as many processes as there are workers, each calling math-verify directly."""
    rule: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    parent_cpu_s: float = 0.0
    """Processor time of the pool's own process, its callers included."""
    failed: int = 0

    def ratio(self, name: str, per: int) -> float:
        """Median over the rounds of the pool's rate, divided by `per`, against another way's."""
        seconds = getattr(self, name)
        return statistics.median(other / (pool * per) for other, pool in zip(seconds, self.pool, strict=True))


async def calm_run(calm: Sequence[Sample], num_workers: int, processes: Processes) -> Calm:
    """Rounds of each way on the same samples: what else the machine does meets all of them."""
    pool, found = RewardPool(RewardPoolOptions(reward="math_rule", num_workers=num_workers, timeout_s=60.0)), Calm()
    await pool.start()
    try:
        for number in range(ROUNDS):
            part = calm[number::ROUNDS]
            found.direct.append(direct_seconds(part))
            found.side_by_side.append(
                max(processes.map(direct_seconds, [part[n::num_workers] for n in range(num_workers)], 1))
            )
            found.rule.append(rule_seconds(part))
            cpu_s = time.process_time()
            taken, rewards = await pool_seconds(part, pool)
            found.parent_cpu_s += time.process_time() - cpu_s
            found.pool.append(taken)
            found.failed += failed_neighbours(part, rewards)
    finally:
        await pool.close()
    return found


async def hanging_run(mixed: Sequence[Sample], num_workers: int, timeout_s: float) -> tuple[float, int, int]:
    """(seconds, neighbours failed, processes replaced)."""
    pool = RewardPool(RewardPoolOptions(reward="math_rule", num_workers=num_workers, timeout_s=timeout_s))
    await pool.start()
    try:
        seconds, rewards = await pool_seconds(mixed, pool)
        return seconds, failed_neighbours(mixed, rewards), pool.timeouts + pool.crashes
    finally:
        await pool.close()


async def pool_seconds(asked: Sequence[Sample], pool: RewardPool) -> tuple[float, list[Reward]]:
    """All samples at once, as a rollout hands them over."""
    started = time.perf_counter()
    rewards = await asyncio.gather(*(pool.score(text, gold, {}) for text, gold, _ in asked))
    return time.perf_counter() - started, list(rewards)


def failed_neighbours(asked: Sequence[Sample], rewards: Sequence[Reward]) -> int:
    """Samples that got another verdict than alone; the hanging ones must get a time-out."""
    failed = 0
    for (_, _, right), reward in zip(asked, rewards, strict=True):
        if right is None:
            failed += reward.status is not RewardStatus.TIMEOUT
        else:
            failed += reward.status is not RewardStatus.OK or (reward.score == 1.0) != right
    return failed


def say(name: str, value: float, unit: str, ratio: float, budget: float, **more: object) -> None:
    upper = bool(more.get("upper", False))
    ok = (ratio <= budget if upper else ratio >= budget) and not more.get("failed", 0)
    line = {"name": name, "value": round(value, 2), "unit": unit, "ratio": round(ratio, 3), "budget": budget}
    print(json.dumps({**line, "ok": ok, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/gsm8k/test.jsonl")
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds a hanging expression may take")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    try:
        calm = {form: samples(args.data, args.samples, args.seed, form) for form in args.forms}
    except ValueError as error:
        sys.exit(f"verification: {error}")
    for form, asked in calm.items():
        for workers in args.workers:
            bench(form, asked, workers, args)


def bench(form: str, calm: Sequence[Sample], workers: int, args: argparse.Namespace) -> None:
    """Two lines: calm, and with hanging expressions."""
    count = len(calm)
    with get_context("spawn").Pool(workers) as processes:
        processes.map(direct_seconds, [calm[:50]] * workers, 1)  # each has imported what it needs
        found = asyncio.run(calm_run(calm, workers, processes))
    more = {
        "direct_per_s": round(count / sum(found.direct), 1),
        "direct_side_by_side_per_s": round(count / sum(found.side_by_side), 1),
        "ratio_to_direct_side_by_side": round(found.ratio("side_by_side", 1), 3),
        "same_rule_in_process_per_s": round(count / sum(found.rule), 1),
        "parent_cpu_us_per_sample": round(found.parent_cpu_s / count * 1e6, 1),
        "failed": found.failed,
    }
    name = f"verification_{form}_{workers}_workers"
    say(name, count / sum(found.pool), "1/s", found.ratio("direct", workers), BUDGET, **more)
    mixed = with_hanging(calm, args.seed)
    hanging = sum(right is None for *_, right in mixed)
    taken, failed, replaced = asyncio.run(hanging_run(mixed, workers, args.timeout))
    calm_s = sum(found.pool)
    lost, allowed = (taken - calm_s) * workers, hanging * args.timeout
    more = {"hanging": hanging, "timeout_s": args.timeout, "seconds": round(taken, 2), "calm_s": round(calm_s, 2)}
    more |= {"failed": failed, "replaced": replaced, "upper": True}
    say(f"{name}_hanging", lost, "worker s lost", lost / allowed, HANGING_BUDGET, **more)


if __name__ == "__main__":
    main()
