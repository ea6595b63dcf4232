"""How many of another system's configs this project accepts: as they are, and after `roll-async port`.

    python tools/ported_configs.py ../ROLL/examples

One row per YAML file below the folder that describes an RLVR or agentic run, and the counts. Nothing is written beside
the files: what `port` makes goes to a temporary folder.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.commands.configs.plan import run_plan
from roll_async.commands.configs.port import ported, text_of
from roll_async.commands.configs.validate import run_validate
from roll_async.config.api import ConfigError
from roll_async.config.loading.porting import AnotherPipeline


def main(folder: Path) -> int:
    """Print the table; returns 0."""
    rows: list[tuple[str, str, str, str]] = []
    skipped: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as target:
        for number, file in enumerate(sorted(folder.rglob("*.yaml"))):
            name = str(file.relative_to(folder))
            try:
                rows.append(_row(file, name, Path(target) / f"{number}.yaml"))
            except AnotherPipeline as other:
                skipped.append((name, str(other)))
            if not file.read_text().strip():
                rows.pop()
                skipped.append((name, "it is empty"))
    print("| file | by itself | after port | first message |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    for name, why in skipped:
        print(f"not counted: {name}: {why}")
    alone, after = (sum(row[column] == "yes" for row in rows) for column in (1, 2))
    print(f"{len(rows)} files: {alone} validate and plan by themselves, {after} after port; {len(skipped)} not counted")
    return 0


def _row(file: Path, name: str, target: Path) -> tuple[str, str, str, str]:
    alone, first = _accepts(file)
    try:
        target.write_text(text_of(ported(file)[0], name), encoding="utf-8")
    except ConfigError as error:
        return name, alone, "no", str(error.diagnostics[0].message)[:160]
    after, message = _accepts(target)
    return name, alone, after, (message or first).replace(str(target), name).replace("|", "\\|")[:160]


def _accepts(file: Path) -> tuple[str, str]:
    """(yes or no, the first error)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        accepted = run_validate([str(file)]) == 0
        planned = accepted and run_plan([str(file)]) == 0
    errors = (line for line in out.getvalue().splitlines() if ": error " in line)
    return ("yes" if planned else "no"), next(errors, "").partition(": error ")[2]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
