"""Tools of an agent: the calls of one turn run in parallel, and errors are returned as observations.

A tool is a class with `Options` (a dataclass that `tool_args` must fit) and

    schemas                              JSON schemas of its functions, as of the chat completions API
    async def call(name, arguments)      the result as the policy shall read it
    async def close()                    optional
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from roll_async.agents.messages import Message
from roll_async.envs.options import build_options
from roll_async.envs.registry import NoOptions, load_class
from roll_async.prompts.row_tools import RowTools
from roll_async.rollout.tools import ToolCall

logger = logging.getLogger(__name__)

TOOLS = {
    "calculator": "roll_async.agents.tools.calculator.Calculator",
    "python": "roll_async.agents.tools.python.Python",
    "search": "roll_async.agents.tools.search.Search",
    "mcp": "roll_async.agents.tools.mcp.McpTools",
}
"""By `tool_id`; a user's own by dotted path. mcp needs its extra (pip install "roll_async[mcp]")."""
_LONGEST_RESULT = 20_000
_ANY = RowTools()


class Tool(Protocol):
    """One tool, which may offer several functions."""

    @property
    def schemas(self) -> Sequence[Mapping[str, object]]: ...

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The policy gets the message of an exception as the result."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """Which tool, with which settings."""

    tool_id: str
    values: Mapping[str, object]
    key: str = "tools"


def check_tool(spec: ToolSpec) -> tuple[type, object]:
    """(class, checked options). Raises ValueError naming key, value and remedy."""
    cls = load_class(TOOLS.get(spec.tool_id, spec.tool_id), f"{spec.key}.tool_id")
    return cls, build_options(getattr(cls, "Options", NoOptions), spec.values, f"{spec.key}.tool_args")


async def open_tools(specs: Sequence[ToolSpec], stack: AsyncExitStack) -> list[Tool]:
    """The tools, until the stack closes. Raises ValueError for settings a tool refuses."""
    tools: list[Tool] = []
    for spec in specs:
        cls, options = check_tool(spec)
        tool = cls(options) if hasattr(cls, "Options") else cls()
        if hasattr(tool, "open"):
            await tool.open()
        if hasattr(tool, "close"):
            stack.push_async_callback(tool.close)
        tools.append(tool)
    return tools


class Toolbox:
    """The tools of all trajectories of one tag."""

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.schemas = tuple(schema for tool in tools for schema in tool.schemas)
        self._by_name = {_name(schema): tool for tool in tools for schema in tool.schemas}
        self.num_calls = self.num_failures = 0

    def offered(self, row: RowTools) -> tuple[Mapping[str, object], ...]:
        """Schemas of the functions that a row may call."""
        return tuple(schema for schema in self.schemas if row.allows(_name(schema)))

    async def run(self, calls: Sequence[ToolCall], row: RowTools = _ANY) -> list[Message]:
        """One message per call, in their order. `row`: what the trajectory's row allows and adds to the arguments."""
        return list(await asyncio.gather(*(self._answer(call, row) for call in calls)))

    async def _answer(self, call: ToolCall, row: RowTools) -> Message:
        return Message(role="tool", content=await self._run(call, row), call_id=call.call_id)

    async def _run(self, call: ToolCall, row: RowTools) -> str:
        self.num_calls += 1
        problem = call.problem
        if not problem and not (call.name in self._by_name and row.allows(call.name)):
            there = [name for name in self._by_name if row.allows(name)]
            problem = f"there is no tool '{call.name}'; there are: {', '.join(there) or 'none'}"
        if not problem:
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = self._by_name[call.name].call(call.name, row.completed(call.name, call.arguments))
                    said = str(await result if inspect.isawaitable(result) else result)
                    return said[:_LONGEST_RESULT]
            except TimeoutError:
                problem = f"no result within {self._timeout_s:g} s"
            except Exception as error:  # the tool is user code: every exception becomes its result
                problem = f"{type(error).__name__}: {error}"
                logger.info("tool %s: %s", call.name, problem)
        self.num_failures += 1
        return f"error: {problem}"


def function(name: str, description: str, properties: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The JSON schema of a function whose parameters are all required."""
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _name(schema: Mapping[str, object]) -> str:
    described = schema["function"]
    assert isinstance(described, dict)
    return str(described["name"])
