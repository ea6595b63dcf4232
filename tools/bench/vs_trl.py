"""TRL's GRPOTrainer against this project: same checkpoint, prompts, 32 x 8 samples a step, learning rate, temperature;
in turn.

    python tools/bench/vs_trl.py [--steps 40] [--assets output/demo_assets] [--venv FOLDER] [key=value ...]

TRL gets a virtual environment of its own, made here. Both runs may use all cores, each with the settings that make it
fastest on a CPU: TRL in float32 (`--trl-bf16`: in bfloat16, which is slower there), ours the demo's file with SETTINGS
and a trainer in bfloat16 where the processor has instructions for it, else in float32.
samples/s leaves out start-up and the first 5 steps; accuracy is measured afterwards by the same code for both:
temperature 1 on the held-out problems, 5 samples each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SKIPPED = 5

SETTINGS = (
    "algorithm.proximal_logprobs=behaviour",  # one optimizer step a batch: TRL computes no old log-probs either
    "async_training.interrupt.mode=keep",
    "actor_infer.strategy_args.strategy_config.enable_prefix_caching=false",  # prompts are 8 tokens long
)

TRL_RUN = r"""
import json, os, sys, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from roll_async.rewards.exact_match import ExactMatch

assets, output, steps, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
bf16 = sys.argv[5] == "bf16"
torch.set_num_threads(os.cpu_count())
rows = [json.loads(line) for line in open(f"{assets}/train.jsonl")]
data = Dataset.from_list([{"prompt": r["messages"][0]["content"], "ground_truth": r["ground_truth"]} for r in rows])
judge = ExactMatch()

def reward(completions, ground_truth, **_):
    return [judge(c, g, {}).score for c, g in zip(completions, ground_truth)]

times = []

class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        times.append(time.time())

config = GRPOConfig(
    output_dir=output, per_device_train_batch_size=256, gradient_accumulation_steps=1, num_generations=8,
    max_completion_length=96, temperature=1.0, learning_rate=rate, lr_scheduler_type="constant", max_steps=steps,
    beta=0.0, use_cpu=True, bf16=bf16, logging_steps=1, save_strategy="no",
    report_to="none", gradient_checkpointing=False, seed=42, disable_tqdm=True,
)
model = AutoModelForCausalLM.from_pretrained(f"{assets}/model", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(f"{assets}/model", padding_side="left")
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
)
trainer.train()
model.save_pretrained(output + "/final"); tokenizer.save_pretrained(output + "/final")
rewards = [h["reward"] for h in trainer.state.log_history if "reward" in h]
print("RESULT " + json.dumps({"times": times, "rewards": rewards}))
"""


def run_trl(python: str, assets: Path, output: Path, steps: int, rate: float, dtype: str) -> dict:
    """samples/s, reward curve and folder of TRL's run."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        [python, "-c", TRL_RUN, str(assets), str(output), str(steps), str(rate), dtype],
        env=env,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    result = json.loads(lines[0].removeprefix("RESULT "))
    times = result["times"]
    return {
        "samples_per_s": (len(times) - 1 - SKIPPED) * 256 / (times[-1] - times[SKIPPED]),
        "reward_last_5": sum(result["rewards"][-5:]) / 5,
        "folder": output / "final",
    }


def run_ours(assets: Path, output: Path, steps: int, rate: float, overrides: list[str]) -> dict:
    """The same of our run."""
    from roll_async.config.processor import multiplies_bf16

    dtype = "bf16" if multiplies_bf16() else "fp32"  # float32 main weights, optimizer and engine in both cases
    command = [
        sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", "rlvr_config_async_cpu.yaml",
        f"actor_train.model_args.dtype={dtype}",
        f"pretrain={assets}/model", f"actor_train.data_args.file_name={assets}/train.jsonl",
        f"validation.data_args.file_name={assets}/validation.jsonl", f"output_dir={output}", "exp_name=ours",
        f"max_steps={steps}", f"actor_train.training_args.learning_rate={rate}", "eval_steps=0", "save_steps=0",
        *SETTINGS, *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"our run failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    metrics = [json.loads(line) for line in (output / "ours" / "metrics.jsonl").read_text().splitlines()]
    counted = metrics[SKIPPED:]
    return {
        "samples_per_s": 256 * (len(counted) - 1) / (counted[-1]["time_s"] - counted[0]["time_s"]),
        "reward_last_5": sum(m["reward/mean"] for m in metrics[-5:]) / 5,
        "folder": output / "ours" / "hf",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--assets", default="output/demo_assets")
    parser.add_argument("--venv", default="output/bench_trl/venv")
    parser.add_argument("--trl-bf16", action="store_true")
    parser.add_argument("overrides", nargs="*", help="more settings of ours, key=value")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    python = Path(args.venv) / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "trl==1.16.0", "transformers<5.20"], check=True)
    assets = Path(args.assets).resolve()
    sys.path.insert(0, str(ROOT / "tools"))
    from check_demo_result import accuracy

    trl_dtype = "bf16" if args.trl_bf16 else "fp32"
    with tempfile.TemporaryDirectory() as scratch:
        ours = run_ours(assets, Path(scratch), args.steps, args.rate, args.overrides)
        trl = run_trl(str(python.absolute()), assets, Path(scratch) / "trl", args.steps, args.rate, trl_dtype)
        for result in (ours, trl):
            scores = [accuracy(str(result["folder"]), str(assets / "test.jsonl"), 1.0, seed) for seed in range(5)]
            result["accuracy"] = sum(scores) / len(scores)
    ratio = ours["samples_per_s"] / trl["samples_per_s"]
    line = {
        "name": "vs_trl",
        "value": round(ours["samples_per_s"], 1),
        "unit": "samples/s",
        "trl_samples_per_s": round(trl["samples_per_s"], 1),
        "ratio": round(ratio, 3),
        "budget": 1.2,
        "accuracy": round(ours["accuracy"], 3),
        "trl_accuracy": round(trl["accuracy"], 3),
        "reward_last_5": round(ours["reward_last_5"], 3),
        "trl_reward_last_5": round(trl["reward_last_5"], 3),
        "ok": ratio >= 1.2 and ours["accuracy"] >= trl["accuracy"],
        "steps": args.steps,
        "trl_dtype": trl_dtype,
        "settings": [*SETTINGS, *args.overrides],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
