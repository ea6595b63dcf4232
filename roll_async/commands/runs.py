"""`roll-async runs`: the runs of a folder, what became of them, and where they are."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, HELP, bad_usage, print_rows
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.run_record import read_record, state_of

_COLUMNS = ("run", "id", "started", "steps", "reward", "state")


@click.command(context_settings=HELP)
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=Path("output"))
def command(folder: Path) -> int:
    """The runs in DIR (default ./output): name, id, first start (UTC), steps, reward of the last step, state.

    A table on a terminal, tab-separated lines in a pipe. States: running, finished, interrupted, failed (with its
    reason), killed; `-` where a run of an earlier version tells nothing.

    \b
    Example:
      roll-async runs output

    Exit codes: 0 listed, 2 no such folder, or a run itself.
    """
    if not folder.is_dir():
        return bad_usage("runs", ValueError(f"{folder} is no folder; name the output_dir of your runs"))
    found = [path for path in sorted(folder.iterdir()) if _is_run(path)]
    if not found and _is_run(folder):
        parent = shlex.quote(os.path.abspath(folder / ".."))
        return bad_usage("runs", ValueError(f"{folder} is a run: `roll-async runs {parent}` lists it"))
    print_rows(_COLUMNS, [_row(path) for path in found])
    return EXIT_FINISHED


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))


def _row(path: Path) -> tuple[str, ...]:
    steps, shown = "?", "-"
    try:
        metrics = RunFolder(str(path.parent), path.name).read_metrics()
        steps, reward = (str(int(metrics[-1]["step"])), metrics[-1].get("reward/mean")) if metrics else ("0", None)
        shown = "-" if reward is None else f"{reward:.3f}"
        record = read_record(path)
    except ValueError as error:
        return (path.name, "?", "-", steps, shown, str(error))
    if record is None:
        return (path.name, "-", "-", steps, shown, "-")
    state, reason = state_of(path, record)
    return (path.name, record.run_id, record.started, steps, shown, f"{state}: {reason}" if reason else state)
