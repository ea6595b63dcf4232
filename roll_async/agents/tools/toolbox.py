"""Tools of an agent: the calls of one turn run in parallel, and errors are returned as observations.

A tool is a class with `Options` (a dataclass that `tool_args` must fit) and

    schemas                              JSON schemas of its functions, as of the chat completions API
    async def call(name, arguments)      the result as the policy shall read it
    async def close()                    optional
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from roll_async.agents.messages import Message
from roll_async.config.user_options import build_options
from roll_async.envs.registry import NoOptions, load_class
from roll_async.prompts.row_tools import RowTools
from roll_async.rollout.tools import ToolCall, ToolRuns

TOOLS = {
    "calculator": "roll_async.agents.tools.calculator.Calculator",
    "python": "roll_async.agents.tools.python.Python",
    "search": "roll_async.agents.tools.search.Search",
    "mcp": "roll_async.agents.tools.mcp.McpTools",
}
"""By `tool_id`; a user's own by dotted path. mcp needs its extra (pip install "roll_async[mcp]")."""
_ANY = RowTools()


class Toolset(Protocol):
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


async def open_tools(specs: Sequence[ToolSpec], stack: AsyncExitStack) -> list[Toolset]:
    """The tools, until the stack closes. Raises ValueError for settings a tool refuses."""
    tools: list[Toolset] = []
    for spec in specs:
        cls, options = check_tool(spec)
        tool = cls(options) if hasattr(cls, "Options") else cls()
        if hasattr(tool, "open"):
            await tool.open()
        if hasattr(tool, "close"):
            stack.push_async_callback(tool.close)
        tools.append(tool)
    return tools


class Toolbox(ToolRuns):
    """The tools of all trajectories of one tag."""

    def __init__(self, tools: Sequence[Toolset], *, timeout_s: float) -> None:
        self.schemas = tuple(schema for tool in tools for schema in tool.schemas)
        names = [(name_of(schema), tool) for tool in tools for schema in tool.schemas]
        super().__init__({name: partial(tool.call, name) for name, tool in names}, timeout_s=timeout_s)

    def offered(self, row: RowTools) -> tuple[Mapping[str, object], ...]:
        """Schemas of the functions that a row may call."""
        return tuple(schema for schema in self.schemas if row.allows(name_of(schema)))

    async def run(self, calls: Sequence[ToolCall], row: RowTools = _ANY) -> list[Message]:
        """One message per call, in their order. `row`: what the trajectory's row allows and adds to the arguments."""
        results = zip(calls, await self.results(calls, row), strict=True)
        return [Message(role="tool", content=said, call_id=call.call_id) for call, said in results]

    def _unknown(self, name: str, row: RowTools) -> str:
        there = [name for name in self._functions if row.allows(name)]
        return f"{super()._unknown(name, row)}; there are: {', '.join(there) or 'none'}"


def function(name: str, description: str, properties: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The JSON schema of a function whose parameters are all required."""
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def name_of(schema: object) -> str:
    """Of a function. Raises ValueError for what is no schema of one."""
    described = schema.get("function") if isinstance(schema, Mapping) else None
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f'a tool is {{"type": "function", "function": {{"name": text, ...}}}}, not {repr(schema)[:200]}'
        )
    return name
