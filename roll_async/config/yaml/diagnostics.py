"""One line per problem: `FILE:LINE: error ID: KEY: MESSAGE`."""

import json
from dataclasses import dataclass

MAX_VALUE_CHARS = 80
MAX_LINE_CHARS = 1500
MAX_DIAGNOSTICS = 1000
"""Diagnostics reported per file; the rest is left out to keep the report readable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """A problem at a place."""

    id: str
    """C001 to C156 are errors, W01 to W15 warnings."""
    key: str
    """Dotted canonical path, list items as `.0`; `(file)` if no key is concerned."""
    file: str
    """Path as given, or `<override KEY=VALUE>`."""
    line: int
    """From 1; 0 for an override."""
    message: str

    @property
    def is_error(self) -> bool:
        """Warnings never change the exit status."""
        return self.id.startswith("C")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        severity = "error" if self.is_error else "warning"
        line = printable(f"{place}: {severity} {self.id}: {self.key}: {self.message}")
        return line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 3] + "..."


class ConfigError(ValueError):
    """A config that cannot be used. `diagnostics`: the errors of the phase that failed, and all earlier warnings."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        super().__init__("\n".join(str(d) for d in diagnostics))
        self.diagnostics = diagnostics


def printable(text: str) -> str:
    """The text with unprintable characters escaped, so that every diagnostic is one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object) -> str:
    """A value as JSON, cut at 80 characters."""
    if isinstance(value, str):
        value = value[: MAX_VALUE_CHARS + 1]  # one more, so that the cut shows below
    elif isinstance(value, list | dict):
        value = _abridged(value, MAX_VALUE_CHARS)
    text = json.dumps(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."


def _abridged(value: object, room: int) -> object:
    """At most `room` entries on each level: this avoids formatting what is cut off later."""
    if isinstance(value, list):
        return [_abridged(v, room // 4) for v in value[:room]]
    if isinstance(value, dict):
        return {k[: MAX_VALUE_CHARS + 1]: _abridged(value[k], room // 4) for k in list(value)[:room]}
    return value[: MAX_VALUE_CHARS + 1] if isinstance(value, str) else value
