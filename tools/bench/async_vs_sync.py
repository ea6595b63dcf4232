"""Asynchronous against synchronous: same seeds, same number of samples, `async_generation_ratio` 0 against 1, in one
run.

    python tools/bench/async_vs_sync.py [--setting long_tail] [--steps 16] [KEY=VALUE ...]

Two settings, both of a random model of 5.7 M parameters and 64 samples a step, with generation and training about
equally long. `long_tail` (the default): all samples of a step at once, answers that end by chance, the longest about
five times the mean, as answers of real models do. `short_tail`: 24 requests at a time and answers cut at twice the
mean, so that the engine is never idle even in the synchronous run and all that is to be won is the overlap itself.

T_gen and T_train come from the synchronous run, where they do not overlap: the wait for a batch, and the rest of the
step. `bound` = (T_gen + T_train) / max(T_gen, T_train) is what perfect overlap of these two would give; `ratio` =
speedup / bound. It may exceed 1: with a long tail an engine that is given new requests while the last ones end needs
less than T_gen. `waited_async_s` is what the trainer still waits for a batch; where that is nothing and the ratio is
below 1, two busy cores are slower than one, each: shared caches and memory, and the driver, Ray and the reward host
beside them. `busy_core` is what two loops of matrix products, which share nothing else, leave each other on this
machine just before the runs. Uses the tokenizer and data of the demo assets (`make demo-assets`).
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
sys.path.insert(0, str(ROOT))

COMMON = (
    "rollout_batch_size=16",
    "num_return_sequences_in_group=4",
    "algorithm.entropy_loss_coef=1e-9",  # a random model is never right, and rows without signal would not be trained
    "async_training.interrupt.mode=keep",  # else each push makes the engine read again what its requests have generated
)
SETTINGS = {
    "long_tail": (
        "response_length=320",
        "actor_train.training_args.per_device_train_batch_size=16",
        "actor_train.micro_batching=dynamic",
        "actor_train.max_tokens_per_microbatch=4096",
        "async_training.max_concurrent_per_server=64",
        "actor_infer.strategy_args.strategy_config.max_num_seqs=64",
    ),
    "short_tail": (
        "actor_train.training_args.per_device_train_batch_size=16",
        "async_training.max_concurrent_per_server=24",
        "actor_infer.strategy_args.strategy_config.max_num_seqs=24",
    ),
}

BUDGET = 0.95
"""Of the bound."""


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


def make_model(assets: Path, folder: Path) -> None:
    """A larger random model with the demo's tokenizer."""
    import shutil

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(assets / "model")
    shape = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(**{**config.to_dict(), **shape, "layer_types": None})).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (assets / "model" / name).is_file():
            shutil.copyfile(assets / "model" / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--assets", default="output/demo_assets")
    parser.add_argument("--warmup", type=int, default=4, help="steps left out of both runs")
    parser.add_argument("--config", default="rlvr_config_async_cpu.yaml")
    parser.add_argument("--setting", choices=list(SETTINGS), default="long_tail")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    from tools.machine import busy_core, machine_line

    print(machine_line(args), flush=True)
    shares = busy_core()
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(args.assets), Path(scratch) / "model")
        args.overrides = [f"pretrain={scratch}/model", *COMMON, *SETTINGS[args.setting], *args.overrides]
        sync = run(args.config, 0, args.steps, Path(scratch), args.overrides)[args.warmup :]
        overlapped = run(args.config, 1, args.steps, Path(scratch), args.overrides)[args.warmup :]
    step_sync = statistics.mean(m["time/step_s"] for m in sync)
    step_async = statistics.mean(m["time/step_s"] for m in overlapped)
    generation = statistics.mean(m["time/wait_batch_s"] for m in sync)
    training = step_sync - generation
    bound = (generation + training) / max(generation, training)
    speedup = step_sync / step_async
    line = {
        "name": f"async_vs_sync/{args.setting}",
        "value": round(speedup, 3),
        "unit": "x",
        "speedup": round(speedup, 3),
        "bound": round(bound, 3),
        "ratio": round(speedup / bound, 3),
        "budget": BUDGET,
        "ok": speedup / bound >= BUDGET,
        "t_gen_s": round(generation, 3),
        "t_train_s": round(training, 3),
        "step_sync_s": round(step_sync, 3),
        "step_async_s": round(step_async, 3),
        "waited_async_s": round(statistics.mean(m["time/wait_batch_s"] for m in overlapped), 3),
        "busy_core": shares,
        "steps": len(sync),
        "staleness_max": max(m["staleness/max"] for m in overlapped),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
