"""`roll-async validate` and `roll-async show`."""

import sys
from typing import TextIO

from roll_async.config.api import ConfigError, load_with_warnings
from roll_async.config.loading.compose import OVERRIDE
from roll_async.config.loading.diagnostics import Diagnostic, printable
from roll_async.config.loading.emit import derived_comments, dump
from roll_async.config.schema import RLVRConfig

_VALIDATE_USAGE = "usage: roll-async validate CONFIG... [KEY=VALUE...] [--pipeline rlvr|agentic]"
_SHOW_USAGE = "usage: roll-async show CONFIG [KEY=VALUE...] [--pipeline rlvr|agentic]"


def run_validate(args: list[str]) -> int:
    """Check each config by itself, everything on stdout. Exit 0: all valid; 2: any invalid, or bad usage."""
    try:
        paths, overrides, pipeline = _parse(args)
    except ValueError as error:
        _print(f"roll-async validate: {error}\n{_VALIDATE_USAGE}", sys.stdout)
        return 2
    if not paths:
        _print(f"roll-async validate: no config given\n{_VALIDATE_USAGE}", sys.stdout)
        return 2
    results = [_validate_one(path, overrides, pipeline) for path in paths]
    return 0 if all(results) else 2


def run_show(args: list[str]) -> int:
    """Print a config with all defaults, properties as comments. Invalid: diagnostics on stderr, exit 2."""
    try:
        paths, overrides, pipeline = _parse(args)
        if len(paths) != 1:
            raise ValueError(f"expected one config, got {len(paths)}")
    except ValueError as error:
        _print(f"roll-async show: {error}\n{_SHOW_USAGE}", sys.stderr)
        return 2
    try:
        loaded = load_with_warnings(paths[0], overrides, pipeline)
    except ConfigError as error:
        _report(error.diagnostics, sys.stderr)
        return 2
    _report(loaded.warnings, sys.stderr)
    sys.stdout.write(dump(loaded.config) + derived_comments(loaded.config))
    return 0


def _validate_one(path: str, overrides: list[str], pipeline: str | None) -> bool:
    try:
        loaded = load_with_warnings(path, overrides, pipeline)
    except ConfigError as error:
        _report(error.diagnostics, sys.stdout)
        count = sum(d.is_error for d in error.diagnostics)
        _print(f"invalid: {printable(path)} ({count} error{'s' if count != 1 else ''})", sys.stdout)
        return False
    _report(loaded.warnings, sys.stdout)
    kind = "rlvr" if isinstance(loaded.config, RLVRConfig) else "agentic"
    _print(f"ok: {printable(path)} ({kind})", sys.stdout)
    return True


def _parse(args: list[str]) -> tuple[list[str], list[str], str | None]:
    """(configs, overrides, pipeline). An argument is an override iff it starts with NAME=."""
    paths, overrides, pipeline = [], [], None
    rest = iter(args)
    for arg in rest:
        if arg == "--pipeline" or arg.startswith("--pipeline="):
            pipeline = arg.partition("=")[2] or next(rest, "")
            if pipeline not in ("rlvr", "agentic"):
                raise ValueError(f"--pipeline {printable(pipeline)!r}: expected rlvr or agentic")
        elif arg.startswith("-") and arg != "-":
            raise ValueError(f"unknown option {printable(arg)!r}")
        elif OVERRIDE.match(arg):
            overrides.append(arg)
        else:
            paths.append(arg)
    return paths, overrides, pipeline


def _report(diagnostics: tuple[Diagnostic, ...], stream: TextIO) -> None:
    for diagnostic in diagnostics:
        _print(str(diagnostic), stream)


def _print(text: str, stream: TextIO) -> None:
    """Print whatever the terminal's encoding is: characters it does not have are escaped."""
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
