"""Runs of tools/bench/vs_trl.py: the script of TRL's side, and what the steps of either side say."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 256
"""A step, of both sides."""
Row = tuple[str, str, str]
"""Precision, size, tail."""

TRL_RUN = r"""
import importlib, json, os, sys, time
from importlib.util import find_spec

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

given = json.loads(sys.argv[1])
if given["config"].get("use_cpu"):
    torch.set_num_threads(os.cpu_count())
rows = [json.loads(line) for line in open(given["rows"])]
prompts = [r["question"] if "question" in r else r["messages"][0]["content"] for r in rows]
answers = [r["answer"] if "answer" in r else r["ground_truth"] for r in rows]
data = Dataset.from_list([{"prompt": p, "ground_truth": a} for p, a in zip(prompts, answers)])
module, _, name = given["reward"].rpartition(".")
judge = getattr(importlib.import_module(module), name)
judge = judge() if isinstance(judge, type) else judge

def reward(completions, ground_truth, **_):
    verdicts = [judge(c, g, {}) for c, g in zip(completions, ground_truth)]
    return [getattr(v, "score", v) for v in verdicts]

class Steps(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            line = {
                "step": state.global_step, "time_s": time.time(), "reward/mean": logs["reward"],
                "response/length_mean": logs["completions/mean_length"],
                "response/length_max": logs["completions/max_length"],
                "kernels": {**attention, **kernels},
            }
            with open(given["steps"], "a") as file:
                file.write(json.dumps(line) + "\n")

attention, kernels = {}, {}
if given["config"].get("use_vllm"):
    attention = {"attn_implementation": "flash_attention_2" if find_spec("flash_attn") else "sdpa"}
    kernels = {"use_liger_kernel": find_spec("liger_kernel") is not None}
config = GRPOConfig(**{**kernels, **given["config"]})
model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32, **attention)
tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Steps()]
)
trainer.train()
if given["final"]:
    model.save_pretrained(given["final"]); tokenizer.save_pretrained(given["final"])
"""


def steps_of(file: Path) -> list[dict]:
    """What a run of either side wrote for each step; a run that was ended may have left half a line."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def figures(metrics: Sequence[Mapping[str, float]], skipped: int) -> dict[str, object]:
    """Of either side: rates between the ends of the first and the last step that count, answers' tokens a second."""
    counted = metrics[skipped:]
    seconds = counted[-1]["time_s"] - counted[0]["time_s"]
    tokens = SAMPLES * sum(m["response/length_mean"] for m in counted[1:])
    return {
        "samples_per_s": SAMPLES * (len(counted) - 1) / seconds,
        "tokens_per_s": tokens / seconds,
        "rewards": [round(m["reward/mean"], 4) for m in metrics],
        "length_mean": statistics.mean(m["response/length_mean"] for m in counted),
        "length_max": statistics.mean(m["response/length_max"] for m in counted),
    }


def trl_command(
    python: str, config: Mapping[str, object], assets: Path, output: Path, reward: str, final: str
) -> list[str]:
    """TRL_RUN; its steps go to steps.jsonl, its last model to `final` where that is named."""
    given = {
        "config": {"output_dir": str(output), **config}, "rows": f"{assets}/train.jsonl", "model": f"{assets}/model",
        "steps": f"{output}/steps.jsonl", "reward": reward, "final": final,
    }  # fmt: skip
    return [python, "-c", TRL_RUN, json.dumps(given)]


def trl_common(length: int, rate: float, seed: int) -> dict[str, object]:
    """Settings of GRPOConfig on every device."""
    return {
        "num_generations": 8, "max_completion_length": length, "temperature": 1.0, "learning_rate": rate,
        "lr_scheduler_type": "constant", "beta": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "gradient_checkpointing": False, "seed": seed, "disable_tqdm": True,
    }  # fmt: skip


def trl_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def our_figures(
    metrics: Sequence[Mapping[str, float]], skipped: int, dtype: str, best: Sequence[str]
) -> dict[str, object]:
    """Of a run of ours: also what TRL has not. `best`: the settings of that side, none for `defaults`."""
    counted = metrics[skipped:]
    return {
        **figures(metrics, skipped),
        "precision": f"trainer and engine {dtype}, float32 main weights",
        "staleness_mean": statistics.mean(m["staleness/mean"] for m in counted),
        "idle_trainer": statistics.mean(m["idle/trainer"] for m in counted),
        "settings": list(best),
    }
