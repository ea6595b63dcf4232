"""`roll-async show`: a config with all defaults and derived values."""

import sys

import click

from roll_async.commands.command_line import AS_TYPED
from roll_async.commands.validate import one_config
from roll_async.config.loading.emit import derived_comments, dump


@click.command(context_settings=AS_TYPED, options_metavar="[--pipeline rlvr|agentic]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG [KEY=VALUE]...")
def command(args: tuple[str, ...]) -> int:
    """Print CONFIG with all defaults, derived values as comments. What it prints is a config itself.

    \b
    Options:
      --memory [--device-gb 80]   a table instead: GB per device and role; exit code 2 where it does not fit
      --weights [--network-gb-s 50]  instead: the bytes of a weight push over each link, and its seconds
      --pipeline rlvr|agentic     the kind of a config that does not set `pipeline`

    \b
    Example:
      roll-async show configs/rlvr_config_async_cpu.yaml max_steps=5
    """
    if "--memory" in args:
        from roll_async.commands.show_memory import run_show_memory

        return run_show_memory(list(args))
    if "--weights" in args:
        from roll_async.commands.weights import run_show_weights

        return run_show_weights(list(args))
    return run_show(list(args))


def run_show(args: list[str]) -> int:
    """Print a config with all defaults, properties as comments. Invalid: diagnostics on stderr, exit 2."""
    if (loaded := one_config("show", args)) is None:
        return 2
    sys.stdout.write(dump(loaded.config) + derived_comments(loaded.config))
    return 0
