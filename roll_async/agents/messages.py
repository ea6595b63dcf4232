"""Requests of an agent and replies of the policy, independent of the API's format: messages and tool calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll_async.rollout.tools import ToolCall, parse_call

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    """system, user, assistant, tool."""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """tool: which call it answers."""

    def key(self) -> bytes:
        """Equal for messages with the same content: ids, white space at the ends and the form of JSON are ignored."""
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One request for a turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas as of the chat completions API."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """One turn of the policy."""

    reply_id: str
    text: str
    """The whole text of the turn without the end-of-turn token."""
    content: str
    """The text without well-formed tool calls."""
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length, tool_calls."""
    prompt_tokens: int
    completion_tokens: int
    node: int = -1
    """Node of the turn in the trajectory's tree."""
    problems: tuple[ToolCall, ...] = ()
    """Calls that cannot be run."""

    @property
    def message(self) -> Message:
        """The turn as a message of the agent's history."""
        return Message(role="assistant", content=self.content, tool_calls=self.tool_calls)


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...], tuple[ToolCall, ...]]:
    """(text without well-formed calls, these calls, malformed ones) of `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`, as Qwen and Hermes models write them. Read as JSON, never evaluated.
    """
    calls: list[ToolCall] = []
    problems: list[ToolCall] = []
    rest, position = [], 0
    for found in _CALL.finditer(text):
        call = parse_call(found.group(1))
        if call.problem:
            problems.append(call)
            continue
        rest.append(text[position : found.start()])
        position = found.end()
        calls.append(call)
    rest.append(text[position:])
    content = "".join(rest) if calls else text
    return (content.strip() if calls else content), tuple(calls), tuple(problems)


class ChatDigest:
    """Digests of the first 1, 2, ... messages of a chat (`keys`), and of the whole with one more."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._state, self.keys = hashlib.blake2b(digest_size=16), []
        for message in messages:
            self._state.update(message.key() + b"\x00")
            self.keys.append(self._state.copy().digest())

    def then(self, message: Message) -> bytes:
        """Costs what the message costs, however long the chat is."""
        state = self._state.copy()
        state.update(message.key() + b"\x00")
        return state.digest()
