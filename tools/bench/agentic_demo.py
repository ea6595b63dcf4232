"""The agentic demos, asynchronous and synchronous: success on unseen worlds before and after training, by seed.

    python tools/bench/agentic_demo.py [--config agentic_frozen_lake_async_cpu.yaml] [--seeds 1 2 3] [--ratios 1 0]
                                       [--log rows.jsonl] [-- KEY=VALUE ...]

`before` is the start model on the worlds of validation (`roll-async rollout`), `after` the mean of the run's last
validation, both at the config's own validation settings, and on worlds that no training step sees. Seconds are those
from the launcher's start to its end, start and end of all processes included. `--log` keeps each run as it ends, and a
later call goes on with the runs that are missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BUDGET_POINTS, BUDGET_S = 0.25, 600.0


def call(*command: str) -> float:
    """Run it; seconds. Ends the bench with what it printed when it fails."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return time.perf_counter() - started


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(config: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The start model on validation's worlds, four batches of them."""
    output = folder / "before"
    call("-m", "roll_async.cli", "rollout", "--config", config, "--batches", "4", "--output", str(output), *overrides)
    return {
        "run": "before",
        "success": statistics.mean(m["validation/reward"] for m in lines(output / "metrics.jsonl")),
    }


def trained(config: str, overrides: list[str], folder: Path, seed: int, ratio: float) -> dict[str, Any]:
    name = f"seed_{seed}_ratio_{ratio:g}"
    seconds = call(
        "examples/start_agentic_pipeline.py",
        *("--config", config, f"seed={seed}", f"async_generation_ratio={ratio:g}", f"output_dir={folder}"),
        *(f"exp_name={name}", *overrides),
    )
    steps = lines(folder / name / "metrics.jsonl")
    return {
        "run": name,
        "ratio": ratio,
        "success": [m["validation/reward"] for m in steps if "validation/reward" in m],
        "seconds": round(seconds, 1),
        "step_s": round(statistics.median(m["time/step_s"] for m in steps), 3),
        "steps": len(steps),
    }


def spread(values: list[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.pstdev(values):.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="agentic_frozen_lake_async_cpu.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--log", type=Path, help="a file of one line per run")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    rows = {row["run"]: row for row in lines(args.log)} if args.log and args.log.is_file() else {}

    def keep(row: dict[str, Any]) -> None:
        rows[row["run"]] = row
        print(json.dumps(row), flush=True)
        if args.log:
            with args.log.open("a") as log:
                print(json.dumps(row), file=log)

    with tempfile.TemporaryDirectory() as scratch:
        if "before" not in rows:
            keep(start(args.config, args.overrides, Path(scratch)))
        for seed in args.seeds:
            for ratio in args.ratios:
                if f"seed_{seed}_ratio_{ratio:g}" not in rows:
                    keep(trained(args.config, args.overrides, Path(scratch), seed, ratio))
    before = rows["before"]["success"]
    for ratio in args.ratios:
        runs = [rows[f"seed_{seed}_ratio_{ratio:g}"] for seed in args.seeds]
        after = [run["success"][-1] for run in runs]
        seconds = [run["seconds"] for run in runs]
        line = {
            "name": f"agentic_demo/{Path(args.config).stem}/ratio_{ratio:g}",
            "value": round(statistics.mean(after) - before, 3),
            "unit": "success gained",
            "before": round(before, 3),
            "after": spread(after),
            "seconds": spread(seconds, 0),
            "step_s": spread([run["step_s"] for run in runs]),
            "budget": BUDGET_POINTS,
            "ok": statistics.mean(after) - before >= BUDGET_POINTS and max(seconds) <= BUDGET_S,
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
