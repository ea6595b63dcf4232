"""Asynchronous against synchronous: same seeds, same number of samples, `async_generation_ratio` 0 against 1, in one run.

    python tools/bench/async_vs_sync.py [--steps 20] [--config rlvr_config_async_cpu.yaml] [KEY=VALUE ...]

T_gen and T_train come from the synchronous run (where they do not overlap): the wait for a batch, and everything else.
`bound` = (T_gen + T_train) / max(T_gen, T_train), what perfect overlap would give; `ratio` = speedup / bound.
Needs the demo assets (`make demo-assets`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(config: str, ratio: float, steps: int, folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """One run; its metrics, one dict per step."""
    name = f"ratio_{ratio:g}"
    command = [
        sys.executable,
        str(ROOT / "examples" / "start_rlvr_pipeline.py"),
        "--config",
        config,
        f"async_generation_ratio={ratio}",
        f"max_steps={steps}",
        f"output_dir={folder}",
        f"exp_name={name}",
        "eval_steps=0",
        "save_steps=0",
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4, help="steps left out of both runs")
    parser.add_argument("--config", default="rlvr_config_async_cpu.yaml")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sync = run(args.config, 0, args.steps, Path(scratch), args.overrides)[args.warmup :]
        overlapped = run(args.config, 1, args.steps, Path(scratch), args.overrides)[args.warmup :]
    step_sync = statistics.mean(m["time/step_s"] for m in sync)
    step_async = statistics.mean(m["time/step_s"] for m in overlapped)
    generation = statistics.mean(m["time/wait_batch_s"] for m in sync)
    training = step_sync - generation
    bound = (generation + training) / max(generation, training)
    speedup = step_sync / step_async
    line = {
        "name": "async_vs_sync",
        "value": round(speedup, 3),
        "unit": "x",
        "speedup": round(speedup, 3),
        "bound": round(bound, 3),
        "ratio": round(speedup / bound, 3),
        "budget": 0.9,
        "ok": speedup / bound >= 0.9,
        "t_gen_s": round(generation, 3),
        "t_train_s": round(training, 3),
        "step_sync_s": round(step_sync, 3),
        "step_async_s": round(step_async, 3),
        "steps": len(sync),
        "staleness_max": max(m["staleness/max"] for m in overlapped),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
