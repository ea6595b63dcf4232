"""The recipes of docs_roll/recipes.md as a user types them: several seeds of each, a table, and a curve with its band.

    python tools/bench/recipes.py [NAME ...] [--seeds 3] [--output output/recipes] [--figures docs_roll/figures]
                                  [--set KEY=VALUE ...]

A run is `roll-async run --config CONFIG seed=N`, with all its processes (those of `off_policy` start once, by
`tools/sweep.py`); what it needs is made first where it is missing. Finished runs are kept in runs.jsonl of the output
folder and not repeated, so the script may be stopped and started again. The figure of a recipe (`recipe_NAME.png`):
reward of the training samples and of the validations, mean and standard deviation over seeds. `start` and `end` of the
table are the rewards of the first and last three steps.

Budget: every recipe ends above its start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ROLL_ASYNC = ("-m", "roll_async.cli")
DEMO_ASSETS = {"output/demo_assets/model": (*ROLL_ASYNC, "demo", "--assets-only")}
AGENTIC_ASSETS = {"output/agentic_assets/model": (*ROLL_ASYNC, "demo", "--assets-only", "agents")}
WORD_PROBLEMS = {
    "output/word_problems/model": (*ROLL_ASYNC, "demo", "--assets-only", "word_problems"),
    "output/sft_word_problems/hf": (*ROLL_ASYNC, "sft", "sft_word_problems_cpu"),
}
IMAGES = {
    "output/images/model": (*ROLL_ASYNC, "demo", "--assets-only", "images"),
    "output/sft_images/hf": (*ROLL_ASYNC, "sft", "sft_images_cpu"),
}
EDGE = 3
"""Steps of the start and of the end of a curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`needs`: what makes each folder that must be there. `runs`: config and overrides of each curve."""

    needs: Mapping[str, Sequence[str]]
    runs: Mapping[str, Sequence[str]]
    start_once: bool = False
    """Its runs differ in nothing that shapes a process."""


RECIPES = {
    "addition": Recipe(needs=DEMO_ASSETS, runs={"addition": ("rlvr_config_async_cpu", "max_steps=60")}),
    "word_problems": Recipe(needs=WORD_PROBLEMS, runs={"word problems": ("rlvr_word_problems_cpu",)}),
    "images": Recipe(needs=IMAGES, runs={"dots in pictures": ("rlvr_images_cpu",)}),
    "frozen_lake": Recipe(needs=AGENTIC_ASSETS, runs={"FrozenLake": ("agentic_frozen_lake_async_cpu", "max_steps=40")}),
    "calculator": Recipe(needs=AGENTIC_ASSETS, runs={"calculator": ("agentic_calculator_cpu", "max_steps=30")}),
    "off_policy": Recipe(
        needs=DEMO_ASSETS,
        runs={
            loss: (f"rlvr_offpolicy_{loss}_cpu", "max_steps=25", "eval_steps=0", "save_steps=0")
            for loss in ("vanilla", "tis", "cispo", "topr", "kimi15")
        },
        start_once=True,
    ),
}


def call(*command: str) -> None:
    """Run it. Ends the bench with what it printed when it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; none where it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


Start = Callable[[str, Sequence[str]], None]
"""Runs a config with overrides to its end."""


def by_command(config: str, overrides: Sequence[str]) -> None:
    """As it is typed."""
    call(*ROLL_ASYNC, "run", "--config", config, *overrides)


def in_sweep(stack: ExitStack) -> Start:
    """Runs whose processes start with the first of them, and end with `stack`."""
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from tools.sweep import Sweep

    started: list[Sweep] = []

    def start(config: str, overrides: Sequence[str]) -> None:
        loaded = load(ROOT / "configs" / f"{config}.yaml", overrides, "rlvr")
        if not started:
            runtime = stack.enter_context(ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}))
            started.append(stack.enter_context(Sweep(loaded, runtime)))
        started[0].run(loaded)

    return start


