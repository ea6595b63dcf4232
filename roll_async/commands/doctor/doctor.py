"""`roll-async doctor`: what of this machine and its packages, or for a config, stands in a run's way."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from roll_async.commands.command_line import AS_TYPED, EXIT_FINISHED, EXIT_USAGE, print_escaped, print_table
from roll_async.commands.configs.validate import parse
from roll_async.commands.doctor import devices, machine, packages
from roll_async.commands.doctor.findings import Check, Finding, Level, examine, issue_text
from roll_async.config.api import ConfigError, Diagnostic
from roll_async.launch.checks.gate import check_supported, require_devices, require_inputs

_WITHIN_S, _GATE_WITHIN_S = 4.0, 60.0
"""The gate imports torch and Ray where a config has devices, which takes its time on a cold disk."""
CHECKS: dict[str, Check] = {
    "Python": packages.python,
    "packages": packages.versions,
    "requirements": packages.requirements,
    "apex": packages.apex,
    "GPUs": devices.gpus,
    "CPUs": machine.processors,
    "memory": machine.memory,
    "shared memory": machine.shared_memory,
    "open files": machine.open_files,
    "disk": partial(machine.disk, Path("output")),
    "loopback": machine.loopback,
    "Ray": machine.ray_cluster,
}


@click.command(context_settings=AS_TYPED, options_metavar="[--json]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG [KEY=VALUE]...]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def command(args: tuple[str, ...], as_json: bool) -> int:
    """Look at this machine and its packages, and with CONFIG at all that keeps a run of it from starting here.

    One line for each finding, with the remedy, then a text to paste into an issue, without folders of yours. Nothing is
    started or downloaded, and nothing sent anywhere.

    \b
    Example:
      roll-async doctor rlvr_config_async_cpu

    Exit codes: 0 no problem (there may be warnings), 2 a problem, or bad usage.
    """
    try:
        configs, overrides, pipeline = parse(list(args))
        if len(configs) > 1 or (overrides and not configs):
            raise ValueError(f"expected one config at most, got {len(configs)} and {len(overrides)} overrides")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = list(examine(CHECKS, _WITHIN_S))
    for config in configs:
        found += examine({"config": partial(gate, config, overrides, pipeline)}, _GATE_WITHIN_S)
    issue = issue_text(found, Path.home())
    problems = sum(f.level is Level.PROBLEM for f in found)
    if as_json:
        rows = [{"level": f.level, "what": f.what, "said": f.said, "remedy": f.remedy} for f in found]
        print(json.dumps({"ok": not problems, "findings": rows, "issue": issue}))
    else:
        _show(found)
        print_escaped(f"\n{problems or 'no'} problem{'s' * (problems != 1)}. For an issue:\n\n{issue}", sys.stdout)
    return EXIT_USAGE if problems else EXIT_FINISHED


def gate(config: str, overrides: Sequence[str], pipeline: str | None) -> Iterator[Finding]:
    """What the start of a run of this config would refuse or warn of, here."""
    try:
        loaded = check_supported(config, overrides, pipeline)
        yield from map(_of_diagnostic, loaded.warnings)
        require_devices(loaded)
        require_inputs(loaded)
    except ConfigError as error:
        yield from (_of_diagnostic(d) for d in error.diagnostics if d.is_error)
        return
    yield Finding(Level.OK, "config", f"{config}: a run of it starts here")
    yield from machine.disk(Path(loaded.config.output_dir))
    if (port := loaded.config.tracking.prometheus_port) is not None:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            said = f"{port} cannot be served at: {error.strerror}"
            yield Finding(Level.PROBLEM, "tracking.prometheus_port", said, "choose a free port")


def _of_diagnostic(diagnostic: Diagnostic) -> Finding:
    """Its message holds the remedy."""
    return Finding(Level.PROBLEM if diagnostic.is_error else Level.WARN, "config", str(diagnostic))


def _show(found: Sequence[Finding]) -> None:
    """A table on a terminal, lines in a pipe."""
    if sys.stdout.isatty():
        print_table(("", "what", "found", "what to do"), [(f.level, f.what, f.said, f.remedy) for f in found])
        return
    for f in found:
        print_escaped(f"{f.level:<7} {f.what}: {f.said}" + (f"; {f.remedy}" if f.remedy else ""), sys.stdout)
