"""TRL's GRPOTrainer against this project: same checkpoint, prompts, 32 x 8 samples a step, learning rate, temperature;
in turn. A table: precision x size of the model x tail of the answers' lengths, ours with defaults and at its best.

    python tools/bench/vs_trl.py [--steps 40] [--only DTYPE,SIZE,TAIL] [--dtypes fp32] [--sizes 0.6M 5M] [--tails light]
                                 [--sides trl defaults best] [--seeds 42 43 44] [--venv FOLDER] [KEY=VALUE ...]
    python tools/bench/vs_trl.py --device cuda [--sizes 0.5B 1.5B] [--trl-python PATH] [--trl KEY=VALUE ...]

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

--device cuda: trainer and engine of either side on GPU 0, bf16, Qwen2.5 shapes with random weights whose answers are
noise of geometric length (random_lengths.py: mean 300, cut at 1,024), prompts of about 256 tokens, a reward by the
parity of the text, speed alone. `defaults`: configs/gsm8k_0.5b_1gpu.yaml with other paths. `best`: with CARD_BEST.
TRL: vLLM in its process with its own share of memory (0.3) and without sleep, which costs a change of state a step and
is for cards where both sides do not fit; bf16 autocast over float32 weights, fused Adam, no gradient checkpointing,
micro-batches of TRL_ROWS, FlashAttention 2 and Liger's kernels where they are installed; --trl changes any of it.
Seconds before the first step and the peak of the card's memory are seen from outside, twice a second, alike for all.
A run is ended as soon as it has its steps, before it saves, and two steps before its own end, so that none of ours is
faster because nothing is generated ahead any more; one that takes longer than --limit is ended, and its line says so.
--device walk: the same way on a CPU with a tiny shape, Transformers as either side's engine; its figures mean nothing.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.card import card_name  # noqa: E402
from tools.trl_card import CARD_BUDGET, random_assets, run_on_card  # noqa: E402
from tools.trl_runs import (  # noqa: E402
    SAMPLES,
    Row,
    figures,
    our_figures,
    steps_of,
    trl_command,
    trl_common,
    trl_environment,
)

DTYPES, SIZES, TAILS = ("fp32", "bf16"), ("0.6M", "5M", "20M"), ("light", "heavy")
SIDES = ("trl", "defaults", "best")
NARROWEST = 128
"""Hidden size of the smallest model."""


@dataclass(frozen=True, slots=True)
class Device:
    """What there is to measure on it, steps of a run, those that are not counted, seconds of a run at most."""

    dtypes: tuple[str, ...]
    sizes: tuple[str, ...]
    tails: tuple[str, ...]
    steps: int
    skipped: int
    limit_s: float | None


DEVICES = {
    "cpu": Device(DTYPES, SIZES, TAILS, 40, 5, None),
    "cuda": Device(("bf16",), ("0.5B", "1.5B"), ("heavy",), 8, 2, 240.0),
    "walk": Device(("fp32",), ("tiny",), ("heavy",), 4, 1, 240.0),
}
LONGEST = {"light": 96, "heavy": 256}
LONGEST_PROMPT = {"light": 24, "heavy": 56}
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


def rate_of(assets: Path, args: argparse.Namespace) -> float:
    """As 1 / width, as in the warm start: at 3e-4 a model of 5 M parameters, one step off-policy, loses what it knew
    in one run of two (reward 0.49 to 0.28 in 20 steps).
    """
    width = json.loads((assets / "model" / "config.json").read_text())["hidden_size"]
    return args.rate * NARROWEST / width


def run_trl(row: Row, seed: int, assets: Path, output: Path, args: argparse.Namespace) -> dict:
    """samples/s, reward curve and folder of TRL's run."""
    dtype, _, tail = row
    config = {
        **trl_common(LONGEST[tail], rate_of(assets, args), seed), "per_device_train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 1, "max_steps": args.steps, "use_cpu": True, "bf16": dtype == "bf16",
    }  # fmt: skip
    output.mkdir()
    command = trl_command(
        args.trl_python or trl_python(Path(args.venv)), config, assets, output,
        reward="roll_async.rewards.exact_match.ExactMatch", final=f"{output}/final",
    )  # fmt: skip
    env = {**os.environ, **trl_environment(), "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return {
        **figures(steps_of(output / "steps.jsonl"), args.skipped),
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
    metrics = steps_of(output / "ours" / "metrics.jsonl")
    best = (*BEST, *args.overrides) if side == "best" else ()
    return {**our_figures(metrics, args.skipped, row[0], best), "folder": str(output / "ours" / "hf")}


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
    """One run: on a card its speed, else also the accuracy of its last model."""
    about = {"row": list(row), "side": side, "steps": args.steps, "seed": seed}
    if args.device != "cpu":
        assets = random_assets(row, Path(args.assets), args)
        # What a killed driver has left may still write for a moment.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            return {**about, **run_on_card(row, side, seed, assets, Path(scratch), args)}
    return {**about, **measured_on_cpu(row, side, seed, args)}


def measured_on_cpu(row: Row, side: str, seed: int, args: argparse.Namespace) -> dict:
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


def mean(runs: Sequence[dict], name: str) -> float | None:
    """None where nobody could say."""
    known = [run[name] for run in runs if run[name] is not None]
    return statistics.mean(known) if known else None


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def speed_of(row: Row, ours: Sequence[dict], trl: Sequence[dict], wanted: float) -> dict[str, object]:
    """What a row has on every device: samples/s of one of our two settings against TRL's, over the same seeds."""
    ratio = mean(ours, "samples_per_s") / mean(trl, "samples_per_s")
    return {
        "name": f"vs_trl/{'/'.join(row)}/{ours[0]['side']}",
        "value": round(mean(ours, "samples_per_s"), 1),
        "unit": "samples/s",
        "trl_samples_per_s": round(mean(trl, "samples_per_s"), 1),
        "ratio": round(ratio, 3),
        "budget": wanted,
        "ok": ratio >= wanted,
        "steps": ours[0]["steps"],
        "seeds": [run["seed"] for run in ours],
        "precision": ours[0]["precision"],
        "trl_precision": trl[0]["precision"],
        "rewards": [run["rewards"] for run in ours],
        "trl_rewards": [run["rewards"] for run in trl],
        "length_mean": round(mean(ours, "length_mean"), 1),
        "length_max": round(mean(ours, "length_max"), 1),
        "staleness_mean": round(mean(ours, "staleness_mean"), 2),
        "idle_trainer": round(mean(ours, "idle_trainer"), 3),
        "settings": ours[0]["settings"],
    }


def card_line_of(row: Row, ours: Sequence[dict], trl: Sequence[dict], *, device: str) -> dict[str, object]:
    """A row on a card: speed, start and memory of both. Weights are random, so there is no accuracy."""
    both = {
        f"{prefix}{name}": rounded(mean(runs, name), 1)
        for prefix, runs in (("", ours), ("trl_", trl))
        for name in ("tokens_per_s", "length_mean", "length_max", "first_step_s", "peak_mb")
    }
    return {**speed_of(row, ours, trl, CARD_BUDGET), **both, "trl_settings": trl[0]["settings"], "device": device}


def failed_line(run: dict) -> dict[str, object]:
    """A run without figures."""
    return {"name": f"vs_trl/{'/'.join(run['row'])}/{run['side']}", "ok": False, "seed": run["seed"], **run["failed"]}


def line_of(row: Row, ours: Sequence[dict], trl: Sequence[dict], *, cpu: str, bf16_native: bool) -> dict[str, object]:
    """A row of the table, one of our two settings against TRL: runs of the same seeds, in the same order."""
    speed = speed_of(row, ours, trl, budget(row[2], bf16_native=bf16_native))
    return {
        **speed,
        "accuracy": round(mean(ours, "accuracy"), 3),
        "trl_accuracy": round(mean(trl, "accuracy"), 3),
        "accuracies": [round(run["accuracy"], 3) for run in ours],
        "trl_accuracies": [round(run["accuracy"], 3) for run in trl],
        "ok": speed["ok"] and mean(ours, "accuracy") >= mean(trl, "accuracy"),
        "cpu": cpu,
        "bf16": "native" if bf16_native else "emulated",
        "warm_start": ours[0]["warm_start"],
        "trl_warm_start": trl[0]["warm_start"],
    }


def known(kind: str) -> list[str]:
    """All dtypes, sizes or tails, of any device."""
    return list(dict.fromkeys(name for device in DEVICES.values() for name in getattr(device, kind)))


def one_row(text: str) -> Row:
    """`fp32,0.6M,light`."""
    parts, kinds = tuple(text.split(",")), [known(kind) for kind in ("dtypes", "sizes", "tails")]
    if len(parts) != 3 or any(part not in names for part, names in zip(parts, kinds, strict=True)):
        choices = ", ".join(f"one of {' '.join(names)}" for names in kinds)
        raise argparse.ArgumentTypeError(f"{text!r} is not DTYPE,SIZE,TAIL: {choices}, such as fp32,0.6M,light")
    return parts


def one_setting(text: str) -> tuple[str, object]:
    """`KEY=VALUE`, the value as JSON where it is that."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Small models first, so that an unfinished table has whole rows early."""
    if args.only is not None:
        return [args.only]
    return [(dtype, size, tail) for size, tail, dtype in itertools.product(args.sizes, args.tails, args.dtypes)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEVICES), default="cpu", help="walk: the way of cuda, on a CPU")
    parser.add_argument("--steps", type=int, help="40; 8 on a card")
    parser.add_argument("--skipped", type=int, help="first steps that are not counted: 5; 2 on a card")
    parser.add_argument("--draws", type=int, default=5, help="samples per held-out problem")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate at 0.6M; less by width for others")
    parser.add_argument("--warm-steps", type=int, default=0, help="supervised steps of models that are missing")
    parser.add_argument("--only", type=one_row, metavar="DTYPE,SIZE,TAIL", help="this row alone")
    parser.add_argument("--dtypes", nargs="+", choices=known("dtypes"), help="all that the device has")
    parser.add_argument("--sizes", nargs="+", choices=known("sizes"), help="all that the device has")
    parser.add_argument("--tails", nargs="+", choices=known("tails"), help="all that the device has")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="of both sides; a row's line has their mean")
    parser.add_argument("--limit", type=float, help="seconds of a run on a card, 240")
    parser.add_argument("--output", default="output/bench_trl", help="runs.jsonl and assets")
    parser.add_argument("--venv", default="output/bench_trl/venv")
    parser.add_argument("--trl-python", help="interpreter with TRL; else --venv, and on a card this one")
    parser.add_argument(
        "--trl", nargs="+", type=one_setting, default=[], metavar="KEY=VALUE", help="of TRL's GRPOConfig, on a card"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more settings of ours, for side best")
    args = parser.parse_args(argv)
    device = DEVICES[args.device]
    for kind, chosen in zip(("dtypes", "sizes", "tails"), args.only or (None, None, None), strict=True):
        has, asked = getattr(device, kind), [chosen] if chosen else getattr(args, kind)
        if asked and (others := [name for name in asked if name not in has]):
            parser.error(
                f"--device {args.device} has no {', '.join(others)}: dtypes {', '.join(device.dtypes)}; sizes "
                f"{', '.join(device.sizes)}; tails {', '.join(device.tails)}"
            )
        setattr(args, kind, getattr(args, kind) or list(has))
    args.steps = device.steps if args.steps is None else args.steps
    args.skipped = device.skipped if args.skipped is None else args.skipped
    args.limit = device.limit_s if args.limit is None else args.limit
    args.trl = dict(args.trl)
    if args.steps < args.skipped + 2:
        parser.error(
            f"--steps {args.steps} leaves no step to count after --skipped {args.skipped}: two more are needed"
        )
    if args.trl and args.device == "cpu":
        parser.error("--trl is for --device cuda")
    args.assets = str(Path(args.output) / "assets")
    return args


def without_trl(args: argparse.Namespace) -> str | None:
    """Why the side of TRL cannot run on a card, where nothing is installed for it."""
    python = args.trl_python or sys.executable
    if "trl" not in args.sides or (args.trl_python is None and find_spec("trl")):
        return None
    if args.trl_python and not subprocess.run([python, "-c", "import trl"], capture_output=True).returncode:
        return None
    return f"{python} cannot import trl: name an interpreter that can with --trl-python, or leave it out of --sides"


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("skipped: no CUDA device")
            return
    if args.device != "cpu" and (problem := without_trl(args)):
        sys.exit(problem)
    from roll_async.config.processor import cpuinfo, multiplies_bf16, properties
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    cpu, native = properties(cpuinfo()).get("model name", "unknown"), multiplies_bf16()
    device = card_name() if args.device == "cuda" else cpu
    runs = Path(args.output) / "runs.jsonl"
    runs.parent.mkdir(parents=True, exist_ok=True)
    for row in rows_of(args):
        for seed, side in itertools.product(args.seeds, args.sides):
            if (row, side, args.steps, seed) not in read(runs):
                found = measured(row, side, seed, args)
                if "failed" in found:
                    print(json.dumps(failed_line(found)), flush=True)
                    continue
                with runs.open("a") as out:
                    out.write(json.dumps(found) + "\n")
        done = read(runs)
        for side in SIDES[1:]:
            pairs = [[done.get((row, s, args.steps, seed)) for s in (side, "trl")] for seed in args.seeds]
            both = [pair for pair in pairs if None not in pair]
            if both:
                ours, trl = zip(*both, strict=True)
                if args.device == "cpu":
                    line = line_of(row, ours, trl, cpu=cpu, bf16_native=native)
                else:
                    line = card_line_of(row, ours, trl, device=device)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