def run(name: str, curve: str, seed: int, start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """One run from its start to its end; what is kept of it."""
    config, *overrides = RECIPES[name].runs[curve]
    folder, label = Path(args.output).resolve(), f"{curve.replace(' ', '_')}_{seed}"
    given = (*overrides, *args.set, f"seed={seed}", f"output_dir={folder}", f"exp_name={label}")
    started = time.perf_counter()
    start(config, given)
    seconds, steps = time.perf_counter() - started, lines(folder / label / "metrics.jsonl")
    return {
        "recipe": name,
        "curve": curve,
        "seed": seed,
        "config": config,
        "seconds": round(seconds, 1),
        "step_s": round(statistics.median(m["time/step_s"] for m in steps), 3),
        "staleness": round(statistics.mean(m["staleness/mean"] for m in steps), 2),
        "reward": [round(m["reward/mean"], 4) for m in steps],
        "validation": [[int(m["step"]), round(m["validation/reward"], 4)] for m in steps if "validation/reward" in m],
    }


def gained(reward: Sequence[float]) -> float:
    """Mean of the last EDGE steps less that of the first.

    >>> gained([0.0, 0.25, 0.5, 0.5, 0.75, 1.0])
    0.5
    """
    return statistics.mean(reward[-EDGE:]) - statistics.mean(reward[:EDGE])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation over seeds; one value alone as it is."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; a line per curve.

    >>> print(table([{"curve": "a", "config": "c", "seconds": 90, "step_s": 1.0, "staleness": 0.5,
    ...               "reward": [0.0, 0.25, 1.0], "validation": [[3, 0.75]]}]).splitlines()[-1])
    | a | `c` | 1 | 1.5 | 1.00 | 0.50 | 0.417 | 0.417 | 0.750 |
    """
    heads = ("curve", "config", "seeds", "minutes", "step, s", "staleness", "start", "end", "last validation")
    said = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [row for row in rows if row["curve"] == curve]
        validated = [row["validation"][-1][1] for row in mine if row["validation"]]
        cells = (
            curve,
            f"`{mine[0]['config']}`",
            str(len(mine)),
            spread([row["seconds"] / 60 for row in mine], 1),
            spread([row["step_s"] for row in mine], 2),
            spread([row["staleness"] for row in mine], 2),
            spread([statistics.mean(row["reward"][:EDGE]) for row in mine]),
            spread([statistics.mean(row["reward"][-EDGE:]) for row in mine]),
            spread(validated) if validated else "",
        )
        said.append("| " + " | ".join(cells) + " |")
    return "\n".join(said)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rewards over steps: a line and a band per curve, validations as points with their spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def centre(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
        means = [statistics.mean(v) for v in values]
        return means, [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]

    figure, axis = pyplot.subplots(figsize=(7.5, 3.8), layout="constrained")
    for number, curve in enumerate(dict.fromkeys(row["curve"] for row in rows)):
        mine, colour = [row for row in rows if row["curve"] == curve], f"C{number}"
        means, errors = centre([*zip(*(row["reward"] for row in mine), strict=False)])
        steps = range(1, len(means) + 1)
        axis.plot(steps, means, color=colour, label=f"{curve}, {len(mine)} seeds")
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        points = [*zip(*(row["validation"] for row in mine), strict=False)]
        if points:
            means, errors = centre([[value for _, value in point] for point in points])
            axis.errorbar([p[0][0] for p in points], means, errors, color=colour, fmt="o", capsize=3, mfc="white")
    axis.set(xlabel="step", ylabel="reward; points: validation")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Exit 1: a recipe ends at or below its start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all without one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="output/recipes")
    parser.add_argument("--figures", default=str(ROOT / "docs_roll" / "figures"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in RECIPES]
    if unknown:
        parser.error(f"no recipe {', '.join(unknown)}; there are: {', '.join(RECIPES)}")
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    kept, lost = Path(args.output) / "runs.jsonl", False
    kept.parent.mkdir(parents=True, exist_ok=True)
    names = args.names or [*RECIPES]
    with ExitStack() as stack:
        sweep = in_sweep(stack)
        for seed, name in itertools.product(range(args.seeds), names):  # an unfinished experiment covers all recipes
            for folder, maker in RECIPES[name].needs.items():
                if not (ROOT / folder).is_dir():
                    call(*maker)
            for curve in RECIPES[name].runs:
                if not any((row["curve"], row["seed"]) == (curve, seed) for row in lines(kept)):
                    row = run(name, curve, seed, sweep if RECIPES[name].start_once else by_command, args)
                    with kept.open("a") as file:
                        print(json.dumps(row), file=file)
                    print(f"{curve}, seed {seed}: {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    for name in names:
        rows = [row for row in lines(kept) if row["recipe"] == name]
        plot(rows, Path(args.figures) / f"recipe_{name}.png")
        print(table(rows))
        for curve in RECIPES[name].runs:
            gains = [gained(row["reward"]) for row in rows if row["curve"] == curve]
            ok = statistics.mean(gains) > 0
            lost = lost or not ok
            value = round(statistics.mean(gains), 3)
            print(json.dumps({"name": f"recipes/{curve}", "value": value, "unit": "reward gained", "ok": ok}))
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
