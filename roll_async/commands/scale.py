"""`roll-async scale`: more or fewer engine replicas, or a longer or shorter queue, for a run under way."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from roll_async.commands.command_line import EXIT_FINISHED, EXIT_USAGE, HELP
from roll_async.observe.replica_requests import ReplicaRequests

_ANSWER_WITHIN_S = 30.0


@click.command(context_settings=HELP)
@click.argument("run", metavar="RUN")
@click.option("--replicas", type=int, help="Engine replicas from now on, at least 1.")
@click.option("--max-queue-size", type=int, help="async_training.max_queue_size from now on, at least one batch.")
def command(run: str, replicas: int | None, max_queue_size: int | None) -> int:
    """Engine replicas join RUN or leave it, or its queue gets another bound, while it trains. RUN is its folder, or its
    exp_name under ./output.

    A new replica waits for devices without stopping the run, gets the present weights, then requests. Those that came
    last leave first; what they run goes on elsewhere with the tokens it has. The bound of the queue holds until the run
    ends or is restarted; a bound above what async_generation_ratio admits changes nothing.

    \b
    Example:
      roll-async scale my_experiment --replicas 4
      roll-async scale my_experiment --max-queue-size 256

    Exit codes: 0 the run obeys, 2 bad usage, no such run, or refused by it.
    """
    try:
        if replicas is None and max_queue_size is None:
            raise ValueError("nothing to change: give --replicas N, --max-queue-size N, or both")
        if replicas is not None and replicas < 1:
            raise ValueError(f"--replicas {replicas}: a run needs at least 1")
        print(ReplicaRequests(_folder(run)).ask(_ANSWER_WITHIN_S, replicas=replicas, max_queue_size=max_queue_size))
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
