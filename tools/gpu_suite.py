"""Everything that needs a CUDA device, as JSON lines, each as soon as it is known; without one it says so and exits 0.

    python tools/gpu_suite.py [--only demo|trainer|CASE] [--shape 0.5B 1.5B] [--longest 2048] [--side megatron]

demo: the CPU demo with Megatron and vLLM both on GPU 0 in two processes (weights through host memory), bf16, a few
synchronous steps: step time and the agreement of engine and trainer log-probs.
resident: the same with both at work at the same time, ratio 1: samples/s beside those of turns.
trainer: tokens/s, model FLOPs utilisation and peak memory of the Megatron trainer (packed, bf16) and of plain
Transformers on random-weight Qwen2.5 shapes with rows of up to 2k and 8k tokens: a line per side, then their ratio.
CASE: moe, resume, packing, attention, engine, tensor2, context2, offload; ipc, nccl, engine2, sglang_ipc, sglang_nccl,
sleep, fp8, pushes, graphs, adapters, experts. See gpu_cases.py and gpu_engine_cases.py; the way of each but the kernels
runs with --device cpu, too.
A side or case that takes longer than --limit seconds is ended, and its line says so; a case with an engine
has ENGINE_START_S more. --table FILE... prints lines of earlier runs as a table instead. `--device cpu --shape tiny`
walks all but these two without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "output" / "demo_assets"
DEMO_CONFIG = "rlvr_config_sync_cpu.yaml"
DEMO_LIMIT_S = 400
SIDES = ("megatron", "transformers")

PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "A10": 125}
"""Dense bf16, by a part of the device's name; the first that fits counts."""

K3_BUDGET, RHO_MAX_BUDGET = 1e-3, 1.5
"""Engine against trainer in bf16, per token: the mean of exp(d) - 1 - d over differences d (a standard deviation of
0.045), and the largest exp(d) of a run.
"""


ENGINE_START_S = 60.0
WITH_AN_ENGINE = ("engine2", "sglang_ipc", "sglang_nccl", "sleep", "fp8", "pushes", "graphs", "adapters", "experts")
"""An import, a profile of memory and, with graphs, a capture take ENGINE_START_S, whatever is tested then."""


def demo(args: argparse.Namespace) -> Iterator[dict]:
    """The demo on one device: synchronous, because two roles that share a device take turns."""
    found = demo_metrics(args.steps)
    yield from [found] if isinstance(found, dict) else demo_lines(found)


RESIDENT = ("colocation=resident", "async_generation_ratio=1")
SAMPLES = 256
"""A step of DEMO_CONFIG."""


def resident(args: argparse.Namespace) -> Iterator[dict]:
    """The demo on one device by turns, and with trainer and engine at work at the same time, one after the other."""
    runs = []
    for more in ((), RESIDENT):
        found = demo_metrics(args.steps + 2, more)
        if isinstance(found, dict):
            yield {**found, "name": "gpu/resident", "settings": list(more)}
            return
        runs.append(found)
    yield resident_line(*runs)


def resident_line(turns: Sequence[Mapping[str, float]], beside: Sequence[Mapping[str, float]]) -> dict:
    """The first two steps of each do not count: one starts, and the second finds a batch that was made meanwhile."""

    def rate(metrics: Sequence[Mapping[str, float]]) -> float:
        first, *_, last = metrics[1:]
        return SAMPLES * (last["step"] - first["step"]) / (last["time_s"] - first["time_s"])

    ratio, oldest = rate(beside) / rate(turns), max(step["staleness/max"] for step in beside)
    return {
        "name": "gpu/resident", "value": round(ratio, 3), "unit": "x turns", "budget": 1.0, "upper": False,
        "ok": ratio >= 1.0 and oldest <= 1, "samples_per_s": round(rate(beside), 1),
        "turns_samples_per_s": round(rate(turns), 1), "staleness_max": oldest,
        "rho_max": max(step["correction/rho_max"] for step in beside),
    }  # fmt: skip


