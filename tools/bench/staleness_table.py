"""What running ahead brings and costs: the CPU demo at allowances 0 to 4, several seeds; a table and a plot.

    python tools/bench/staleness_table.py [--steps 40] [--seeds 3] [--only ALLOWANCE,SEED] [KEY=VALUE ...]
    python tools/bench/staleness_table.py --forced [--staleness 0 2 4 8] [--losses ppo tis ...]

The first form: allowance a is `async_generation_ratio: a` with one weight push per step and `max_versions` 2a, so that
the mean age is about a; every run trains the same number of samples. Seconds leave out validations; accuracy is that of
the last model on held-out problems at temperature 1, 4 samples each. Budget: 1.9 times as fast at allowance 3 as at 0,
accuracy within one standard deviation. It holds for a heavy tail and sides that take equally long: the line of
allowance 0 says what they take. So the model has DEEPER times the layers of the demo's (with the demo's own, half of
the work on two cores is not the model's), and SHARED are the settings of all allowances. With
`algorithm.proximal_logprobs=auto` among the KEY=VALUEs the trainer's side is the shorter one.

`--forced`: what a given age costs each loss. The trainer waits until the queue is full before it takes a batch: from
step s + 1 on every sample is exactly s versions old, however fast generation is on this machine.

Roles start once (`tools/sweep.py`); every run begins with the warm-started model. Finished runs are kept in runs.jsonl
and not repeated, so the script may be stopped and started again, or run for one at a time with `--only`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BEHAVIOUR = "algorithm.pg_options={ratio_base: behaviour}"
NO_RECOMPUTE = "algorithm.proximal_logprobs=behaviour"
DEMO = "demo"
LOSSES = {
    DEMO: (),
    "ppo on behaviour": ("algorithm.pg_variant=ppo", BEHAVIOUR, NO_RECOMPUTE),
    "decoupled_ppo": ("algorithm.pg_variant=decoupled_ppo",),
    "tis": ("algorithm.pg_variant=tis", NO_RECOMPUTE),
    "cispo": ("algorithm.pg_variant=cispo", NO_RECOMPUTE),
    "cispo, no lower bound": (
        "algorithm.pg_variant=cispo",
        "algorithm.pg_options={cispo_epsilon_low: 1.0}",
        NO_RECOMPUTE,
    ),
    "topr": ("algorithm.pg_variant=topr", NO_RECOMPUTE),
}
DEEPER = 4
SHARED = (
    "algorithm.proximal_logprobs=recompute",  # with `auto` a step takes half as long as its batch's generation
    "actor_train.infer_batch_size=16",  # with 64 padding makes it longer than the engine's own work
    "async_training.interrupt.mode=keep",  # a push does not read again what was generated
    "actor_infer.strategy_args.strategy_config.enable_prefix_caching=false",  # prompts are 8 tokens long
)
LAST = 5
"""Steps whose mean reward is a result."""
BUDGET, BUDGET_AT = 1.9, 3
"""Times as fast, at this allowance."""
Run = tuple[str, int, int]
"""Loss, allowance, seed."""


def wanted_runs(args: argparse.Namespace) -> list[Run]:
    """Seeds outermost, so that an unfinished experiment covers all columns."""
    if args.only is not None:
        allowance, seed = args.only
        return [(loss, allowance, seed) for loss in args.losses]
    return [(x, s, n) for n in range(args.seeds) for s in args.staleness for x in args.losses]


def overrides_of(run: Run, args: argparse.Namespace) -> tuple[str, ...]:
    """What a run changes in the demo's file."""
    loss, allowance, seed = run
    assets, rows = args.assets, args.prompts * 8
    ahead = () if args.forced or not allowance else (f"async_training.staleness.max_versions={2 * allowance}",)
    return (
        f"async_generation_ratio={allowance}",
        *ahead,
        *(() if args.forced else SHARED),
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"output_dir={args.output}",
        f"exp_name={loss.replace(', ', '_').replace(' ', '_')}_{allowance}_{seed}",
        f"pretrain={assets}/model",
        f"actor_train.data_args.file_name={assets}/train.jsonl",
        f"validation.data_args.file_name={assets}/test.jsonl",
        "validation.generating_args={temperature: 1, num_return_sequences: 4}",
        f"response_length={args.response}",
        f"prompt_length={56 if args.tail == 'heavy' else 24}",
        f"rollout_batch_size={args.prompts}",
        f"actor_train.training_args.learning_rate={args.rate}",
        f"actor_train.training_args.per_device_train_batch_size={min(64, rows)}",
        f"actor_train.training_args.gradient_accumulation_steps={max(1, rows // 64)}",
        f"eval_steps={0 if args.forced else args.steps}",
        "save_steps=0",
        "ledger.enable=false",
        *LOSSES[loss],
        *args.overrides,
    )


