"""`roll-async`: parse, hand over. Every command checks its input before it imports anything heavy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

_USAGE = """usage: roll-async COMMAND ...

  run       --config NAME_OR_PATH [KEY=VALUE ...]   train (RLVR or agentic, by the config's kind)
  validate  CONFIG... [KEY=VALUE ...]               check configs, one line each
  show      CONFIG [KEY=VALUE ...]                  print a config with all defaults and derived values
  simulate  CONFIG | --seed N [--trace FILE]        the run's schedule on a virtual clock
  convert   SOURCE TARGET ...                       Hugging Face <-> Megatron checkpoints
  bench     [NAME ...]                              the budgets of docs_roll/benchmarks.md

Exit codes: 0 finished, 2 bad usage or config, 3 a role failed, 4 stalled, 130 interrupted (state saved)."""


def _run(args: Sequence[str]) -> int:
    from roll_async.commands.run import run_command

    return run_command(list(args), pipeline=None)


def _validate(args: Sequence[str]) -> int:
    from roll_async.commands.validate import run_validate

    return run_validate(list(args))


def _show(args: Sequence[str]) -> int:
    from roll_async.commands.validate import run_show

    return run_show(list(args))


def _simulate(args: Sequence[str]) -> int:
    from roll_async.commands.simulate import run_simulate

    return run_simulate(list(args))


def _convert(args: Sequence[str]) -> int:
    from roll_async.commands.convert import run_convert

    return run_convert(list(args))


def _bench(args: Sequence[str]) -> int:
    from roll_async.commands.bench import run_bench

    return run_bench(list(args))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "validate": _validate,
    "show": _show,
    "simulate": _simulate,
    "convert": _convert,
    "bench": _bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `roll-async` and `python -m roll_async.cli`; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if not args or args[0] not in COMMANDS:
        problem = f"unknown command '{args[0]}'" if args else "no command given"
        print(f"roll-async: {problem}\n{_USAGE}", file=sys.stderr)
        return 2
    return COMMANDS[args[0]](args[1:])


if __name__ == "__main__":
    sys.exit(main())