def demo_metrics(steps: int, more: Sequence[str] = ()) -> list[dict] | dict:
    """What a run of the demo wrote for each step; else the line that says why there is none."""
    missing = [package for package in ("ray", "vllm") if find_spec(package) is None]
    if missing:
        return {"name": "gpu/demo", "ok": True, "skipped": f"not installed: {', '.join(missing)}"}
    if not (ASSETS / "manifest.json").is_file():
        script = [sys.executable, str(ROOT / "tools" / "make_demo_assets.py"), "--output", str(ASSETS)]
        made = finish(script, DEMO_LIMIT_S, {"CUDA_VISIBLE_DEVICES": ""})
        if isinstance(made, dict):
            return {"name": "gpu/demo/assets", "ok": False, **made}
    with tempfile.TemporaryDirectory() as scratch:
        script = [sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", DEMO_CONFIG]
        done = finish([*script, *demo_overrides(scratch, steps), *more], DEMO_LIMIT_S)
        if isinstance(done, dict):
            return {"name": "gpu/demo", "ok": False, **done}
        lines = (Path(scratch) / "gpu_demo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def demo_overrides(output: str, steps: int) -> list[str]:
    """What makes the CPU demo one on GPU 0."""
    return [
        "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "actor_train.world_size=null",
        "actor_infer.world_size=null", "actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16",
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.2", f"max_steps={steps}", "eval_steps=0",
        f"output_dir={output}", "exp_name=gpu_demo", "num_gpus_per_node=1",
    ]  # fmt: skip


def demo_lines(metrics: Sequence[Mapping[str, float]]) -> list[dict]:
    """Times leave out the first step, which warms up, where there is another."""
    timed = metrics[1:] or metrics
    if not timed:
        return [{"name": "gpu/demo", "ok": False, "output": "no step was recorded"}]

    def mean(key: str) -> float:
        return round(sum(step[key] for step in timed) / len(timed), 4)

    k3, rho = (max(step[f"correction/{key}"] for step in metrics) for key in ("k3", "rho_max"))
    return [
        {"name": "gpu/demo/step_time", "value": mean("time/step_s"), "unit": "s", "ok": True, "steps": len(timed),
         "train_s": mean("time/train_s"), "weight_sync_s": mean("time/weight_sync_s")},
        {"name": "gpu/demo/logprob_agreement", "value": k3, "unit": "k3", "budget": K3_BUDGET, "rho_max": rho,
         "rho_max_budget": RHO_MAX_BUDGET, "upper": True, "ok": k3 <= K3_BUDGET and rho <= RHO_MAX_BUDGET},
    ]  # fmt: skip


def trainer(args: argparse.Namespace) -> Iterator[dict]:
    """Both sides of every shape and length, each in a process of its own, one after the other."""
    for shape in args.shape:
        with tempfile.TemporaryDirectory() as folder:
            common = ["--shape", shape, "--folder", folder, "--device", args.device]
            written = play("gpu_trainer.py", ["--side", "write", *common], args.limit)
            if not written["ok"]:
                yield {"name": f"gpu/trainer/{shape}/model", **written}
                continue
            for longest in args.longest if shape != "tiny" else (64,):
                name, budget = f"gpu/trainer/{shape}/{longest}", tokens_of_micro_batch(shape, longest)
                work = ["--longest", longest, "--tokens", 8 * budget, "--budget", budget, "--steps", args.steps]
                sides = {}
                for side in args.side:
                    counted = ["--launches"] if args.launches else []
                    result = play("gpu_trainer.py", ["--side", side, *common, *map(str, work), *counted], args.limit)
                    sides[side] = result
                    yield {"name": f"{name}/{side}", "unit": "tokens/s", **result, "mfu": utilisation(result)}
                if all(side in sides and sides[side]["ok"] for side in SIDES):
                    yield compare(name, **sides)


def tokens_of_micro_batch(shape: str, longest: int) -> int:
    if shape == "tiny":
        return 128
    return max(longest, 4096 if shape == "7B" else 8192)  # 18 bytes a parameter leave 7B little room for activations


def compare(name: str, megatron: dict, transformers: dict) -> dict:
    """`ratio` is tokens/s of ours to those of plain Transformers."""
    return {
        "name": name,
        "unit": "ratio",
        "ok": True,
        "value": round(megatron["value"] / transformers["value"], 3),
        "first_loss_difference": abs(megatron["first_loss"] - transformers["first_loss"]),
    }


def case(args: argparse.Namespace, name: str) -> Iterator[dict]:
    """One case of gpu_cases.py."""
    limit_s = args.limit + ENGINE_START_S * (name in WITH_AN_ENGINE)
    yield {"name": f"gpu/{name}", **play("gpu_cases.py", [name, "--device", args.device], limit_s)}


def play(script: str, arguments: Sequence[str], limit_s: float) -> dict:
    """The JSON object that a script prints last, with `ok`; why there is none."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = finish([sys.executable, str(ROOT / "tools" / script), *arguments], limit_s, environment)
    result = {"ok": False, **done} if isinstance(done, dict) else json.loads(done.splitlines()[-1])
    return {**result, "limit_s": limit_s}


LOOKS_S = 0.5
"""Between two looks at a command under way."""


def finish(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    enough: Callable[[], bool] | None = None,
) -> str | dict:
    """What a command printed; of one that failed, or was ended with all it had started, what to say of it. `enough`:
    asked every LOOKS_S; true ends the command with all it has started, and is no failure.
    """
    # Files: a pipe would be waited for as long as anything the command left behind holds it.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            problem: dict = {"exit_code": code} if (code := wait(process, limit_s, enough)) else {}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            problem = {"timed_out_after_s": limit_s}
        output.seek(0)
        errors.seek(0)
        printed = output.read()
        return {**problem, "output": (printed + errors.read())[-2000:]} if problem else printed


def wait(process: subprocess.Popen[bytes], limit_s: float, enough: Callable[[], bool] | None) -> int:
    """The exit code, 0 of one that is ended because of `enough`. Raises subprocess.TimeoutExpired."""
    if enough is None:
        return process.wait(limit_s)
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return process.wait(LOOKS_S)
        except subprocess.TimeoutExpired:
            if enough():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return 0
            if time.monotonic() > until_s:
                raise


def utilisation(result: dict) -> float | None:
    """Share of the device's peak; None without figures, or on a device that the table lacks."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in device), None)
    return None if peak is None or "tflops" not in result else round(result["tflops"] / peak, 4)


CASES = ("moe", "resume", "packing", "attention", "engine", "tensor2", "context2", "offload",
         "ipc", "nccl", "engine2", "sglang_ipc", "sglang_nccl", "sleep", "fp8", "pushes", "graphs", "adapters",
         "experts")  # fmt: skip
"""Of gpu_cases.py and gpu_engine_cases.py."""

SUITE: dict[str, Callable[[argparse.Namespace], Iterable[dict]]] = {
    **{name: partial(case, name=name) for name in CASES},
    "demo": demo,
    "resident": resident,
    "trainer": trainer,
}


def table(lines: Sequence[Mapping]) -> str:
    """A row for each figure, under the card and the versions it was made with."""
    rows = ["| what | figure | | budget | ok |", "|---|---|---|---|---|"]
    about = next((line for line in lines if line["name"] == "gpu/device"), {})
    head = ", ".join(f"{key} {value}" for key, value in about.items() if key != "name" and value)
    more = ("mfu", "peak_gb", "launches", "device_busy_s", "step_s", "row_by_row", "kernel", "skipped")
    for line in lines:
        if line["name"] in ("gpu/device", "machine"):
            continue
        figure = f"{line['value']:.4g} {line.get('unit', '')}" if "value" in line else ""
        besides = ", ".join(f"{key} {line[key]}" for key in more if line.get(key) is not None)
        rows.append(f"| {line['name']} | {figure} | {besides} | {line.get('budget', '')} | {line['ok']} |")
    return "\n".join([head, "", *rows])


def driver() -> str | None:
    """Version of NVIDIA's driver; None where nvidia-smi is not there to say it."""
    if which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return done.stdout.split("\n")[0].strip() or None


def installed(package: str) -> str | None:
    """Its version, None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SUITE), action="append")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a side; steps of the demo")
    parser.add_argument("--shape", choices=["tiny", "0.5B", "1.5B", "7B"], nargs="+", default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--longest", type=int, nargs="+", default=[2048, 8192], help="tokens of the longest row")
    parser.add_argument("--side", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a side or case")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: all but demo and resident")
    parser.add_argument("--launches", action="store_true", help="count the kernels of a step of both trainers")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="of the JSON lines in these files")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(x) for file in args.table for x in file.read_text().splitlines() if x[:1] == "{"]))
        return 0
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if args.device == "cpu" and {"demo", "resident"} & set(args.only or SUITE):
        parser.error("--device cpu is for --only trainer and the cases of gpu_cases.py")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    packages = ("megatron-core", "transformers", "transformer-engine", "flash-attn", "vllm", "sglang", "apex", "ray")
    about = {
        "name": "gpu/device",
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "driver": driver() if args.device == "cuda" else None,
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
