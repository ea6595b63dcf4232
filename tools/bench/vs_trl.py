"""TRL's GRPOTrainer against this project: same checkpoint, prompts, 32 x 8 samples a step, learning rate, temperature;
in turn. A table: precision x size of the model x tail of the answers' lengths, ours with defaults and at its best.

    python tools/bench/vs_trl.py [--steps 40] [--only DTYPE,SIZE,TAIL] [--dtypes fp32] [--sizes 0.6M 5M] [--tails light]
                                 [--sides trl defaults best] [--seeds 42 43 44] [--venv FOLDER] [KEY=VALUE ...]

TRL gets a virtual environment of its own, made here. Both sides use all cores, start from the same warm-started model
and have the precision of the row: TRL by autocast over float32 weights, ours as dtype of trainer and engine over
float32 main weights. `defaults`: the demo's file as it is. `best`: with BEST. Key=value settings are added to `best`. A
heavy tail: sums of numbers of up to 24 digits, few of them long (`make_demo_assets.py --heavy-tail`), with room for 256
tokens instead of 96.

samples/s leave out start-up and the first 5 steps; accuracy is measured afterwards by the same code for all:
temperature 1 on the held-out problems, 5 samples each. The three runs of a row follow one another, once per seed.
Finished runs are kept in runs.jsonl and not repeated, so the script may be stopped and started again. A row's line is
printed once TRL and one of ours have run; it has means over the seeds that both have, and names processor, precision
and warm start of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SAMPLES = 256
"""A step, of both sides."""
DTYPES, SIZES, TAILS = ("fp32", "bf16"), ("0.6M", "5M", "20M"), ("light", "heavy")
SIDES = ("trl", "defaults", "best")
NARROWEST = 128
"""Hidden size of the smallest model."""
LONGEST = {"light": 96, "heavy": 256}
LONGEST_PROMPT = {"light": 24, "heavy": 56}
Row = tuple[str, str, str]
"""Precision, size, tail."""
Run = tuple[Row, str, int, int]
"""Row, side, steps, seed."""

BEST = (
    "algorithm.proximal_logprobs=behaviour",  # one optimizer step a batch: TRL computes no old log-probs either
    "async_training.interrupt.mode=keep",
    "actor_infer.strategy_args.strategy_config.enable_prefix_caching=false",  # prompts are 8 tokens long
    "actor_train.micro_batching=packed",
    "actor_train.max_tokens_per_microbatch=4096",
    "actor_infer.world_size=2",  # one engine decodes on one core, and the trainer leaves the other half free
)

TRL_RUN = r"""
import json, os, sys, time
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from roll_async.rewards.exact_match import ExactMatch

