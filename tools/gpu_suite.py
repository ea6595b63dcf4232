"""Everything that needs a CUDA device, as JSON lines; without one it says so and exits 0.

    python tools/gpu_suite.py [--only demo|trainer] [--steps 8] [--shape 0.5B 1.5B] [--device cuda]

demo: the CPU demo with Megatron and vLLM both on GPU 0 in two processes (weights through host memory), bf16, a few
synchronous steps: step time and the agreement of engine and trainer log-probs.
trainer: tokens/s, model FLOPs utilisation and peak memory of the Megatron trainer (packed, bf16) and of plain
Transformers on random-weight Qwen2.5 shapes with rows of up to 2k and 8k tokens, side by side. `--shape tiny --device
cpu` walks the same path without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "output" / "demo_assets"


PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "A10": 125}
"""Dense bf16, by a part of the device's name; the first that fits counts."""

LONGEST = (2048, 8192)
"""Tokens of the longest row."""


def demo(args: argparse.Namespace) -> list[dict]:
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
            "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.2", f"max_steps={args.steps}",
            "eval_steps=0",
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


def trainer(args: argparse.Namespace) -> Iterator[dict]:
    """Both sides of every shape and length, each in a process of its own, one after the other."""
    from gpu_trainer import write_model

    for shape in args.shape:
        with tempfile.TemporaryDirectory() as folder:
            write_model(shape, Path(folder))
            for longest in LONGEST if shape != "tiny" else (64,):
                sides = {side: run_side(side, shape, longest, folder, args) for side in ("megatron", "transformers")}
                yield compare(f"gpu/trainer/{shape}/{longest}", sides)


def run_side(side: str, shape: str, longest: int, folder: str, args: argparse.Namespace) -> dict:
    budget = max(longest, 8192) if shape != "tiny" else 128
    command = [
        sys.executable, str(ROOT / "tools" / "gpu_trainer.py"), "--side", side, "--shape", shape, "--folder", folder,
        "--longest", str(longest), "--tokens", str(8 * budget), "--budget", str(budget), "--steps", str(args.steps),
        "--device", args.device,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"exit_code": done.returncode, "output": (done.stdout + done.stderr)[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, sides: dict[str, dict]) -> dict:
    """One line; `ratio` is tokens/s of ours to those of plain Transformers. A side out of memory has no figures."""
    ours, plain = sides["megatron"], sides["transformers"]
    failed = [side for side, result in sides.items() if "exit_code" in result]
    line: dict = {"name": name, "unit": "tokens/s", "ok": not failed}
    for side, result in sides.items():
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
        line[side] = {**rounded, "mfu": utilisation(result)}
    if "tokens_per_s" in ours:
        line["value"] = round(ours["tokens_per_s"])
    if "tokens_per_s" in ours and "tokens_per_s" in plain:
        line["ratio"] = round(ours["tokens_per_s"] / plain["tokens_per_s"], 3)
        line["first_loss_difference"] = abs(ours["first_loss"] - plain["first_loss"])
    return line


def utilisation(result: dict) -> float | None:
    """Share of the device's peak; None without figures, or on a device that the table lacks."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in device), None)
    return None if peak is None or "tflops" not in result else round(result["tflops"] / peak, 4)


SUITE: dict[str, Callable[[argparse.Namespace], Iterable[dict]]] = {"demo": demo, "trainer": trainer}


def installed(package: str) -> str | None:
    """Its version, None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SUITE), action="append")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", choices=["tiny", "0.5B", "1.5B", "7B"], nargs="+", default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: trainer only")
    args = parser.parse_args()
    import torch

    if args.device == "cpu" and args.only != ["trainer"]:
        parser.error("--device cpu is for --only trainer")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    packages = ("megatron-core", "transformers", "transformer-engine", "flash-attn", "vllm")
    about = {
        "name": "gpu/device",
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{package: installed(package) for package in packages},
    }
    print(json.dumps(about), flush=True)
    ok = True
    for name in args.only or SUITE:
        for line in SUITE[name](args):
            ok &= line["ok"]
            print(json.dumps(line), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
