"""Agents in processes of their own, with packages of their own: a command per trajectory, or a server of the user's.

    command     starts with OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
                ROLL_ASYNC_TASK in its environment; the last line that it prints is the result
    http_agent  gets a POST with {"base_url", "api_key", "model", "task"}; the body of its reply is the result

A task is {"tag": ..., "seed": ..., "validation": ..., "row": an object of `file`, or null}, a result
{"reward": 1.0, "solved": true, "metrics": {"calls": 2}}, where all but the reward may be left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import aiohttp

from roll_async.agents.protocol import AgentResult, Endpoint, Task
from roll_async.envs.protocol import WorldFailed

_KEPT_BYTES = 64 << 10
_LONGEST_VARIABLE = 120_000
"""Linux refuses to start a process with a longer variable."""


@dataclass(frozen=True, kw_only=True)
class ExternalOptions:
    """What both kinds have."""

    file: str | None = None
    """JSON lines; a trajectory gets the row of its seed. The trajectories of a group get the same one."""

    def __post_init__(self) -> None:
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"file {self.file} does not exist")
        self.row(0)

    def row(self, seed: int) -> Mapping[str, object] | None:
        """Raises ValueError for a file that has none."""
        if self.file is None:
            return None
        rows = _rows(self.file)
        return rows[seed % len(rows)]


@dataclass(frozen=True, kw_only=True)
class CommandOptions(ExternalOptions):
    """`env_config` of command."""

    command: tuple[str, ...]
    """Program and arguments; no shell."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""
    folder: str | None = None
    """Working folder; null = that of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command or shutil.which(self.command[0]) is None:
            raise ValueError(f"command {list(self.command)}: the first item must be a program that exists")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder {self.folder} does not exist")


class CommandAgent:
    """`env_type: command`."""

    Options = CommandOptions

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    async def run(self, task: Task, endpoint: Endpoint) -> AgentResult:
        """Start it, wait for its end. Raises RuntimeError when it fails; whatever it started has then ended."""
        process = await asyncio.create_subprocess_exec(
            *self._options.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._options.folder,
            env={**os.environ, **self._variables(task, endpoint), **self._options.env},
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            said, errors, code = await asyncio.gather(_end(process.stdout), _end(process.stderr), process.wait())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            raise RuntimeError(f"the command ended with code {code}: {_last_line(errors) or _last_line(said)}")
        return result_of(_last_line(said))

    def _variables(self, task: Task, endpoint: Endpoint) -> dict[str, str]:
        told = json.dumps(_told(task, self._options))
        if len(told) > _LONGEST_VARIABLE:
            raise ValueError(f"the row of seed {task.seed} is too long for a variable; use env_type http_agent")
        return {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "ROLL_ASYNC_TASK": told,
        }


@dataclass(frozen=True, kw_only=True)
class HttpAgentOptions(ExternalOptions):
    """`env_config` of http_agent."""

    url: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} must begin with http:// or https://")


class HttpAgent:
    """`env_type: http_agent`."""

    Options = HttpAgentOptions

    def __init__(self, options: HttpAgentOptions) -> None:
        self._options = options

    async def run(self, task: Task, endpoint: Endpoint) -> AgentResult:
        """One request, open as long as the trajectory. Raises RuntimeError for a reply other than 200, WorldFailed for
        a server that is not there.
        """
        body = {**asdict(endpoint), "task": _told(task, self._options)}
        without_limit = aiohttp.ClientTimeout(total=None)  # whoever awaits this ends an agent that hangs
        try:
            async with (
                aiohttp.ClientSession(timeout=without_limit) as http,
                http.post(self._options.url, json=body) as reply,
            ):
                status, text = reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorldFailed(f"{self._options.url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise RuntimeError(f"{self._options.url} answered {status}: {text[:500]}")
        return result_of(text)


def result_of(text: str) -> AgentResult:
    """Raises ValueError for a text that is no result."""
    try:
        found = json.loads(text)
        reward, solved = float(found["reward"]), found.get("solved")
        metrics = {str(name): float(value) for name, value in (found.get("metrics") or {}).items()}
        return AgentResult(reward=reward, solved=None if solved is None else bool(solved), metrics=metrics)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f'the result must be JSON like {{"reward": 1.0}}, got {text[:200]!r}') from None


def _told(task: Task, options: ExternalOptions) -> dict[str, object]:
    return {**asdict(task), "row": options.row(task.seed)}


@lru_cache(maxsize=8)
def _rows(file: str) -> list[Mapping[str, object]]:
    rows = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"file {file}:{number}: not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise ValueError(f"file {file}:{number}: a row must be an object")
        rows += [row] if row else []
    if not rows:
        raise ValueError(f"file {file} has no row")
    return rows


async def _end(stream: asyncio.StreamReader) -> bytes:
    """The last bytes of a stream, which is read to its end so that its writer never waits."""
    kept = b""
    while piece := await stream.read(_KEPT_BYTES):
        kept = (kept + piece)[-_KEPT_BYTES:]
    return kept


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
