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

from roll_async.config.options.user_options import build_options
from roll_async.envs.registry import NoOptions, load_class
from roll_async.prompts.tool_calls import name_of
from roll_async.rollout.tools import Toolbox

TOOLS = {
    "calculator": "roll_async.agents.tools.calculator.Calculator",
    "python": "roll_async.agents.tools.python.Python",
    "search": "roll_async.agents.tools.search.Search",
    "mcp": "roll_async.agents.tools.mcp.McpTools",
}
"""By `tool_id`; a user's own by dotted path. mcp needs its extra (pip install "roll_async[mcp]")."""


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


def toolbox_of(tools: Sequence[Toolset], *, timeout_s: float) -> Toolbox:
    """The tools of all trajectories of one tag."""
    schemas = [(schema, tool) for tool in tools for schema in tool.schemas]
    functions = {name_of(schema): partial(tool.call, name_of(schema)) for schema, tool in schemas}
    return Toolbox(functions, timeout_s=timeout_s, schemas=[schema for schema, _ in schemas], tells_names=True)


def function(name: str, description: str, properties: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The JSON schema of a function whose parameters are all required."""
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
