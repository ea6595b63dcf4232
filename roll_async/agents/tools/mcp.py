"""Tools of an MCP server (extra `mcp`), over stdio or HTTP. One session for all trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    """`tool_args` of mcp."""

    command: tuple[str, ...] = ()
    """Starts a server that speaks over stdin and stdout."""
    url: str | None = None
    """A server that speaks streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the command."""

    def __post_init__(self) -> None:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give command or url, one of them")
        if find_spec("mcp") is None:
            raise ValueError('needs an extra: pip install "roll_async[mcp]"')


class McpTools:
    """All tools the server lists when it is opened."""

    Options = McpOptions

    def __init__(self, options: McpOptions) -> None:
        self._options, self._stack = options, AsyncExitStack()
        self.schemas: Sequence[Mapping[str, object]] = ()

    async def open(self) -> None:
        """Connect and list the tools."""
        from mcp import ClientSession, StdioServerParameters  # pyright: ignore[reportAttributeAccessIssue]
        from mcp.client.stdio import stdio_client

        if self._options.command:
            program, *arguments = self._options.command
            server = StdioServerParameters(command=program, args=arguments, env=dict(self._options.env) or None)
            streams = await self._stack.enter_async_context(stdio_client(server))
        else:
            from mcp.client.streamable_http import streamable_http_client

            streams = await self._stack.enter_async_context(streamable_http_client(self._options.url or ""))
        self._session = await self._stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await self._session.initialize()
        listed = await self._session.list_tools()
        self.schemas = [function_of(tool) for tool in listed.tools]

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Raises RuntimeError for what the server calls an error."""
        result = await self._session.call_tool(name, dict(arguments))
        text = "\n".join(part.text for part in result.content if part.type == "text")
        # Versions of the SDK name it one way or the other.
        if getattr(result, "is_error", getattr(result, "isError", False)):
            raise RuntimeError(text or "the tool failed")
        return text

    async def close(self) -> None:
        """Disconnect."""
        await self._stack.aclose()


def function_of(tool: Any) -> Mapping[str, object]:
    """The schema of a tool that a server lists, as of the chat completions API."""
    # Versions of the SDK name it one way or the other.
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}
