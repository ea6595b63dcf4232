"""Whether the shipped `rlvr_offpolicy_*_cpu` configs, two batches ahead, keep and raise the accuracy they start with.

    python tools/bench/offpolicy_configs.py [--steps 40] [--seeds 2] [--output output/offpolicy_configs]

Reward is exact match at temperature 1, so its mean is the accuracy; start: steps 1 to 3, sampled by the warm-started
model; end: the last 5. Exit 1 if a run ends below its start. One JSON line per run. Uses the demo assets
(`make demo-assets`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VARIANTS = ("vanilla", "tis", "cispo", "topr", "kimi15")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", default="output/offpolicy_configs")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from tools.sweep import Sweep

    def config(variant: str, seed: int):
        overrides = (
            f"seed={seed}",
            f"max_steps={args.steps}",
            f"output_dir={args.output}",
            f"exp_name={variant}_{seed}",
            "eval_steps=0",
            "save_steps=0",
            "ledger.enable=false",
        )
        return load(str(ROOT / "configs" / f"rlvr_offpolicy_{variant}_cpu.yaml"), overrides, "rlvr")

    lost = False
    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config(VARIANTS[0], 0), runtime) as sweep,
    ):
        for variant in VARIANTS:
            for seed in range(args.seeds):
                metrics = sweep.run(config(variant, seed))
                curve = [m["reward/mean"] for m in metrics]
                start, end = statistics.mean(curve[:3]), statistics.mean(curve[-5:])
                lost = lost or end < start
                line = {
                    "name": f"offpolicy_configs/{variant}",
                    "value": round(end, 3),
                    "unit": "accuracy",
                    "start": round(start, 3),
                    "lowest": round(min(curve), 3),
                    "ok": end >= start,
                    "seed": seed,
                    "steps": len(curve),
                    "staleness_mean": round(statistics.mean(m["staleness/mean"] for m in metrics), 2),
                    "staleness_max": max(m["staleness/max"] for m in metrics),
                }
                print(json.dumps(line), flush=True)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
