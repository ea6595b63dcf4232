"""`roll-async launch`: a run on a cluster of Slurm or KubeRay, from the devices that its config names."""

from __future__ import annotations

import shutil
import subprocess
import sys

import click

from roll_async.commands.command_line import AS_TYPED, EXIT_USAGE
from roll_async.commands.configs.validate import one_config, parse
from roll_async.commands.launch import kuberay, slurm
from roll_async.commands.launch.job import ClusterJob
from roll_async.config.loading.lookup import find_config

_SUBMIT = {"slurm": ("sbatch",), "kuberay": ("kubectl", "apply", "-f", "-")}
"""Programs that take the text on their standard input."""


@click.command(context_settings=AS_TYPED, options_metavar="--to slurm|kuberay [--dry-run]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG [KEY=VALUE]...")
@click.option("--to", "target", type=click.Choice(list(_SUBMIT)), help="What manages the machines.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted.")
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="slurm: partition=gpu, time=24:00:00, ...")
@click.option("--image", help="kuberay: an image with roll_async, such as that of docker/Dockerfile.cuda.")
@click.option("--claim", help="kuberay: the PersistentVolumeClaim that all pods share; it is mounted at output_dir.")
def command(
    args: tuple[str, ...],
    target: str | None,
    dry_run: bool,
    options: tuple[str, ...],
    image: str | None,
    claim: str | None,
) -> int:
    """Submit the run of CONFIG: its nodes and GPUs, Ray on them, the run, and the end of all with it.

    \b
    Example:
      roll-async launch rlvr_config_async --to slurm --sbatch partition=gpu --dry-run
      roll-async launch rlvr_config_async --to kuberay --image me/roll_async --claim runs output_dir=/runs

    Exit codes: 0 submitted, 2 bad usage or config, else that of sbatch or kubectl.
    """
    if target is None:
        raise click.UsageError("--to slurm or --to kuberay: needed")
    if (loaded := one_config("launch", list(args))) is None:
        return EXIT_USAGE
    try:
        paths, overrides, _ = parse(list(args))
        job = ClusterJob.of(loaded.config, find_config(paths[0]), tuple(overrides))
        if target == "slurm":
            _without_effect(target, image=image, claim=claim)
            text = slurm.script(job, options)
        else:
            _without_effect(target, sbatch=options)
            text = kuberay.manifest(job, loaded.config, image, claim)
    except ValueError as error:
        print(f"roll-async launch: {error}", file=sys.stderr)
        return EXIT_USAGE
    if dry_run:
        sys.stdout.write(text)
        return 0
    program = _SUBMIT[target]
    if shutil.which(program[0]) is None:
        print(f"roll-async launch: {program[0]} is not here; --dry-run prints what it would get", file=sys.stderr)
        return EXIT_USAGE
    return subprocess.run(program, input=text, text=True, check=False).returncode


def _without_effect(target: str, **options: object) -> None:
    if given := [f"--{name}" for name, value in options.items() if value]:
        raise ValueError(f"{', '.join(given)}: has no effect with --to {target}")
