"""Pushes of a real run: all weights against only what changed (`weight_sync.sparse`), 50 steps each, in turn.

    python tools/bench/sparse_run.py [--assets output/demo_assets] [--steps 50] [--rates 1e-6] [--transport gloo]
                                     [KEY=VALUE ...]

The demo's config in bfloat16 over float32 main weights, as models are trained; a bfloat16 weight keeps its value until
its main weight has moved by half of its last bit. `sent_share` is the mean share of the values that travelled after the
first push, which is whole. Per push, medians: `mib` sent by the trainer, `push_s` from the export to the last
replica's proof, `stopped_s` in which engines generated nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_PUSH = re.compile(r"Parameter sync: version \d+ on .*, ([\d.]+) MiB in ([\d.]+) s \(engines stopped ([\d.]+) s")


def run(args: argparse.Namespace, rate: float, sparse: str) -> dict[str, float]:
    """Medians of the pushes of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", "rlvr_config_async_cpu.yaml",
            f"output_dir={folder}", "exp_name=run", f"pretrain={args.assets}/model",
            f"actor_train.data_args.file_name={args.assets}/train.jsonl",
            f"validation.data_args.file_name={args.assets}/validation.jsonl", "eval_steps=0", "save_steps=0",
            f"max_steps={args.steps}", "actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16",
            f"actor_train.training_args.learning_rate={rate}", f"weight_sync.transport={args.transport}",
            f"weight_sync.sparse={sparse}", *args.overrides,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        metrics = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        pushes = _PUSH.findall((Path(folder) / "run" / "run.log").read_text())[1:]  # the first is whole
    mib, push_s, stopped_s = (statistics.median(float(push[i]) for push in pushes) for i in range(3))
    shares = [m["weights/sent_share"] for m in metrics if "weights/sent_share" in m]
    return {
        "pushes": len(pushes),
        "mib": mib,
        "push_s": push_s,
        "stopped_s": stopped_s,
        "sent_share": statistics.mean(shares[1:]),
        "samples_per_s": (len(metrics) - 6) * 256 / (metrics[-1]["time_s"] - metrics[5]["time_s"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", default="output/demo_assets")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    for rate in args.rates:
        full, sparse = (run(args, rate, setting) for setting in ("off", "on"))
        print(
            json.dumps(
                {
                    "name": f"sparse_run {args.transport}, rate {rate:g}",
                    "value": round(sparse["mib"] / full["mib"], 4),
                    "unit": "bytes / full",
                    "full": {key: round(value, 4) for key, value in full.items()},
                    "sparse": {key: round(value, 4) for key, value in sparse.items()},
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
