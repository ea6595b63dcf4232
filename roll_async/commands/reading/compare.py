"""`roll-async compare`: two runs beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, HELP, bad_usage, print_rows
from roll_async.observe.reading.run_reader import RunReader, config_differences

_KEYS = (
    "reward/mean", "validation/accuracy", "response/length_mean", "throughput/tokens_per_s", "time/step_s",
    "staleness/mean", "idle/trainer", "idle/engines", "correction/ess", "trainer/grad_norm", "trainer/loss",
    "validation/loss", "rewards/accuracies",
)  # fmt: skip


@click.command(context_settings=HELP)
@click.argument("one", metavar="A", type=click.Path(path_type=Path))
@click.argument("other", metavar="B", type=click.Path(path_type=Path))
@click.option("--every", type=click.IntRange(min=1), help="Show every Nth step; default: five of those both have.")
def command(one: Path, other: Path, every: int | None) -> int:
    """Metrics of two runs at equal steps, then the keys of their configs that say something else.

    Tables on a terminal, tab-separated lines in a pipe.

    \b
    Example:
      roll-async compare output/a output/b

    Exit codes: 0 compared, 2 no run, or no step that both have.
    """
    try:
        first, second = RunReader(one), RunReader(other)
        of_first, of_second = ({int(row["step"]): row for row in run.metrics} for run in (first, second))
        both = sorted(of_first.keys() & of_second.keys())
        if not both:
            raise ValueError(f"{one} and {other} have no step in common")
        differences = config_differences(first, second)
    except (ValueError, OSError) as wrong:
        return bad_usage("compare", wrong)
    steps = {step for step in both if step % every == 0} if every else set(both[:: -(-len(both) // 5)])
    rows = [
        (str(step), key, *(f"{run[step][key]:.4g}" if key in run[step] else "-" for run in (of_first, of_second)))
        for step in sorted(steps | {both[-1]})
        for key in _KEYS
        if key in of_first[step] or key in of_second[step]
    ]
    names = (str(one), str(other))
    print_rows(("step", "metric", *names), rows)
    print_rows(("config", *names), differences)
    return EXIT_FINISHED
