"""What each part of DAPO brings: the whole of it, and without one part at a time; several seeds, a table and a plot.

    python tools/bench/dapo_ablation.py [--steps 30] [--seeds 3] [--output output/dapo_ablation]

The demo's additions with room for `--response` tokens only: long answers do not fit, so some samples end unfinished and
the penalty has something to say. Four optimizer steps per batch: with one, every ratio is 1 when it is read, and
clip-higher could do nothing. The accuracy is that of a held-out validation, sampled at temperature 1; the accuracy of
trained groups is no measure, because dynamic sampling chooses them.

Equal steps: at the last step. Equal time: at the time after which the fastest variant of the same seed has ended, in
seconds of steps without validation, between two validations by a straight line. Roles start once (`tools/sweep.py`).
Finished runs are kept in runs.jsonl and not repeated, so the script may be stopped and started again. Uses the demo
assets (`make demo-assets`), or those of `--assets`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VARIANTS = {
    "full": (),
    "without clip-higher": ("algorithm.pg_options.clip_high=0.2",),
    "without dynamic sampling": ("algorithm.filter_groups.enable=false", "algorithm.filter_groups.gen_batch_size=null"),
    "without token-level loss": ("algorithm.loss_agg_mode=seq-mean-token-mean",),
    "without overlong shaping": ("algorithm.overlong_buffer.enable=false",),
}
OBSERVED = {
    "truncated": "validation/truncated",
    "length": "validation/length_mean",
    "entropy": "policy/entropy",
    "clipped high": "policy/clip_high",
}
"""Columns besides the accuracy, by their metric; of the last step."""


def overrides_of(variant: str, seed: int, args: argparse.Namespace) -> tuple[str, ...]:
    """Of configs/dapo_cpu.yaml."""
    rows = args.prompts * 8
    return (
        f"pretrain={args.assets}/model",
        f"actor_train.data_args.file_name={args.assets}/train.jsonl",
        f"validation.data_args.file_name={args.assets}/validation.jsonl",
        f"output_dir={args.output}",
        f"exp_name={variant.replace(' ', '_')}_{seed}",
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"response_length={args.response}",
        f"algorithm.overlong_buffer.len={args.response // 3}",
        f"rollout_batch_size={args.prompts}",
        f"algorithm.filter_groups.gen_batch_size={args.prompts * 3 // 2}",
        f"actor_train.training_args.per_device_train_batch_size={rows // 4}",
        "actor_train.training_args.gradient_accumulation_steps=1",
        f"actor_train.training_args.learning_rate={args.rate}",
        f"eval_steps={max(1, args.steps // 6)}",
        "val_batch_size=128",
        "validation.generating_args.temperature=1.0",
        "save_steps=0",
        "ledger.enable=false",
        *VARIANTS[variant],
    )


def run_all(args: argparse.Namespace, runs: Path) -> None:
    """Every run that is not in `runs` yet; seeds outermost, so that an unfinished experiment covers all variants."""
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from tools.sweep import Sweep

    done = {(r["variant"], r["seed"]) for r in read(runs)}
    wanted = [(v, n) for n in range(args.seeds) for v in VARIANTS if (v, n) not in done]
    if not wanted:
        return

    def config(variant: str, seed: int):
        return load(str(ROOT / "configs" / "dapo_cpu.yaml"), overrides_of(variant, seed, args), "rlvr")

    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config(*wanted[0]), runtime) as sweep,
        runs.open("a") as out,
    ):
        for variant, seed in wanted:
            row = {"variant": variant, "seed": seed, **row_of(sweep.run(config(variant, seed)))}
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{variant}, seed {seed}: {row['curve'][-1]}", file=sys.stderr)


def row_of(metrics: Sequence[dict[str, float]]) -> dict[str, object]:
    """What is kept of a run. `curve`: [step, seconds of steps so far without validation, accuracy] of each
    validation.
    """
    curve, spent = [], 0.0
    for m in metrics:
        spent += m["time/step_s"] - m["time/validation_s"]
        if "validation/accuracy" in m:
            curve.append([m["step"], round(spent, 3), m["validation/accuracy"]])
    return {
        "curve": curve,
        "seconds": spent,
        "steps": len(metrics),
        "optimizer_steps": metrics[-1]["trainer/optimizer_steps"],
        "filtered_share": metrics[-1]["groups/filtered"] / max(1.0, metrics[-1]["groups/admitted"]),
        **{name: metrics[-1][key] for name, key in OBSERVED.items() if key in metrics[-1]},
    }


def accuracy_at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Between two validations by a straight line; before the first and after the last, theirs.

    >>> accuracy_at([[5, 10.0, 0.2], [10, 20.0, 0.6]], 15.0)
    0.4
    """
    for (_, t0, a0), (_, t1, a1) in zip(curve, curve[1:], strict=False):
        if t0 <= seconds <= t1:
            return a0 + (a1 - a0) * (seconds - t0) / (t1 - t0)
    return curve[0][2] if seconds < curve[0][1] else curve[-1][2]


def equal_time(rows: Sequence[dict], row: dict) -> float:
    """Accuracy when the fastest variant of this seed had ended."""
    return accuracy_at(row["curve"], min(r["seconds"] for r in rows if r["seed"] == row["seed"]))


def read(runs: Path) -> list[dict]:
    """Rows of earlier runs."""
    return [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean +- standard deviation over seeds."""
    if not values:
        return "-"
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} +- {deviation:.{digits}f}"


def table(rows: Sequence[dict]) -> str:
    """Markdown; one line per variant, in the order of VARIANTS."""
    heads = ["variant", "seeds", "accuracy, equal steps", "accuracy, equal time", "seconds", "filtered", *OBSERVED]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for variant in VARIANTS:
        mine = [r for r in rows if r["variant"] == variant]
        cells = [
            str(len(mine)),
            spread([r["curve"][-1][2] for r in mine]),
            spread([equal_time(rows, r) for r in mine]),
            spread([r["seconds"] for r in mine], 1),
            spread([r["filtered_share"] for r in mine]),
            *(spread([r[name] for r in mine if name in r], 4) for name in OBSERVED),
        ]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[dict], path: Path) -> None:
    """Accuracy over steps with the spread over seeds, and over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for variant in VARIANTS:
        curves = [r["curve"] for r in rows if r["variant"] == variant]
        if not curves:
            continue
        points = list(zip(*curves, strict=True))  # by validation, over seeds
        means = [statistics.mean(c[2] for c in p) for p in points]
        errors = [statistics.stdev([c[2] for c in p]) if len(p) > 1 else 0.0 for p in points]
        left.errorbar([p[0][0] for p in points], means, errors, marker="o", capsize=3, label=variant)
        right.plot([statistics.mean(c[1] for c in p) for p in points], means, marker="o")
    left.set(xlabel="step", ylabel="accuracy of held-out problems, temperature 1")
    right.set(xlabel="seconds of steps, mean over seeds")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step, 8 samples each")
    parser.add_argument("--response", type=int, default=30, help="tokens; right answers take up to 33")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--assets", default="output/demo_assets")
    parser.add_argument("--output", default="output/dapo_ablation")
    parser.add_argument("--plot", default=str(ROOT / "docs_roll" / "figures" / "dapo_ablation.png"))
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    runs = Path(args.output) / "runs.jsonl"
    run_all(args, runs)
    rows = read(runs)
    plot(rows, Path(args.plot))
    print(table(rows))


if __name__ == "__main__":
    main()