def run_all(args: argparse.Namespace, runs: Path) -> None:
    """Every wanted run that is not in `runs` yet, after a short one that is not counted."""
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from roll_async.pipelines.rlvr import TrainLoop
    from roll_async.pipelines.wire import UserHooks
    from tools.sweep import Sweep

    class OldestAllowed(TrainLoop):
        """Takes a batch only when admission is exhausted and everything admitted is finished."""

        async def _consume(self, step, clock):
            queue, trained = self._parts.queue, (step - 1) * self._plan.groups_per_batch
            async with asyncio.timeout(300):
                while queue.stats().buffered < queue.admission_limit - trained:
                    await asyncio.sleep(0.005)
            return await super()._consume(step, clock)

    def config(run: Run, *more: str):
        return load(str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"), (*overrides_of(run, args), *more), "rlvr")

    done = {(r["loss"], r["staleness"], r["seed"]) for r in read(runs)}
    wanted = [run for run in wanted_runs(args) if run not in done]
    if not wanted:
        return
    classes = UserHooks(trainer=OldestAllowed) if args.forced else UserHooks()
    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config(wanted[0]), runtime) as sweep,
        runs.open("a") as out,
    ):
        sweep.run(config(wanted[0], "max_steps=2", "eval_steps=0", "exp_name=warm_up"))
        for run in wanted:
            loss, allowance, seed = run
            row = {"loss": loss, "staleness": allowance, "seed": seed, **row_of(sweep.run(config(run), classes))}
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(json.dumps({k: v for k, v in row.items() if k != "curve"}), file=sys.stderr)


