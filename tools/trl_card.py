"""The half of tools/bench/vs_trl.py for a card: settings of both sides, models of random weights, and a run that is
ended as soon as it has its steps. `walk` goes the same way on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.card import Watch
from tools.gpu_suite import finish
from tools.trl_runs import ROOT, SAMPLES, Row, figures, our_figures, steps_of, trl_command, trl_common, trl_environment

ANSWERS = {"cuda": (256, 300, 1024), "walk": (24, 12, 40)}
"""Tokens: of a prompt, about; of an answer without a limit, mean; of the longest answer."""
CARD_CONFIG = "gsm8k_0.5b_1gpu.yaml"
CARD_RATE = 1e-9
"""Of both sides: enough to work as any other, and too little to move the probability of an end."""
CARD_AHEAD = 2
"""Steps between the last that counts and the end of the run."""
CARD_BUDGET = 1.5
CARD_MEMORY = 0.3
"""Share of the card for an engine that keeps it while the trainer works: TRL's default, and ours of `best`."""
CARD_BEST = (
    "async_generation_ratio=1",
    "async_training.max_concurrent_per_server=512",  # two batches: the next one begins in the tail of one
    "algorithm.proximal_logprobs=behaviour",
)
ON_CUDA = (
    "colocation=resident",
    f"actor_infer.strategy_args.strategy_config.gpu_memory_utilization={CARD_MEMORY}",
    "async_training.interrupt.mode=keep",
)
"""More of `best` that a CPU, or its engine, has not."""
TRL_ROWS = {"0.5B": 8, "1.5B": 4, "tiny": 64}
"""Of a micro-batch. Without checkpointing 1.5B takes about 4 GB a row of 1,280 tokens, logits included."""
REWARD = "tools.random_lengths.parity"


def best_of(args: argparse.Namespace) -> list[str]:
    """The settings of side best; KEY=VALUE of the command line come last."""
    return [*CARD_BEST, *(ON_CUDA if args.device == "cuda" else ()), *args.overrides]


def card_overrides(row: Row, side: str, seed: int, assets: Path, args: argparse.Namespace) -> list[str]:
    """What a run of ours changes in CARD_CONFIG: paths, the reward, what 8 steps would choose otherwise than 200."""
    engine = "actor_infer.strategy_args.strategy_config"
    if args.device == "cuda":
        where = [f"{engine}.enforce_eager=false", "num_gpus_per_node=1"]  # CUDA graphs are off in runs of 10 steps
    else:
        prompt, _, longest = ANSWERS["walk"]
        where = [
            "actor_train.device_mapping=null", "actor_infer.device_mapping=null", f"response_length={longest}",
            "actor_infer.strategy_args={strategy_name: hf_infer}", f"prompt_length={2 * prompt}",
        ]  # fmt: skip
    return [
        f"actor_train.model_args.dtype={row[0]}",
        f"actor_infer.model_args.dtype={row[0]}",
        f"pretrain={assets}/model",
        f"actor_train.data_args.file_name={assets}/train.jsonl",
        f"rewards.math_rule.type={REWARD}",
        f"actor_train.training_args.learning_rate={CARD_RATE}",
        f"max_steps={args.steps + CARD_AHEAD}",
        f"seed={seed}",
        "save_steps=0",
        *where,
        *(best_of(args) if side == "best" else ()),
    ]


def card_trl_config(row: Row, seed: int, args: argparse.Namespace) -> dict[str, object]:
    """GRPOConfig of TRL's side: vLLM only where there is a card."""
    prompt, _, longest = ANSWERS[args.device]
    rows = int(args.trl.get("per_device_train_batch_size", TRL_ROWS[row[1]]))
    config = {
        **trl_common(longest, CARD_RATE, seed), "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": SAMPLES // rows, "max_steps": args.steps + CARD_AHEAD,
        "bf16": row[0] == "bf16", "use_cpu": args.device != "cuda",
    }  # fmt: skip
    if args.device == "cuda":
        config |= {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": CARD_MEMORY,
            "vllm_enable_sleep_mode": False, "vllm_max_model_length": 2 * prompt + longest,
            "optim": "adamw_torch_fused",
        }  # fmt: skip
    return {**config, **args.trl}


def run_on_card(row: Row, side: str, seed: int, assets: Path, output: Path, args: argparse.Namespace) -> dict:
    """One run of either side, ended when it has its steps; with `failed` where it has not."""
    if side == "trl":
        steps, config = output / "steps.jsonl", card_trl_config(row, seed, args)
        command = trl_command(args.trl_python or sys.executable, config, assets, output, REWARD, final="")
    else:
        steps = output / "ours" / "metrics.jsonl"
        command = [
            sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", CARD_CONFIG,
            f"output_dir={output}", "exp_name=ours", *card_overrides(row, side, seed, assets, args),
        ]  # fmt: skip
    hidden = {} if args.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    watch = Watch(steps, args.steps)
    done = finish(command, args.limit, {**trl_environment(), **hidden}, watch)
    watch.settle()
    metrics = steps_of(steps)[: args.steps]
    if len(metrics) < args.steps:
        return {
            "failed": {"steps_done": len(metrics), **(done if isinstance(done, dict) else {"output": done[-2000:]})}
        }
    best = best_of(args) if side == "best" else ()
    if side == "trl":
        about = {
            **figures(metrics, args.skipped), "settings": {**config, **metrics[0]["kernels"]},
            "precision": f"{'bfloat16 autocast over ' * (row[0] == 'bf16')}float32 weights",
        }  # fmt: skip
    else:
        about = our_figures(metrics, args.skipped, row[0], best)
    return {**about, "first_step_s": watch.first_step_s, "peak_mb": watch.peak_mb}


def random_assets(row: Row, folder: Path, args: argparse.Namespace) -> Path:
    """Model of random weights, tokenizer and prompts of a size; made when they are missing."""
    assets = (folder / f"{args.device}_{row[1]}").resolve()
    if not (assets / "manifest.json").is_file():
        prompt, mean, _ = ANSWERS[args.device]
        script = [sys.executable, str(ROOT / "tools" / "random_lengths.py"), "--shape", row[1], "--folder", str(assets)]
        script += ["--mean", str(mean), "--prompt", str(prompt), "--device", "cpu" if args.device == "walk" else "cuda"]
        made = finish(script, args.limit)
        if isinstance(made, dict):
            sys.exit(f"no model of random weights: {made}")
    return assets
