"""`roll-async scale`: more or fewer engine replicas for a run under way."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, EXIT_USAGE, HELP
from roll_async.observe.replica_requests import ReplicaRequests

_ANSWER_WITHIN_S = 30.0


@click.command(context_settings=HELP)
@click.argument("run", metavar="RUN")
@click.option("--replicas", type=int, required=True, help="Engine replicas from now on, at least 1.")
def command(run: str, replicas: int) -> int:
    """Engine replicas join RUN or leave it, while it trains. RUN is its folder, or its exp_name under ./output.

    A new replica waits for devices without stopping the run, gets the present weights, then requests. Those that came
    last leave first; what they run goes on elsewhere with the tokens it has.

    \b
    Example:
      roll-async scale my_experiment --replicas 4

    Exit codes: 0 the run obeys, 2 bad usage, no such run, or refused by it.
    """
    try:
        if replicas < 1:
            raise ValueError(f"--replicas {replicas}: a run needs at least 1")
        print(ReplicaRequests(_folder(run)).ask(replicas, _ANSWER_WITHIN_S))
    except (ValueError, OSError) as error:
        print(f"roll-async scale: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_FINISHED


def _folder(run: str) -> Path:
    """Raises ValueError when there is none."""
    places = [Path(run), Path("output") / run]
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise ValueError(f"no run '{run}': neither {places[0]} nor {places[1]} holds the config.yaml of a run")