def row_of(metrics: list[dict[str, float]]) -> dict[str, object]:
    """The figures of a run, from its steps."""
    half = metrics[len(metrics) // 2 :]
    return {
        "steps": len(metrics),
        "seconds": sum(m["time/step_s"] - m["time/validation_s"] for m in metrics),
        "t_gen_s": statistics.mean(m["time/wait_batch_s"] for m in half),
        "t_train_s": statistics.mean(m["time/step_s"] - m["time/validation_s"] - m["time/wait_batch_s"] for m in half),
        "length_mean": statistics.mean(m["response/length_mean"] for m in half),
        "length_max": statistics.mean(m["response/length_max"] for m in half),
        "reward_first": metrics[0]["reward/mean"],
        "reward_last": statistics.mean(m["reward/mean"] for m in metrics[-LAST:]),
        "accuracy": metrics[-1].get("validation/accuracy"),
        "staleness_mean": statistics.mean(m["staleness/mean"] for m in half),
        "staleness_max": max(m["staleness/max"] for m in metrics),
        "curve": [round(m["reward/mean"], 4) for m in metrics],
    }


def read(runs: Path) -> list[dict]:
    """Rows of earlier runs."""
    return [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def allowance_table(rows: list[dict], allowances: list[int]) -> str:
    """Seconds, times as fast as allowance 0 and accuracy, mean +- standard deviation over seeds, markdown."""
    lines = [
        "| allowance | seconds | times as fast | accuracy | age, mean | largest | waiting for a batch, s | else, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for allowance in allowances:
        mine = [r for r in rows if r["staleness"] == allowance]
        if not mine:
            continue
        seconds, accuracy = spread([r["seconds"] for r in mine]), spread([r["accuracy"] for r in mine])
        faster = f"{faster_at(rows, allowance):.2f}" if faster_at(rows, allowance) else "-"
        of = {name: statistics.mean(r[name] for r in mine) for name in ("staleness_mean", "t_gen_s", "t_train_s")}
        lines.append(
            f"| {allowance} | {seconds[0]:.1f} +- {seconds[1]:.1f} | {faster} | {accuracy[0]:.3f} +- {accuracy[1]:.3f} "
            f"| {of['staleness_mean']:.2f} | {max(r['staleness_max'] for r in mine):.0f} | {of['t_gen_s']:.2f} "
            f"| {of['t_train_s']:.2f} |"
        )
    return "\n".join(lines)


def faster_at(rows: list[dict], allowance: int) -> float | None:
    """Mean over the seeds that ran at allowance 0, too; None without one."""
    base = {r["seed"]: r["seconds"] for r in rows if r["staleness"] == 0}
    times = [base[r["seed"]] / r["seconds"] for r in rows if r["staleness"] == allowance and r["seed"] in base]
    return statistics.mean(times) if times else None


def verdict(rows: list[dict]) -> dict[str, object] | None:
    """The budget's line; None until both of its allowances have run."""
    faster = faster_at(rows, BUDGET_AT)
    if faster is None:
        return None
    (base, deviation), (found, _) = (
        spread([r["accuracy"] for r in rows if r["staleness"] == allowance]) for allowance in (0, BUDGET_AT)
    )
    return {
        "name": "staleness_table",
        "value": round(faster, 3),
        "unit": "x",
        "ratio": round(faster, 3),
        "budget": BUDGET,
        "accuracy": round(found, 3),
        "accuracy_at_0": round(base, 3),
        "deviation_at_0": round(deviation, 3),
        "ok": faster >= BUDGET and found >= base - deviation,
        "seeds": len({r["seed"] for r in rows if r["staleness"] == BUDGET_AT}),
    }


def forced_table(rows: list[dict], losses: list[str], staleness: list[int]) -> str:
    """Mean +- standard deviation of the final reward over seeds, markdown."""
    lines = ["| loss | " + " | ".join(f"staleness {s}" for s in staleness) + " |", "|---|" + "---|" * len(staleness)]
    for loss in losses:
        cells = []
        for s in staleness:
            rewards = [r["reward_last"] for r in rows if (r["loss"], r["staleness"]) == (loss, s)]
            cells.append("{:.3f} +- {:.3f}".format(*spread(rewards)) if rewards else "-")
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    measured = [[r["staleness_mean"] for r in rows if r["staleness"] == s] for s in staleness]
    means = [f"{statistics.mean(m):.2f}" if m else "-" for m in measured]
    return "\n".join([*lines, "| *measured mean staleness* | " + " | ".join(means) + " |"])


def plot(rows: list[dict], args: argparse.Namespace, path: Path) -> None:
    """Left: accuracy over the allowance (or reward over the forced age, by loss), beside the seconds of the first form.
    Right: the curves of each allowance (or of each loss at the largest age), over the step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    value = "reward_last" if args.forced else "accuracy"
    present = [s for s in args.staleness if any(r["staleness"] == s for r in rows)]
    for number, loss in enumerate(args.losses):
        points = [(s, [r[value] for r in rows if (r["loss"], r["staleness"]) == (loss, s)]) for s in present]
        points = [(s, spread(p)) for s, p in points if p]
        left.errorbar(
            [s + (0.08 * (number - 2) if args.forced else 0) for s, _ in points],
            [mean for _, (mean, _) in points],
            [deviation for _, (_, deviation) in points],
            marker="o", capsize=3, label=loss if args.forced else "accuracy of the last model",
        )  # fmt: skip
    curves = {x: [r["curve"] for r in rows if r["loss"] == x and r["staleness"] == present[-1]] for x in args.losses}
    if not args.forced:
        curves = {f"allowance {s}": [r["curve"] for r in rows if r["staleness"] == s] for s in present}
    for name, lines in curves.items():
        if lines:
            means = [statistics.mean(step) for step in zip(*lines, strict=False)]
            right.plot(range(1, len(means) + 1), means, label=name)
    if args.forced:
        left.set(xlabel="staleness of every sample, versions", ylabel=f"reward, mean of the last {LAST} steps")
        right.set(title=f"staleness {present[-1]}")
    else:
        seconds = left.twinx()
        seconds.bar(
            present,
            [statistics.mean(r["seconds"] for r in rows if r["staleness"] == s) for s in present],
            width=0.5, color="0.85", zorder=0,
        )  # fmt: skip
        seconds.set(ylabel="seconds (bars)", ylim=(0, None))
        left.set_zorder(seconds.get_zorder() + 1)
        left.patch.set_visible(False)
        left.set(xlabel="allowance: async_generation_ratio", ylabel="accuracy, temperature 1", ylim=(0, 1))
        right.legend()
    left.set(xticks=present)
    right.set(xlabel="step", ylabel="reward, mean over seeds")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=max(1, len(args.losses)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def one_run(text: str) -> tuple[int, int]:
    """`3,0` is allowance 3, seed 0."""
    try:
        allowance, seed = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ALLOWANCE,SEED, two whole numbers such as 3,0") from None
    return allowance, seed


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="40, forced 30")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=one_run, metavar="ALLOWANCE,SEED", help="this run alone")
    parser.add_argument("--forced", action="store_true", help="every sample is exactly so old")
    parser.add_argument("--staleness", type=int, nargs="+", help="0 1 2 3 4, forced 0 2 4 8")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), help="with --forced, default: all")
    parser.add_argument("--tail", choices=("light", "heavy"), help="of the lengths: heavy, forced light")
    parser.add_argument("--assets", help="made if missing; one folder for each form and tail")
    parser.add_argument("--response", type=int, help="tokens of an answer: 96, heavy 256")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step, 8 samples each")
    parser.add_argument("--rate", type=float, help="1e-4, forced 3e-4")
    parser.add_argument("--output", help="output/staleness_table, or output/staleness_forced")
    parser.add_argument("--plot", help="docs_roll/figures/staleness_table.png, forced staleness.png")
    parser.add_argument("overrides", nargs="*", help="more settings, key=value")
    args = parser.parse_args(argv)
    if args.losses and not args.forced:
        parser.error("--losses belongs to --forced: allowances are measured with the demo's own loss")
    args.losses = args.losses or ([name for name in LOSSES if name != DEMO] if args.forced else [DEMO])
    args.rate = args.rate or (3e-4 if args.forced else 1e-4)
    args.steps = args.steps or (30 if args.forced else 40)
    args.staleness = args.staleness or ([0, 2, 4, 8] if args.forced else [0, 1, 2, 3, 4])
    args.tail = args.tail or ("light" if args.forced else "heavy")
    kind = ("_heavy" if args.tail == "heavy" else "") + ("" if args.forced else "_deep")
    args.assets = args.assets or f"output/demo_assets{kind}"
    args.response = args.response or (256 if args.tail == "heavy" else 96)
    name = "staleness_forced" if args.forced else "staleness_table"
    args.output = args.output or f"output/{name}"
    figure = "staleness" if args.forced else name
    args.plot = args.plot or str(ROOT / "docs_roll" / "figures" / f"{figure}.png")
    return args


def main() -> None:
    args = arguments()
    from tools.machine import busy_core, machine_line

    print(machine_line(args), flush=True)
    print(json.dumps({"name": "busy_core", "value": busy_core(), "unit": "of a core alone"}), flush=True)
    make = [sys.executable, str(ROOT / "tools" / "make_demo_assets.py"), "--output", args.assets]
    if not (Path(args.assets) / "manifest.json").is_file():
        deeper = [] if args.forced else ["--deeper", str(DEEPER)]
        subprocess.run(
            [*make, *deeper, *(["--heavy-tail"] if args.tail == "heavy" else [])], check=True, stdout=sys.stderr
        )
    Path(args.output).mkdir(parents=True, exist_ok=True)
    runs = Path(args.output) / "runs.jsonl"
    run_all(args, runs)
    rows = [row for row in read(runs) if row["loss"] in args.losses and row["staleness"] in args.staleness]
    if not rows:
        sys.exit("no run of these is finished")
    plot(rows, args, Path(args.plot))
    print(forced_table(rows, args.losses, args.staleness) if args.forced else allowance_table(rows, args.staleness))
    if not args.forced and (line := verdict(rows)) is not None:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
