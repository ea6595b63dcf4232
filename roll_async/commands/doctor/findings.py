"""What `roll-async doctor` finds. Each check has a net of its own and a deadline: it may fail, never the command."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from threading import Thread

from roll_async import __version__
from roll_async.observe.outside import OutsideError, border


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"
    """Runs may be slow, or some of them fail."""
    PROBLEM = "problem"
    """Runs fail, or cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    level: Level
    what: str
    said: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def examine(checks: Mapping[str, Check], within_s: float) -> Iterator[Finding]:
    """What the checks find, in their order. They run side by side; what fails or is late is a finding itself."""
    found: dict[str, list[Finding]] = {}
    # Daemons: a check that hangs (a dead network drive) does not keep the process.
    threads = [Thread(target=_run, args=(*check, found), name=check[0], daemon=True) for check in checks.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for name in checks:
        late = Finding(Level.WARN, name, f"gave no answer within {within_s:g} s", "look at it by hand")
        yield from found.get(name, [late])


def _run(name: str, check: Check, found: dict[str, list[Finding]]) -> None:
    try:
        with border():
            findings = list(check())
    except OutsideError as error:
        findings = [Finding(Level.WARN, name, f"the check itself failed: {error}", "report it with the text below")]
    found[name] = findings


def issue_text(findings: Sequence[Finding], home: Path) -> str:
    """The findings to be pasted into an issue: without remedies, and without the folders of a user."""
    head = f"roll_async {__version__}, Python {platform.python_version()}, {platform.platform()}"
    lines = [f"{'' if f.level is Level.OK else f'{f.level}: '}{f.what}: {f.said}" for f in findings]
    text = "\n".join([head, *lines])
    for folder, short in ((Path.cwd(), "."), (home, "~")):
        if folder != Path("/"):
            text = text.replace(str(folder), short)
    return re.sub(r"/(?:home|Users)/[^/\s]+", "~", text)
