"""`roll-async bench`: run the budget scripts of `tools/bench/` one after the other; each prints one JSON line per
case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from roll_async.commands.command_line import HELP

_SCRIPTS = Path(__file__).resolve().parents[2] / "tools" / "bench"


@click.command(context_settings=HELP)
@click.argument("names", nargs=-1, metavar="[NAME]...")
def command(names: tuple[str, ...]) -> int:
    """Run the scripts of tools/bench/ with these names, or all; one JSON line per case.

    \b
    Example:
      roll-async bench scheduler ledger

    Exit codes: 0 every budget kept, 1 one missed or a script failed, 2 unknown name.
    """
    if not _SCRIPTS.is_dir():
        print("roll-async bench needs a checkout: tools/bench/ is not part of the installed package", file=sys.stderr)
        return 2
    known = {path.stem: path for path in sorted(_SCRIPTS.glob("*.py"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"roll-async bench: no script {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    missed = []
    for name in names or known:
        print(f"# {name}", file=sys.stderr)
        done = subprocess.run([sys.executable, str(known[name])], stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        if done.returncode or any(not ok for ok in _verdicts(done.stdout)):
            missed.append(name)
    if missed:
        print(f"missed or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _verdicts(output: str) -> list[bool]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line.get("ok", True) for line in lines]
