"""What all commands share: how they are parsed, how bad usage ends, and how results look.

Results are plain lines in a pipe and tables on a terminal.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import click

from roll_async.config.yaml.diagnostics import printable
from roll_async.config.yaml.suggest import closest
from roll_async.observe.run_record import RECORD, unused

EXIT_FINISHED, EXIT_USAGE, EXIT_ROLE_FAILED, EXIT_STALLED, EXIT_INTERRUPTED = 0, 2, 3, 4, 130
EXIT_CODES = "Exit codes: 0 finished, 2 bad usage or config, 3 a role failed, 4 stalled, 130 interrupted (state saved)."
HELP = {"help_option_names": ["-h", "--help"]}
AS_TYPED = {**HELP, "ignore_unknown_options": True}
"""For commands whose arguments are KEY=VALUE and files, read by `config/`, whose errors name unknown keys."""
_MADE = (RECORD, "results.json", "metrics.jsonl", "trajectories")


class Commands(click.Group):
    """Commands by name, each imported when it is used."""

    def __init__(self, modules: Mapping[str, tuple[str, str]], **attributes: object) -> None:
        """`modules`: command to (module with an attribute `command`, one line for the list)."""
        super().__init__(context_settings=HELP, **attributes)  # type: ignore[arg-type]
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order in which a user needs them."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None for an unknown name."""
        if cmd_name not in self._modules:
            return None
        found = import_module(self._modules[cmd_name][0]).command
        return found[cmd_name] if isinstance(found, Mapping) else found  # several of one kind share a module

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the list of commands for `--help` without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._modules.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; for an unknown name the error suggests the nearest one."""
        if args and args[0] not in self._modules:
            near = closest(args[0], list(self._modules))
            hint = f"did you mean '{near}'?" if near else f"there are {', '.join(self._modules)}"
            raise click.UsageError(f"unknown command '{args[0]}'; {hint}", ctx)
        return super().resolve_command(ctx, args)


class Number(click.FloatRange):
    """A finite number within bounds."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        # click's bounds let nan through: every comparison with it is false.
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        return number


POSITIVE = Number(min=0, min_open=True)


def execute(command: click.Command, args: Sequence[str], name: str) -> int:
    """Run a command to its exit code. Bad usage is one line on stderr and exit code 2."""
    try:
        # click's standalone mode would end the process with codes of its own.
        result = command.main(list(args), prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else name
        print(f"{where}: {error.format_message()} (try: {where} --help)", file=sys.stderr)
        return EXIT_USAGE
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else EXIT_FINISHED


def bad_usage(name: str, error: Exception) -> int:
    """One line of a command that cannot do what it is asked for."""
    print(f"roll-async {name}: {error}", file=sys.stderr)
    return EXIT_USAGE


def output_of(given: Path | None, default: Path) -> Path:
    """The folder that a command writes into: `given`, else `default` or the first unused name like it, which is made.
    Raises ValueError where `given` has what another start made.
    """
    while given is None:
        path = unused(default) if os.path.lexists(default) else default
        try:
            path.mkdir(parents=True)
        except OSError:
            if os.path.lexists(path):  # another start took it in between
                continue
        return path  # also where none can be made there: told where it is used
    if made := [name for name in _MADE if (given / name).exists()]:
        raise ValueError(f"--output {given} has {made[0]} of another start: name another folder, or move that one away")
    return given


def print_pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values: aligned lines in a pipe, a table on a terminal."""
    if sys.stdout.isatty():
        print_table(("", ""), rows)
        return
    width = max(len(name) for name, _ in rows)
    print_escaped("\n".join(f"{name:<{width}}  {value}" for name, value in rows), sys.stdout)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows with names of others in them: tab-separated lines in a pipe, a table on a terminal."""
    shown = [[printable(cell) for cell in row] for row in (columns, *rows)]
    if sys.stdout.isatty():
        print_table(shown[0], shown[1:])
    else:
        print_escaped("\n".join("\t".join(row) for row in shown), sys.stdout)


def print_escaped(text: str, stream: TextIO) -> None:
    """Print in any terminal encoding: characters that the encoding does not have are escaped."""
    print(_encodable(text, stream), file=stream)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(text: str) -> Text:  # rich would read [brackets] in a text as markup
        return Text(_encodable(text, sys.stdout))

    table = Table(title=plain(title) if title else None, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(plain(column), overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    Console().print(table)
