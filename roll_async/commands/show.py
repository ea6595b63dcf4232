"""`roll-async show`: a config with all defaults and derived values."""

import sys

import click

from roll_async.commands.command_line import AS_TYPED
from roll_async.commands.validate import parse, print_escaped, report
from roll_async.config.api import ConfigError
from roll_async.config.loading.emit import derived_comments, dump
from roll_async.launch.gate import admit

_SHOW_USAGE = "usage: roll-async show CONFIG [KEY=VALUE...] [--pipeline rlvr|agentic]"


@click.command(context_settings=AS_TYPED, options_metavar="[--pipeline rlvr|agentic]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG [KEY=VALUE]...")
def command(args: tuple[str, ...]) -> int:
    """Print CONFIG with all defaults, derived values as comments. What it prints is a config itself.

    \b
    Options:
      --memory [--device-gb 80]   a table instead: GB per device and role; exit code 2 where it does not fit
      --pipeline rlvr|agentic     the kind of a config that does not set `pipeline`

    \b
    Example:
      roll-async show configs/rlvr_config_async_cpu.yaml max_steps=5
    """
    if "--memory" in args:
        from roll_async.commands.show_memory import run_show_memory

        return run_show_memory(list(args))
    return run_show(list(args))


def run_show(args: list[str]) -> int:
    """Print a config with all defaults, properties as comments. Invalid: diagnostics on stderr, exit 2."""
    try:
        paths, overrides, pipeline = parse(args)
        if len(paths) != 1:
            raise ValueError(f"expected one config, got {len(paths)}")
    except ValueError as error:
        print_escaped(f"roll-async show: {error}\n{_SHOW_USAGE}", sys.stderr)
        return 2
    try:
        loaded = admit(paths[0], overrides, pipeline)
    except ConfigError as error:
        report(error.diagnostics, sys.stderr)
        return 2
    report(loaded.warnings, sys.stderr)
    sys.stdout.write(dump(loaded.config) + derived_comments(loaded.config))
    return 0
