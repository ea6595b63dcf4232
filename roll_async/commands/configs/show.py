"""`roll-async show`: a config with all defaults and derived values."""

import sys

import click

from roll_async.commands.command_line import AS_TYPED, POSITIVE
from roll_async.commands.configs.validate import one_config
from roll_async.config.yaml.emit import derived_comments, dump


@click.command(context_settings=AS_TYPED, options_metavar="[--pipeline rlvr|agentic]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG [KEY=VALUE]...")
@click.option("--memory", is_flag=True, help="A table instead: GB per device and role; exit code 2 if it does not fit.")
@click.option("--device-gb", type=POSITIVE, default=80.0, show_default=True, help="With --memory: GB of a device.")
@click.option("--weights", is_flag=True, help="Instead: the bytes of a weight push over each link, and its seconds.")
@click.option("--network-gb-s", type=POSITIVE, default=50.0, show_default=True, help="With --weights: per device.")
def command(args: tuple[str, ...], memory: bool, device_gb: float, weights: bool, network_gb_s: float) -> int:
    """Print CONFIG with all defaults, derived values as comments. What it prints is a config itself.

    \b
    Options:
      --pipeline rlvr|agentic     the kind of a config that does not set `pipeline`

    \b
    Example:
      roll-async show configs/rlvr_config_async_cpu.yaml max_steps=5
    """
    if (loaded := one_config("show", list(args))) is None:
        return 2
    try:
        if memory:
            from roll_async.commands.configs.show_memory import (
                show_memory,  # imports torch, seconds that a config is not worth
            )

            return show_memory(loaded.config, device_gb)
        if weights:
            from roll_async.commands.configs.weights import plan_of
            from roll_async.launch.checks.device_memory import GB
            from roll_async.weight_sync.traffic import Links

            print("\n".join(plan_of(loaded.generating, Links(network=network_gb_s * GB))))
            return 0
    except ValueError as error:
        print(f"roll-async show: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(dump(loaded.config) + derived_comments(loaded.config))
    return 0
