"""Everything that needs a CUDA device, as JSON lines; without one it says so and exits 0.

    python tools/gpu_suite.py [--only demo] [--steps 8]

demo: the CPU demo with Megatron and vLLM both on GPU 0 in two processes (weights through host memory), bf16, a few
synchronous steps: step time and the agreement of engine and trainer log-probs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "output" / "demo_assets"


def demo(steps: int) -> list[dict]:
    """The demo on one device: synchronous, because two roles that share a device take turns."""
    if not (ASSETS / "manifest.json").is_file():
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / "make_demo_assets.py"), "--output", str(ASSETS)], check=True
        )
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", "rlvr_config_sync_cpu.yaml",
            "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "actor_train.world_size=null",
            "actor_infer.world_size=null", "actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16",
            "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.2", f"max_steps={steps}", "eval_steps=0",
            f"output_dir={scratch}", "exp_name=gpu_demo", "num_gpus_per_node=1",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            tail = (done.stdout + done.stderr)[-2000:]
            return [{"name": "gpu/demo", "ok": False, "exit_code": done.returncode, "output": tail}]
        lines = (Path(scratch) / "gpu_demo" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines][1:]
    step = sum(m["time/step_s"] for m in metrics) / len(metrics)
    return [
        {"name": "gpu/demo/step_time", "value": round(step, 4), "unit": "s", "ok": True, "steps": len(metrics),
         "train_s": round(sum(m["time/train_s"] for m in metrics) / len(metrics), 4),
         "weight_sync_s": round(sum(m["time/weight_sync_s"] for m in metrics) / len(metrics), 4)},
        {"name": "gpu/demo/logprob_agreement", "value": max(abs(m["correction/kl"]) for m in metrics), "unit": "nat",
         "rho_max": max(m["correction/rho_max"] for m in metrics), "budget": 0.01, "upper": True,
         "ok": max(abs(m["correction/kl"]) for m in metrics) <= 0.01},
    ]  # fmt: skip


SUITE: dict[str, Callable[[int], list[dict]]] = {"demo": demo}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SUITE), action="append")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    about = {
        "name": "gpu/device",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(about), flush=True)
    ok = True
    for name in args.only or SUITE:
        for line in SUITE[name](args.steps):
            ok &= line["ok"]
            print(json.dumps(line), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
