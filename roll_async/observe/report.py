"""The report at the end of a run: a plot and a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from roll_async.observe.disk import writing

Metrics = dict[str, float]


def draw(metrics: Sequence[Metrics], path: Path, title: str) -> None:
    """Reward, throughput and staleness over steps as a PNG; of a run without engines loss and throughput."""
    import matplotlib

    matplotlib.use("Agg")  # before pyplot is imported, which would choose one for a display
    from matplotlib import pyplot

    def points(key: str) -> tuple[list[float], list[float]]:
        """Steps and values of the steps that have a number of this key."""
        found = [m for m in metrics if math.isfinite(m.get(key, math.nan))]
        return [m["step"] for m in found], [m[key] for m in found]

    with_engines = any("reward/mean" in m for m in metrics)
    trained, held_out = ("reward/mean", "accuracy") if with_engines else ("trainer/loss", "loss")
    heights = (3, 2, 2) if with_engines else (3, 2)
    figure, axes = pyplot.subplots(len(heights), 1, figsize=(8, 8), sharex=True, height_ratios=heights)
    steps, values = points(trained)
    axes[0].plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="per step")
    axes[0].plot(steps, _smooth(values, 5), color="tab:blue", linewidth=2, label="mean of 5")
    validated = points(f"validation/{held_out}")
    if validated[0]:
        axes[0].plot(*validated, "o", color="tab:orange", markersize=4, label=f"validation {held_out}")
    axes[0].set_ylabel("reward" if with_engines else "loss")
    axes[0].legend(loc="lower right" if with_engines else "upper right")
    axes[1].plot(*points("throughput/samples_per_s"), color="tab:green")
    axes[1].set_ylabel("samples / s")
    axes[1].set_ylim(bottom=0)
    if with_engines:
        axes[2].plot(*points("staleness/mean"), color="tab:red", label="mean")
        axes[2].step(*points("staleness/max"), color="tab:red", alpha=0.4, where="mid", label="max")
        axes[2].set_ylabel("staleness (versions)")
        axes[2].set_ylim(bottom=0)
        axes[2].legend(loc="upper right")
    axes[-1].set_xlabel("training step")
    for axis in axes:
        axis.grid(alpha=0.25)
    axes[0].set_title(title)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)  # pyplot keeps every figure that is not closed


def summary(metrics: Sequence[Metrics], rows: Sequence[tuple[str, str]]) -> str:
    """The closing table as text; `rows` are appended."""
    first, last, oldest = metrics[:5], metrics[-5:], max(m["staleness/max"] for m in metrics)

    def mean(part: Sequence[Metrics], key: str) -> float:
        return sum(m[key] for m in part) / len(part)

    table = [
        ("steps", _steps(metrics)),
        ("reward, mean of first / last 5 steps", f"{mean(first, 'reward/mean'):.3f} / {mean(last, 'reward/mean'):.3f}"),
        ("samples/s", f"{mean(metrics, 'throughput/samples_per_s'):.1f}"),
        ("tokens/s", f"{mean(metrics, 'throughput/tokens_per_s'):.0f}"),
        ("staleness mean / max", f"{mean(metrics, 'staleness/mean'):.2f} / {oldest:.0f}"),
        ("trainer waited for batches", f"{mean(metrics, 'idle/trainer'):.0%} of the time"),
        ("of a step", _waits(metrics)),
        ("engines without a request", f"{mean(metrics, 'idle/engines'):.0%} of the time"),
        ("groups trained / filtered / dropped / failed", " / ".join(
            f"{metrics[-1][f'groups/{k}']:.0f}" for k in ("trained", "filtered", "dropped", "failed"))),
        *[("start", _start(m)) for m in metrics if "start/total_s" in m][-1:],
        *rows,
    ]  # fmt: skip
    return _aligned(table)


def summary_without_engines(metrics: Sequence[Metrics], rows: Sequence[tuple[str, str]]) -> str:
    """`summary` of an sft or dpo run."""
    validated = [m["validation/loss"] for m in metrics if "validation/loss" in m]
    of_held_out = [("validation loss, first / last", f"{validated[0]:.4f} / {validated[-1]:.4f}")] if validated else []
    table = [
        ("steps", f"{_steps(metrics)}, {metrics[-1]['data/epoch']:.2f} epochs"),
        ("loss, first / last step", f"{metrics[0]['trainer/loss']:.4f} / {metrics[-1]['trainer/loss']:.4f}"),
        *of_held_out,
        ("tokens/s", f"{sum(m['throughput/tokens_per_s'] for m in metrics) / len(metrics):.0f}"),
        *rows,
    ]
    return _aligned(table)


def _steps(metrics: Sequence[Metrics]) -> str:
    """The number of steps, and their seconds in all processes of the run: `time_s` begins anew in each, whose first
    step tells of its start.
    """
    rows = [*metrics, {"start/total_s": 0.0}]

    def ends(m: Metrics, after: Metrics) -> bool:
        if after.get("run/restarts", 0) > m.get("run/restarts", 0):
            return False  # all roles started again, in one process
        return "start/total_s" in after or after["time_s"] < m["time_s"]

    seconds = sum(m["time_s"] for m, after in pairwise(rows) if ends(m, after))
    return f"{metrics[-1]['step']:.0f} in {seconds:.0f} s"


def _aligned(table: Sequence[tuple[str, str]]) -> str:
    """Long values go on below their beginning; a path is left whole."""
    names = max(len(name) for name, _ in table) + 4
    below = "\n" + " " * names
    wrapped = [
        (name, textwrap.wrap(value, _COLUMNS - names, break_long_words=False, break_on_hyphens=False))
        for name, value in table
    ]
    return "\n".join(f"  {name.ljust(names - 2)}{below.join(lines)}" for name, lines in wrapped)


_COLUMNS = 100
"""Of the closing table: run.log has the same one, whatever the terminal is."""
_CAUSES = {
    "idle/trainer_rollouts": "answers", "idle/trainer_rewards": "scores", "idle/trainer_roles": "reference or teacher",
    "idle/trainer_collation": "tensors", "idle/trainer_weights": "pushes", "idle/trainer_validation": "validation",
    "idle/trainer_checkpoint": "checkpoints", "idle/trainer_records": "the ledger",
}  # fmt: skip


def _waits(metrics: Sequence[Metrics]) -> str:
    """What a step of the trainer consisted of: work, then its waits, the longest first."""
    shares = {name: sum(m.get(key, 0.0) for m in metrics) / len(metrics) for key, name in _CAUSES.items()}
    waits = [f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share >= 0.01]
    return f"training {max(0.0, 1 - sum(shares.values())):.0%}, waits for {', '.join(waits) or 'nothing'}"


def _start(metrics: Metrics) -> str:
    """The seconds until engines had the first weights, and of the three roles whose phases took longest."""
    roles: dict[str, dict[str, float]] = {}
    for key, seconds in metrics.items():
        if key.startswith("start/") and key.count("/") == 2:
            _, role, phase = key.removesuffix("_s").split("/")
            roles.setdefault(role, {})[phase] = seconds
    longest = sorted(roles, key=lambda role: -sum(roles[role].values()))[:3]
    parts = [
        f"{role} {sum(roles[role].values()):.0f} ({', '.join(f'{p} {s:.0f}' for p, s in roles[role].items())})"
        for role in longest
    ]
    return f"{metrics['start/total_s']:.0f} s: {'; '.join(parts)}"


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
