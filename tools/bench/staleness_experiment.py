"""What staleness costs each loss: the CPU demo at staleness 0, 2, 4, 8, several seeds; a table and a plot.

    python tools/bench/staleness_experiment.py [--steps 30] [--seeds 3] [--output output/staleness_experiment]

Roles start once (`tools/sweep.py`); every run begins with the warm-started model. Staleness s is
`async_generation_ratio: s` with one weight push per step, and the trainer waits until the queue is full before it
takes a batch: from step s + 1 on every sample is exactly s versions old, however fast generation is on this machine.
Finished runs are kept in runs.jsonl and not repeated, so the script may be stopped and started again.
Uses the demo assets (`make demo-assets`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BEHAVIOUR = "algorithm.pg_options={ratio_base: behaviour}"
NO_RECOMPUTE = "algorithm.proximal_logprobs=behaviour"
LOSSES = {
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
LAST = 5
"""Steps whose mean reward is the result."""


def run_all(args: argparse.Namespace, runs: Path) -> None:
    """Every run that is not in `runs` yet; seeds outermost, so that an unfinished experiment covers all losses."""
    from roll_async.cluster.runtime import ray_runtime
    from roll_async.config.api import load
    from roll_async.launch.run import RunClasses
    from roll_async.pipelines.rlvr import TrainLoop
    from tools.sweep import Sweep

    class OldestAllowed(TrainLoop):
        """Takes a batch only when admission is exhausted and everything admitted is finished."""

        async def _consume(self, step, clock):
            queue, trained = self._parts.queue, (step - 1) * self._plan.groups_per_batch
            async with asyncio.timeout(300):
                while queue.stats().buffered < queue.admission_limit - trained:
                    await asyncio.sleep(0.005)
            return await super()._consume(step, clock)

    def config(loss: str, staleness: int, seed: int):
        overrides = (
            f"async_generation_ratio={staleness}",
            f"seed={seed}",
            f"max_steps={args.steps}",
            f"output_dir={args.output}",
            f"exp_name={loss.replace(', ', '_').replace(' ', '_')}_{staleness}_{seed}",
            f"rollout_batch_size={args.prompts}",
            f"actor_train.training_args.learning_rate={args.rate}",
            f"actor_train.training_args.gradient_accumulation_steps={args.prompts * 8 // 64}",
            "eval_steps=0",
            "save_steps=0",
            "ledger.enable=false",
            *LOSSES[loss],
        )
        return load(str(ROOT / "configs" / "rlvr_config_async_cpu.yaml"), overrides, "rlvr")

    done = {(r["loss"], r["staleness"], r["seed"]) for r in read(runs)}
    wanted = [(x, s, n) for n in range(args.seeds) for s in args.staleness for x in args.losses]
    wanted = [w for w in wanted if w not in done]
    if not wanted:
        return
    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config(*wanted[0]), runtime) as sweep,
        runs.open("a") as out,
    ):
        for loss, staleness, seed in wanted:
            metrics = sweep.run(config(loss, staleness, seed), RunClasses(trainer=OldestAllowed))
            half = metrics[len(metrics) // 2 :]
            row = {
                "loss": loss,
                "staleness": staleness,
                "seed": seed,
                "steps": len(metrics),
                "reward_first": metrics[0]["reward/mean"],
                "reward_last": statistics.mean(m["reward/mean"] for m in metrics[-LAST:]),
                "staleness_mean": statistics.mean(m["staleness/mean"] for m in half),
                "staleness_max": max(m["staleness/max"] for m in metrics),
                "curve": [round(m["reward/mean"], 4) for m in metrics],
            }
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{loss} staleness {staleness} seed {seed}: {row['reward_last']:.3f}", file=sys.stderr)


def read(runs: Path) -> list[dict]:
    """Rows of earlier runs."""
    return [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []


def table(rows: list[dict], losses: list[str], staleness: list[int]) -> str:
    """Mean +- standard deviation of the final reward over seeds, markdown."""
    lines = ["| loss | " + " | ".join(f"staleness {s}" for s in staleness) + " |", "|---|" + "---|" * len(staleness)]
    for loss in losses:
        cells = []
        for s in staleness:
            rewards = [r["reward_last"] for r in rows if (r["loss"], r["staleness"]) == (loss, s)]
            spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
            cells.append(f"{statistics.mean(rewards):.3f} +- {spread:.3f}" if rewards else "-")
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    measured = [[r["staleness_mean"] for r in rows if r["staleness"] == s] for s in staleness]
    lines.append(
        "| *measured mean staleness* | "
        + " | ".join(f"{statistics.mean(m):.2f}" if m else "-" for m in measured)
        + " |"
    )
    return "\n".join(lines)


def plot(rows: list[dict], losses: list[str], staleness: list[int], path: Path) -> None:
    """Final reward over staleness, and the curves at the largest staleness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, loss in enumerate(losses):
        mine = [r for r in rows if r["loss"] == loss]
        points = [(s, [r["reward_last"] for r in mine if r["staleness"] == s]) for s in staleness]
        points = [(s, p) for s, p in points if p]
        left.errorbar(
            [s + 0.08 * (number - 2) for s, _ in points],
            [statistics.mean(p) for _, p in points],
            [statistics.stdev(p) if len(p) > 1 else 0 for _, p in points],
            marker="o", capsize=3, label=loss,
        )  # fmt: skip
        curves = [r["curve"] for r in mine if r["staleness"] == staleness[-1]]
        if curves:
            right.plot(
                range(1, len(curves[0]) + 1), [statistics.mean(step) for step in zip(*curves, strict=True)], label=loss
            )
    left.set(
        xlabel="staleness of every sample, versions", ylabel=f"reward, mean of the last {LAST} steps", xticks=staleness
    )
    right.set(xlabel="step", ylabel="reward, mean over seeds", title=f"staleness {staleness[-1]}")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(losses))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step, 8 samples each")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--output", default="output/staleness_experiment")
    parser.add_argument("--plot", default=str(ROOT / "docs_roll" / "figures" / "staleness.png"))
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    runs = Path(args.output) / "runs.jsonl"
    run_all(args, runs)
    rows = read(runs)
    plot(rows, args.losses, args.staleness, Path(args.plot))
    print(table(rows, args.losses, args.staleness))


if __name__ == "__main__":
    main()