assets, output, steps, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
bf16, length, folder, seed = sys.argv[5] == "bf16", int(sys.argv[6]), sys.argv[7], int(sys.argv[8])
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
    max_completion_length=length, temperature=1.0, learning_rate=rate, lr_scheduler_type="constant", max_steps=steps,
    beta=0.0, use_cpu=True, bf16=bf16, logging_steps=1, save_strategy="no",
    report_to="none", gradient_checkpointing=False, seed=seed, disable_tqdm=True,
)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
trainer = GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
)
trainer.train()
model.save_pretrained(output + "/final"); tokenizer.save_pretrained(output + "/final")
rewards = [h["reward"] for h in trainer.state.log_history if "reward" in h]
print("RESULT " + json.dumps({"times": times, "rewards": rewards}))
"""


def rate_of(assets: Path, args: argparse.Namespace) -> float:
    """As 1 / width, as in the warm start: at 3e-4 a model of 5 M parameters, one step off-policy, loses what it knew
    in one run of two (reward 0.49 to 0.28 in 20 steps).
    """
    width = json.loads((assets / "model" / "config.json").read_text())["hidden_size"]
    return args.rate * NARROWEST / width


def run_trl(row: Row, seed: int, assets: Path, output: Path, args: argparse.Namespace) -> dict:
    """samples/s, reward curve and folder of TRL's run."""
    dtype, _, tail = row
    python = trl_python(Path(args.venv))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}
    words = [assets, output, args.steps, rate_of(assets, args), dtype, LONGEST[tail], assets / "model", seed]
    done = subprocess.run([python, "-c", TRL_RUN, *map(str, words)], env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    result = json.loads(lines[0].removeprefix("RESULT "))
    times, skipped = result["times"], args.skipped
    return {
        "samples_per_s": (len(times) - 1 - skipped) * SAMPLES / (times[-1] - times[skipped]),
        "rewards": [round(reward, 4) for reward in result["rewards"]],
        "precision": "float32" if dtype == "fp32" else "bfloat16 autocast over float32 weights",
        "folder": str(output / "final"),
    }


def trl_python(venv: Path) -> str:
    """The interpreter of TRL's environment, which is made when it is missing."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "trl==1.16.0", "transformers<5.20"], check=True)
    return str(python.absolute())


def overrides_of(row: Row, side: str, seed: int, assets: Path, args: argparse.Namespace) -> list[str]:
    """What a run of ours changes in the demo's file."""
    dtype, _, tail = row
    return [
        f"actor_train.model_args.dtype={dtype}",
        f"actor_infer.model_args.dtype={dtype}",
        f"pretrain={assets}/model",
        f"actor_train.data_args.file_name={assets}/train.jsonl",
        f"validation.data_args.file_name={assets}/validation.jsonl",
        f"response_length={LONGEST[tail]}",
        f"prompt_length={LONGEST_PROMPT[tail]}",
        f"max_steps={args.steps}",
        f"seed={seed}",
        f"actor_train.training_args.learning_rate={rate_of(assets, args)}",
        "eval_steps=0",
        "save_steps=0",
        *((*BEST, *args.overrides) if side == "best" else ()),
    ]


def run_ours(row: Row, side: str, seed: int, assets: Path, output: Path, args: argparse.Namespace) -> dict:
    """The same of our run."""
    command = [
        sys.executable, str(ROOT / "examples" / "start_rlvr_pipeline.py"), "--config", "rlvr_config_async_cpu.yaml",
        f"output_dir={output}", "exp_name=ours", *overrides_of(row, side, seed, assets, args),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"our run failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    metrics = [json.loads(line) for line in (output / "ours" / "metrics.jsonl").read_text().splitlines()]
    counted = metrics[args.skipped :]
    return {
        "samples_per_s": SAMPLES * (len(counted) - 1) / (counted[-1]["time_s"] - counted[0]["time_s"]),
        "rewards": [round(m["reward/mean"], 4) for m in metrics],
        "precision": f"trainer and engine {row[0]}, float32 main weights",
        "staleness_mean": sum(m["staleness/mean"] for m in counted) / len(counted),
        "length_mean": sum(m["response/length_mean"] for m in counted) / len(counted),
        "length_max": sum(m["response/length_max"] for m in counted) / len(counted),
        "idle_trainer": sum(m["idle/trainer"] for m in counted) / len(counted),
        "settings": [*BEST, *args.overrides] if side == "best" else [],
        "folder": str(output / "ours" / "hf"),
    }


def assets_of(row: Row, folder: Path, warm_steps: int) -> Path:
    """Model, tokenizer and problems of a size and a tail; made when they are missing. 0 warm steps: the usual ones."""
    _, size, tail = row
    assets = (folder / f"{size}_{tail}").resolve()
    if not (assets / "manifest.json").is_file():
        make = [sys.executable, str(ROOT / "tools" / "make_demo_assets.py"), "--output", str(assets), "--size", size]
        make += ["--warm-steps", str(warm_steps), *(["--heavy-tail"] if tail == "heavy" else [])]
        subprocess.run(make, check=True, stdout=sys.stderr)
    return assets


def measured(row: Row, side: str, seed: int, args: argparse.Namespace) -> dict:
    """One run and the accuracy of its last model."""
    from tools.check_demo_result import accuracy

    assets = assets_of(row, Path(args.assets), args.warm_steps)
    with tempfile.TemporaryDirectory() as scratch:
        if side == "trl":
            found = run_trl(row, seed, assets, Path(scratch) / "trl", args)
        else:
            found = run_ours(row, side, seed, assets, Path(scratch), args)
        folder, data, longest = found.pop("folder"), str(assets / "test.jsonl"), LONGEST[row[2]]
        scores = [accuracy(folder, data, 1.0, draw, max_new_tokens=longest) for draw in range(args.draws)]
    made = json.loads((assets / "manifest.json").read_text())
    return {
        "row": list(row),
        "side": side,
        "steps": args.steps,
        "seed": seed,
        **found,
        "accuracy": sum(scores) / len(scores),
        "warm_start": f"{made['warm_start_steps']} supervised steps, loss {made['warm_start_loss']:.3f}",
    }


def read(runs: Path) -> dict[Run, dict]:
    """Finished runs; of one that was repeated by hand, the last."""
    lines = [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []
    return {(tuple(line["row"]), line["side"], line["steps"], line["seed"]): line for line in lines}


def budget(tail: str, *, bf16_native: bool) -> float:
    """Times TRL's samples/s."""
    return 2.0 if tail == "heavy" else 1.5 if bf16_native else 1.2


def line_of(row: Row, ours: Sequence[dict], trl: Sequence[dict], *, cpu: str, bf16_native: bool) -> dict[str, object]:
    """A row of the table, one of our two settings against TRL: runs of the same seeds, in the same order."""

    def mean(runs: Sequence[dict], name: str) -> float:
        return statistics.mean(run[name] for run in runs)

    ratio, wanted = mean(ours, "samples_per_s") / mean(trl, "samples_per_s"), budget(row[2], bf16_native=bf16_native)
    return {
        "name": f"vs_trl/{'/'.join(row)}/{ours[0]['side']}",
        "value": round(mean(ours, "samples_per_s"), 1),
        "unit": "samples/s",
        "trl_samples_per_s": round(mean(trl, "samples_per_s"), 1),
        "ratio": round(ratio, 3),
        "budget": wanted,
        "accuracy": round(mean(ours, "accuracy"), 3),
        "trl_accuracy": round(mean(trl, "accuracy"), 3),
        "accuracies": [round(run["accuracy"], 3) for run in ours],
        "trl_accuracies": [round(run["accuracy"], 3) for run in trl],
        "rewards": [run["rewards"] for run in ours],
        "trl_rewards": [run["rewards"] for run in trl],
        "ok": ratio >= wanted and mean(ours, "accuracy") >= mean(trl, "accuracy"),
        "steps": ours[0]["steps"],
        "seeds": [run["seed"] for run in ours],
        "cpu": cpu,
        "bf16": "native" if bf16_native else "emulated",
        "precision": ours[0]["precision"],
        "trl_precision": trl[0]["precision"],
        "warm_start": ours[0]["warm_start"],
        "trl_warm_start": trl[0]["warm_start"],
        "length_mean": round(mean(ours, "length_mean"), 1),
        "length_max": round(mean(ours, "length_max"), 1),
        "staleness_mean": round(mean(ours, "staleness_mean"), 2),
        "idle_trainer": round(mean(ours, "idle_trainer"), 3),
        "settings": ours[0]["settings"],
    }


def one_row(text: str) -> Row:
    """`fp32,0.6M,light`."""
    parts = tuple(text.split(","))
    if len(parts) != 3 or any(part not in known for part, known in zip(parts, (DTYPES, SIZES, TAILS), strict=True)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not DTYPE,SIZE,TAIL: one of {', '.join(DTYPES)}, one of {', '.join(SIZES)}, one of "
            f"{', '.join(TAILS)}, such as fp32,0.6M,light"
        )
    return parts


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Small models first, so that an unfinished table has whole rows early."""
    if args.only is not None:
        return [args.only]
    return [(dtype, size, tail) for size, tail, dtype in itertools.product(args.sizes, args.tails, args.dtypes)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skipped", type=int, default=5, help="first steps that are not counted")
    parser.add_argument("--draws", type=int, default=5, help="samples per held-out problem")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate at 0.6M; less by width for others")
    parser.add_argument("--warm-steps", type=int, default=0, help="supervised steps of models that are missing")
    parser.add_argument("--only", type=one_row, metavar="DTYPE,SIZE,TAIL", help="this row alone")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tails", nargs="+", choices=TAILS, default=list(TAILS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="of both sides; a row's line has their mean")
    parser.add_argument("--output", default="output/bench_trl", help="runs.jsonl and assets")
    parser.add_argument("--venv", default="output/bench_trl/venv")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more settings of ours, for side best")
    args = parser.parse_args(argv)
    if args.steps < args.skipped + 2:
        parser.error(
            f"--steps {args.steps} leaves no step to count after --skipped {args.skipped}: two more are needed"
        )
    args.assets = str(Path(args.output) / "assets")
    return args


def main() -> None:
    args = arguments()
    from roll_async.config.processor import cpuinfo, multiplies_bf16, properties
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    cpu, native = properties(cpuinfo()).get("model name", "unknown"), multiplies_bf16()
    runs = Path(args.output) / "runs.jsonl"
    runs.parent.mkdir(parents=True, exist_ok=True)
    for row in rows_of(args):
        for seed, side in itertools.product(args.seeds, args.sides):
            if (row, side, args.steps, seed) not in read(runs):
                found = measured(row, side, seed, args)
                with runs.open("a") as out:
                    out.write(json.dumps(found) + "\n")
        done = read(runs)
        for side in SIDES[1:]:
            pairs = [[done.get((row, s, args.steps, seed)) for s in (side, "trl")] for seed in args.seeds]
            both = [pair for pair in pairs if None not in pair]
            if both:
                ours, trl = zip(*both, strict=True)
                print(json.dumps(line_of(row, ours, trl, cpu=cpu, bf16_native=native)), flush=True)


if __name__ == "__main__":
    main()
