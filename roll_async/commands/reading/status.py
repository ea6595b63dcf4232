"""`roll-async status`: how a run stands, in a few lines."""

from __future__ import annotations

from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, HELP, bad_usage, print_pairs
from roll_async.config.yaml.diagnostics import printable
from roll_async.observe.reading.run_reader import RunReader


@click.command(context_settings=HELP)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
def command(run: Path) -> int:
    """State, step, reward or loss, who waits for whom, the last error, and how the run in a folder is continued.

    \b
    Example:
      roll-async status output/addition_demo

    Exit codes: 0 told, 2 no run.
    """
    try:
        reader = RunReader(run)
        about, error = reader.about(), reader.last_error()
    except (ValueError, OSError) as wrong:
        return bad_usage("status", wrong)
    name = "reward" if about["reward"] is not None or about["loss"] is None else "loss"
    value = about[name]
    reason = f": {about['reason']}" if about["reason"] else ""
    rows = [
        ("run", f"{about['name']} ({about['id']}), first started {about['started']} UTC"),
        ("state", f"{about['state']}{reason}"),
        ("step", f"{about['step']} of {about['max_steps']}"),
        (name, "-" if value is None else f"{value:.3f}"),
        *([("waits", str(about["waits"]))] if about["waits"] else []),
        *([("last error", error)] if error else []),
        *[("advice", f"{found['title']}. {found['advice']}") for found in about["advisories"]],  # type: ignore[attr-defined]
        *([("continue with", str(about["continue"]))] if about["continue"] else []),
    ]
    print_pairs([(name, printable(text)) for name, text in rows])
    return EXIT_FINISHED
