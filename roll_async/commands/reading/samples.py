"""`roll-async samples`: answers that a run keeps, in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, HELP, bad_usage, print_escaped
from roll_async.observe.reading.run_reader import RunReader, visible
from roll_async.observe.reading.sample_index import SampleFilter


@click.command(context_settings=HELP)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--best", is_flag=True, help="Highest score first.")
@click.option("--worst", is_flag=True, help="Lowest score first.")
@click.option("--step", type=click.IntRange(min=0), help="Of this step only.")
@click.option("--domain", help="Of this domain only.")
@click.option("-n", "count", metavar="K", type=click.IntRange(min=1), default=5, help="How many; default 5.")
def command(run: Path, best: bool, worst: bool, step: int | None, domain: str | None, count: int) -> int:
    """Answers of a run, the newest first: prompt, answer, score, weight version.

    Control characters in them are printed as escapes.

    \b
    Example:
      roll-async samples output/addition_demo --worst --step 20 -n 3

    Exit codes: 0 told, 2 no run, or no sample that fits.
    """
    order = "best" if best else "worst" if worst else "newest"
    asked = SampleFilter(domain=domain, first_step=step, last_step=step, order=order)
    try:
        if best and worst:
            raise ValueError("--best and --worst: give one of them")
        index = RunReader(run).samples
        index.refresh()
        _, entries = index.page(asked, limit=count)
        if not entries:
            domains, steps = (index.choices()[name] for name in ("domain", "steps"))
            has = f"it has those of {', '.join(map(str, domains))}, steps {steps[0]} to {steps[1]}"
            has = has if domains else "it keeps none (tracking.samples_per_step)"
            raise ValueError(f"{run}: no sample fits; {has}")
        rows = [next(row for row in index.group_of(e["id"]) if row["id"] == e["id"]) for e in entries]  # type: ignore[arg-type]
    except (ValueError, OSError) as wrong:
        return bad_usage("samples", wrong)
    for entry, row in zip(entries, rows, strict=True):
        score = "-" if entry["score"] is None else f"{entry['score']:.3f}"
        text = (
            f"step {entry['step']}  group {entry['group_id']}  {entry['domain']}  score {score}  {entry['outcome']}  "
            f"{entry['tokens']} tokens  version {entry['version']}\n"
        )
        for name in ("prompt", "response", "ground_truth"):
            text += f"  {name}: " + str(row[name]).replace("\n", "\n    ") + "\n"
        print_escaped(visible(text), sys.stdout)
    return EXIT_FINISHED
