"""Which file a launcher means: `--config NAME_OR_PATH`, or `--config-path DIR --config-name NAME`."""

import os
from collections.abc import Iterator
from pathlib import Path

from roll_async.config.yaml.compose import CHECKOUT, OVERRIDE, SHIPPED
from roll_async.config.yaml.diagnostics import ConfigError, Diagnostic
from roll_async.config.yaml.suggest import closest

_OPTIONS = ("--config", "--config-path", "--config-name")


def resolve_config(argv: list[str], pipeline: str | None) -> tuple[Path, list[str]]:
    """(file, overrides) of a launcher's arguments.

    `pipeline` is the launcher's own kind, named in its messages. Raises ConfigError for bad usage and for a file that
    is not there; the launcher exits with 2.
    """
    options, overrides = _parse(argv)
    who = f"{pipeline or 'roll_async'} launcher"
    if "--config" in options:
        if len(options) > 1:
            raise _usage(f"{who}: give --config, or --config-path with --config-name, not both")
        name = options["--config"]
    elif "--config-name" in options:
        name = str(Path(options.get("--config-path", "."), options["--config-name"]))
    else:
        raise _usage(f"{who}: no config given; use --config NAME_OR_PATH [KEY=VALUE...]")
    return find_config(name), overrides


def find_config(name: str | Path) -> Path:
    """The file that a name means to every command: as given, then with `.yaml`, first from the working directory, then
    from the shipped configs, then from what lies around them. Raises ConfigError when there is none; what is there and
    no file is returned for its reader to refuse.
    """
    for place in _candidates(str(name)):
        if place.is_file():
            return place
    if os.path.lexists(name):
        return Path(name)
    shipped = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    near = closest(Path(name).stem, shipped)
    hint = f"did you mean '{near}'?" if near else f"shipped are: {', '.join(shipped)}"
    raise _usage(f"config '{name}' is neither a file here nor a shipped config; {hint}", str(name))


def _parse(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options by name, `_` read as `-`, and the overrides."""
    options, overrides = {}, []
    rest = iter(argv)
    for arg in rest:
        if not arg.startswith("--"):
            if not OVERRIDE.match(arg):
                raise _usage(f"'{arg}' is neither an option nor KEY=VALUE; a config is named by --config {arg}")
            overrides.append(arg)
            continue
        flag, separator, value = arg.partition("=")
        name = flag.replace("_", "-")
        if name not in _OPTIONS:
            raise _usage(f"unknown option '{flag}'; there are {', '.join(_OPTIONS)}")
        value = value if separator else next(rest, "")
        if not value:
            raise _usage(f"'{flag}' needs a value")
        if name in options:
            raise _usage(f"'{flag}' is given twice")
        options[name] = value
    return options, overrides


def _candidates(name: str) -> Iterator[Path]:
    for folder in (Path(), SHIPPED, CHECKOUT):
        for file in (name, f"{name}.yaml"):
            yield folder / file


def _usage(message: str, file: str = "(command line)") -> ConfigError:
    return ConfigError((Diagnostic(id="C008", key="(file)", file=file, line=0, message=message),))
