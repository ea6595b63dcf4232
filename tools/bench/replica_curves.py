"""Whether the demo learns alike with one engine replica and with four.

    python tools/bench/replica_curves.py [--replicas 1 4] [--seeds 3] [--first-seed 0] [--steps 40]

Engines of one run sample with seeds of their own; with the same seed the answers of a group repeat each other, its
scores have no spread, and the curve of several replicas lies below that of one. Reward is exact match at temperature 1,
so its mean is the accuracy. One JSON line per run with the curve in five parts, then one that compares the mean over
the last quarter of the steps: alike = within two standard errors over the seeds. Exit 1 when it is not. Uses the demo
assets (`make demo-assets`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs=2, default=[1, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="output/replica_curves")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    ends = {count: curves(count, args) for count in args.replicas}
    few, many = (ends[count] for count in args.replicas)
    error = math.sqrt(sum(statistics.variance(e) / len(e) for e in (few, many))) if args.seeds > 1 else math.inf
    difference = statistics.mean(many) - statistics.mean(few)
    line = {
        "name": "replica_curves/difference",
        "value": round(difference, 4),
        "unit": "accuracy",
        "replicas": args.replicas,
        "standard_error": round(error, 4) if math.isfinite(error) else None,
        "ok": abs(difference) <= 2 * error,
    }
    print(json.dumps(line), flush=True)
    return int(not line["ok"])


def curves(replicas: int, args: argparse.Namespace) -> list[float]:
    """Accuracy at the end of each seed's run."""
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from tools.sweep import Sweep

    def config(seed: int):
        overrides = (
            f"actor_infer.world_size={replicas}",
            f"async_training.max_concurrent_per_server={256 // replicas}",
            f"seed={seed}",
            f"max_steps={args.steps}",
            f"output_dir={args.output}",
            f"exp_name=replicas_{replicas}_{seed}",
            "eval_steps=0",
            "save_steps=0",
            "ledger.enable=false",
        )
        return load(str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"), overrides, "rlvr")

    ends = []
    with (
        ray_runtime(num_processes=3 + replicas, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config(0), runtime) as sweep,
    ):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            metrics = sweep.run(config(seed))
            curve = [m["reward/mean"] for m in metrics]
            part = max(1, len(curve) // 5)
            ends.append(statistics.mean(curve[-max(1, len(curve) // 4) :]))
            line = {
                "name": f"replica_curves/{replicas}",
                "value": round(ends[-1], 4),
                "unit": "accuracy",
                "seed": seed,
                "steps": len(curve),
                "curve": [round(statistics.mean(curve[i : i + part]), 3) for i in range(0, len(curve), part)],
                "duplicate_share": round(statistics.mean(m["rollout/duplicate_share"] for m in metrics), 4),
                "replicas_used": replicas,
            }
            print(json.dumps(line), flush=True)
    return ends


if __name__ == "__main__":
    sys.exit(main())
