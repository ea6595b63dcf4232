"""Python programs in the sandbox of the rewards: no network, no files of the run, limits of time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from roll_async.agents.tools.toolbox import function
from roll_async.rewards.sandbox.confine import missing
from roll_async.rewards.sandbox.local import LocalSandbox
from roll_async.rewards.sandbox.protocol import ProgramRun


@dataclass(frozen=True, kw_only=True)
class PythonOptions:
    """`tool_args` of python."""

    timeout: float = 6.0
    """Seconds of one program."""
    memory_mb: int = 512
    num_hosts: int = 2
    """Programs at the same time."""
    isolation: str = "required"
    """required or best_effort, as of rewards.*.sandbox."""

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.num_hosts < 1 or self.isolation not in ("required", "best_effort"):
            raise ValueError("timeout must be > 0, num_hosts >= 1 and isolation required or best_effort")
        problem = missing()
        if self.isolation == "required" and problem:
            raise ValueError(f"generated code cannot be contained here: {problem}; or accept isolation: best_effort")


class Python:
    """`python(code)`: what the program prints."""

    Options = PythonOptions
    schemas = (function("python", "Run a Python program; the result is what it prints.", {"code": {"type": "string"}}),)

    def __init__(self, options: PythonOptions) -> None:
        self._options = options
        self._free: asyncio.Queue[LocalSandbox] = asyncio.Queue()
        self._hosts = [LocalSandbox() for _ in range(options.num_hosts)]
        for host in self._hosts:
            self._free.put_nowait(host)

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Raises ValueError for a call without code."""
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ValueError('the argument is {"code": string}')
        run = ProgramRun(kind="stdio", code=code, timeout_s=self._options.timeout, memory_mb=self._options.memory_mb)
        host = await self._free.get()
        working = asyncio.ensure_future(asyncio.to_thread(host.run, run))
        working.add_done_callback(lambda _: self._free.put_nowait(host))  # also after the caller was cancelled
        outcome = await asyncio.shield(working)
        printed = outcome.stdout.rstrip()
        return f"{printed}\nerror: {outcome.problem}".strip() if outcome.problem else printed or "(nothing printed)"

    async def close(self) -> None:
        """End the hosts."""
        await asyncio.gather(*(asyncio.to_thread(host.close) for host in self._hosts))
