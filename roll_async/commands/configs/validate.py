"""`roll-async validate`: check configs, one line each."""

import sys
from typing import TextIO

import click

from roll_async.commands.command_line import AS_TYPED, print_escaped
from roll_async.config.api import ConfigError, Loaded
from roll_async.config.loading.check import KIND_CLASSES
from roll_async.config.yaml.compose import OVERRIDE
from roll_async.config.yaml.diagnostics import Diagnostic, printable
from roll_async.launch.checks.gate import check_supported, require_packages

_VALIDATE_USAGE = "usage: roll-async validate CONFIG... [KEY=VALUE...] [--pipeline rlvr|agentic]"


@click.command(context_settings=AS_TYPED, options_metavar="[--pipeline rlvr|agentic]")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG... [KEY=VALUE]...")
def command(args: tuple[str, ...]) -> int:
    """Check each CONFIG, a file or the name of a shipped one, by itself; KEY=VALUE overrides a key in all of them.

    \b
    Options:
      --pipeline rlvr|agentic     the kind of every config that does not set `pipeline`

    \b
    Example:
      roll-async validate configs/*.yaml max_steps=5
    """
    return run_validate(list(args))


def run_validate(args: list[str]) -> int:
    """Check each config by itself, everything on stdout. Exit 0: all valid; 2: any invalid, or bad usage."""
    try:
        paths, overrides, pipeline = parse(args)
    except ValueError as error:
        print_escaped(f"roll-async validate: {error}\n{_VALIDATE_USAGE}", sys.stdout)
        return 2
    if not paths:
        print_escaped(f"roll-async validate: no config given\n{_VALIDATE_USAGE}", sys.stdout)
        return 2
    results = [_validate_one(path, overrides, pipeline) for path in paths]
    return 0 if all(results) else 2


def _validate_one(path: str, overrides: list[str], pipeline: str | None) -> bool:
    try:
        loaded = check_supported(path, overrides, pipeline)
        missing = require_packages(loaded)
    except ConfigError as error:
        report(error.diagnostics, sys.stdout)
        count = sum(d.is_error for d in error.diagnostics)
        print_escaped(f"invalid: {printable(path)} ({count} error{'s' if count != 1 else ''})", sys.stdout)
        return False
    report((*loaded.warnings, *missing), sys.stdout)
    print_escaped(f"ok: {printable(path)} ({loaded.config.pipeline})", sys.stdout)
    return True


def one_config(name: str, args: list[str]) -> Loaded | None:
    """The config of the command `name`, its warnings printed; None with the reason on stderr."""
    try:
        paths, overrides, pipeline = parse(args)
        if len(paths) != 1:
            raise ValueError(f"expected one config, got {len(paths)}")
    except ValueError as error:
        usage = f"usage: roll-async {name} CONFIG [KEY=VALUE...] [--pipeline rlvr|agentic]"
        print_escaped(f"roll-async {name}: {error}\n{usage}", sys.stderr)
        return None
    try:
        loaded = check_supported(paths[0], overrides, pipeline)
    except ConfigError as error:
        report(error.diagnostics, sys.stderr)
        return None
    report(loaded.warnings, sys.stderr)
    return loaded


def parse(args: list[str]) -> tuple[list[str], list[str], str | None]:
    """(configs, overrides, pipeline). An argument is an override iff it starts with NAME=."""
    paths, overrides, pipeline = [], [], None
    rest = iter(args)
    for arg in rest:
        if arg == "--pipeline" or arg.startswith("--pipeline="):
            pipeline = arg.partition("=")[2] or next(rest, "")
            if pipeline not in KIND_CLASSES:
                raise ValueError(f"--pipeline {printable(pipeline)!r}: expected {' | '.join(KIND_CLASSES)}")
        elif arg.startswith("-") and arg != "-":
            raise ValueError(f"unknown option {printable(arg)!r}")
        elif OVERRIDE.match(arg):
            overrides.append(arg)
        else:
            paths.append(arg)
    return paths, overrides, pipeline


def report(diagnostics: tuple[Diagnostic, ...], stream: TextIO) -> None:
    for diagnostic in diagnostics:
        print_escaped(str(diagnostic), stream)
