"""What the sandbox is asked and what it answers; JSON lines between a reward worker and its sandbox host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["stdio", "call", "values", "assert", "pytest"]
Ending = Literal["exit", "signal", "timeout", "output", "disk", "threads"]
"""exit and signal: the program by itself; the others: the sandbox, because it used too much of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """One program run once, in a process of its own."""

    kind: Kind
    code: str
    """The generated program."""
    stdin: str = ""
    """stdio only."""
    function: str = ""
    """call only: a function of the program, or a method of its class `Solution`."""
    arguments: list[object] = field(default_factory=list)
    """call only: JSON values."""
    test: str = ""
    """assert: statements run behind the program; pytest: a test file that may import `solution`."""
    setup: str = ""
    """values and assert: statements between the program and its test."""
    expressions: list[str] = field(default_factory=list)
    """values only: evaluated behind the program; their values go out, and are compared outside."""
    prelude: bool = True
    """Whether the evaluators' imports (`prelude.py`) come first."""
    timeout_s: float = 6.0
    memory_mb: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What became of it. What the program wrote is cut at the sandbox's limits."""

    ending: Ending
    status: int = 0
    """Exit status or number of the signal."""
    stdout: str = ""
    stderr: str = ""
    """Its last part."""
    result: dict[str, object] | None = None
    """What the harness reported after the last statement: call {"value"}, values {"values"} (`values.py`), assert and
    pytest {"passed", "total"}. None when the program did not get there."""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """Why it did not end well; empty when it did."""
        last = self.stderr.strip().splitlines()[-1:] or [""]
        if self.ending == "exit":
            return "" if self.status == 0 else (last[0][:200] or f"exit status {self.status}")
        if self.ending == "signal":
            return f"ended by signal {self.status} {last[0][:100]}".rstrip()
        return {
            "timeout": f"time limit exceeded after {self.seconds:.1f} s",
            "output": "wrote more than the limit of output",
            "disk": "wrote more files than the limit",
            "threads": "started more threads than the limit",
        }[self.ending]


class Runner(Protocol):
    """Runs programs: a local sandbox host or a sandbox service. Raises ConnectionError when it cannot work now."""

    def run(self, run: ProgramRun) -> ProgramResult: ...

    def close(self) -> None: ...
