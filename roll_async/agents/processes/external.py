"""Agents in processes of their own, with packages of their own: a command per trajectory, or a server of the user's.

    command     starts with OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and
                ROLL_ASYNC_TASK in its environment, `env`, and of the run's environment PASSED_ON alone; the last line
                that it prints is the result, and when it ends, so does everything that it has started (supervisor.py)
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
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import aiohttp

from roll_async.agents.protocol import AgentResult, Endpoint, Task
from roll_async.envs.protocol import WorldFailed

PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "ROLL_ASYNC_RUN",
)  # fmt: skip
"""Variables of the run that a command sees. Keys of trackers, hubs and clouds are not among them; by the last one the
run's reaper knows its processes.
"""
SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_ENDS_WITHIN_S = 8.0
"""The supervisor's own patience is 5 s."""
_KEPT_BYTES = 256 << 10
"""Of the reply of a server."""
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
        self.row(0)  # a file that cannot be read is refused before the run

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
        """Start it, wait for its end. Raises RuntimeError when it fails, WorldFailed when no process can be started.
        Whatever it started has then ended.
        """
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        env = {**passed_on, **self._variables(task, endpoint), **self._options.env}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", SUPERVISOR, *self._options.command),
                stdin=asyncio.subprocess.PIPE,  # its end tells the supervisor to end the command
                stdout=asyncio.subprocess.PIPE,
                cwd=self._options.folder,
                env=env,
                start_new_session=True,
                limit=32 * _KEPT_BYTES,  # a stream that waits for its reader would hide the end of the process
            )
        except OSError as error:
            raise WorldFailed(f"no process could be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        try:
            answer = await process.stdout.read()
        finally:
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S)
            if process.returncode != 0:  # the command can kill it, too
                await asyncio.to_thread(_end_marked, endpoint.api_key)
        if not answer:
            raise RuntimeError("the command has ended its supervisor")
        ended = json.loads(answer)
        if ended["code"] != 0:
            raise RuntimeError(f"the command ended with code {ended['code']}: {ended['errors'] or ended['said']}")
        return result_of(ended["said"])

    def _variables(self, task: Task, endpoint: Endpoint) -> dict[str, str]:
        told = json.dumps(_told(task, self._options))
        if len(told) > _LONGEST_VARIABLE:
            raise ValueError(f"the row of seed {task.seed} is too long for a variable; use env_type http_agent")
        return {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),  # its client adds /v1
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
                status, text = reply.status, (await _beginning(reply.content)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorldFailed(f"{self._options.url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise RuntimeError(f"{self._options.url} answered {status}: {text[:500]}")
        return result_of(text)


def result_of(text: str) -> AgentResult:
    """Raises ValueError for a text that is no result. What its numbers may be is for `play.py` to judge."""
    try:
        found = json.loads(text)
        reward, solved, metrics = found["reward"], found.get("solved"), found.get("metrics") or {}
        if isinstance(reward, int | float) and isinstance(solved, bool | None) and isinstance(metrics, dict):
            return AgentResult(reward=reward, solved=solved, metrics=metrics)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    raise ValueError(f'the result must be JSON like {{"reward": 1.0, "solved": true}}, got {text[:200]!r}')


def _told(task: Task, options: ExternalOptions) -> dict[str, object]:
    return {**asdict(task), "row": options.row(task.seed)}


@lru_cache(maxsize=8)  # every trajectory asks for its row
def _rows(file: str) -> list[Mapping[str, object]]:
    rows = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").split("\n"), 1):
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


async def _beginning(stream: aiohttp.StreamReader) -> bytes:
    found = b""
    while len(found) < _KEPT_BYTES and (piece := await stream.read(_KEPT_BYTES - len(found))):
        found += piece
    return found


def _end_marked(key: str) -> None:
    """Kill the processes with this key in their environment, those of a command that has killed its supervisor."""
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with suppress(OSError):  # it has ended, or is another user's
            if key.encode() in Path(f"/proc/{name}/environ").read_bytes():
                os.kill(int(name), signal.SIGKILL)
