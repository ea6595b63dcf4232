"""Asynchronous against synchronous: same seeds, same number of samples, `async_generation_ratio` 0 against 1, in one
run.

    python tools/bench/async_vs_sync.py [--setting long_tail] [--steps 16] [--rounds 1] [KEY=VALUE ...]

A round is one run of each, and every other round has the asynchronous one first, so that a machine that becomes slower
or faster meanwhile favours neither; figures are of all rounds together, `ratios` of each.

Two settings, both of a random model of 5.7 M parameters and 64 samples a step, with generation and training about
equally long. `long_tail` (the default): all samples of a step at once, answers that end by chance, the longest about
five times the mean, as answers of real models do. `short_tail`: 24 requests at a time and answers cut at twice the
mean, so that the engine is never idle even in the synchronous run and all that is to be won is the overlap itself.

T_gen and T_train come from the synchronous run, where they do not overlap: the wait for a batch, and the rest of the
step. `bound` = (T_gen + T_train) / max(T_gen, T_train) is what perfect overlap of these two would give; `ratio` =
speedup / bound. It may exceed 1: with a long tail an engine that is given new requests while the last ones end needs
less than T_gen. `waited_async_s` is what the trainer still waits for a batch.

What else keeps the ratio below 1 where both sides compute on this machine's cores, from the same runs:

- `core_s_sync`, `core_s_async`: seconds of all cores at work in a step, the driver, Ray, the reward host and all else
  on the machine included. With the work of the overlapped run no schedule makes a step shorter than that divided by the
  number of cores; `most_by_cores` is the ratio that this leaves. The synchronous run's figure is no such bound: its
  engine decodes the tail of a batch alone, and other processes have more time to work in a longer step.
- `most_by_chance`: with one batch ahead each batch is made during the step before it, so a step takes the longer of the
  two every time, whose mean is more than the longer mean. The ratio that the synchronous run's own figures leave.
- `busy_core`: what two loops of matrix products, which share nothing else, leave each other just before the runs.

Uses the tokenizer and data of the demo assets (`make demo-assets`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The steps of one run after its warm-up."""

    steps: list[dict[str, float]]
    """Metrics."""
    core_s: float
    """Seconds of all cores at work, mean of the steps."""

    def mean(self, name: str) -> float:
        return statistics.mean(step[name] for step in self.steps)


def run(name: str, ratio: float, args: argparse.Namespace, folder: Path) -> Run:
    """One run of the pipeline."""
    command = [
        sys.executable,
        str(ROOT / "examples" / "start_rlvr_pipeline.py"),
        "--config",
        args.config,
        f"async_generation_ratio={ratio}",
        f"max_steps={args.steps}",
        f"output_dir={folder}",
        f"exp_name={name}",
        "eval_steps=0",
        "save_steps=0",
        *args.overrides,
    ]
    log, metrics, at_work = folder / f"{name}.log", folder / name / "metrics.jsonl", dict[int, float]()
    with log.open("w") as output:
        started = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while started.poll() is None:
            finished = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
            at_work.setdefault(finished, cores_at_work())
            time.sleep(0.05)
    if started.returncode:
        sys.exit(f"{name} ended with {started.returncode}:\n{log.read_text()[-6000:]}")
    measured = [json.loads(line) for line in metrics.read_text().splitlines()][args.warmup :]
    core_s = (at_work[args.warmup + len(measured)] - at_work[args.warmup]) / len(measured)
    return Run(steps=measured, core_s=core_s)


def together(runs: Sequence[Run]) -> Run:
    """Runs of as many steps each."""
    return Run(steps=[step for one in runs for step in one.steps], core_s=statistics.mean(one.core_s for one in runs))


def share_of_bound(sync: Run, overlapped: Run) -> float:
    """Speedup / bound: both have the synchronous step above the line."""
    generation = sync.mean("time/wait_batch_s")
    return max(generation, sync.mean("time/step_s") - generation) / overlapped.mean("time/step_s")


def cores_at_work() -> float:
    """Seconds that all cores have worked since the machine started."""
    times = psutil.cpu_times()
    return sum(getattr(times, part, 0.0) for part in ("user", "nice", "system", "irq", "softirq"))


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
    parser.add_argument("--warmup", type=int, default=4, help="steps left out of each run")
    parser.add_argument("--rounds", type=int, default=1)
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
        runs: dict[int, list[Run]] = {0: [], 1: []}
        for i in range(args.rounds):
            for ratio in (0, 1) if i % 2 == 0 else (1, 0):
                runs[ratio].append(run(f"ratio_{ratio}_{i}", ratio, args, Path(scratch)))
    sync, overlapped = together(runs[0]), together(runs[1])
    step_sync, step_async = sync.mean("time/step_s"), overlapped.mean("time/step_s")
    generation = sync.mean("time/wait_batch_s")
    training = step_sync - generation
    longer = max(generation, training)
    bound, speedup = step_sync / longer, step_sync / step_async
    batches = [step["time/wait_batch_s"] for step in sync.steps]
    others = [step["time/step_s"] - step["time/wait_batch_s"] for step in sync.steps]
    longer_each_time = statistics.mean(map(max, batches[1:], others))  # a pair of two runs among them is as good
    line = {
        "name": f"async_vs_sync/{args.setting}",
        "value": round(speedup, 3),
        "unit": "x",
        "speedup": round(speedup, 3),
        "bound": round(bound, 3),
        "ratio": round(share_of_bound(sync, overlapped), 3),
        "ratios": [round(share_of_bound(*both), 3) for both in zip(runs[0], runs[1], strict=True)],
        "budget": BUDGET,
        "ok": share_of_bound(sync, overlapped) >= BUDGET,
        "t_gen_s": round(generation, 3),
        "t_train_s": round(training, 3),
        "step_sync_s": round(step_sync, 3),
        "step_async_s": round(step_async, 3),
        "waited_async_s": round(overlapped.mean("time/wait_batch_s"), 3),
        "core_s_sync": round(sync.core_s, 3),
        "core_s_async": round(overlapped.core_s, 3),
        "most_by_cores": round(min(1.0, longer / (overlapped.core_s / (psutil.cpu_count() or 1))), 3),
        "most_by_chance": round(min(1.0, longer / longer_each_time), 3),
        "busy_core": shares,
        "steps": len(sync.steps),
        "staleness_max": max(step["staleness/max"] for step in overlapped.steps),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
