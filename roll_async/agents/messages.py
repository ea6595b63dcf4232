"""Requests of an agent and replies of the policy, independent of the API's format: messages and tool calls."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll_async.prompts.tool_calls import ToolCall

_WORD = 4
"""Characters of JSON around a value, about."""


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
        # Outside the JSON, which would escape it; its length inside keeps keys apart.
        content = self.content.strip().encode()
        calls = [[call.name, call.arguments] for call in self.tool_calls]
        return json.dumps([self.role, len(content), calls], sort_keys=True).encode() + content


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One request for a turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas as of the chat completions API."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()

    def longer_than(self, limit: int) -> bool:
        """Whether messages, arguments of their calls and tools together are more than so many characters, an object or
        a number counting as a word. It looks at no more of them than that takes.
        """
        size, left = 0, [self.tools, self.messages]
        while left and size <= limit:
            match left.pop():
                case str() as text:
                    size += len(text)
                case Message() as message:
                    size += _WORD + len(message.content)
                    left.append(message.tool_calls)
                case ToolCall() as call:
                    size += len(call.name)
                    left.append(call.arguments)
                case Mapping() as items:
                    size += _WORD * (1 + len(items))
                    left += itertools.islice(items.keys(), limit)
                    left += itertools.islice(items.values(), limit)
                case list() | tuple() as items:
                    size += _WORD + len(items)
                    left += items[:limit]
                case _:
                    size += _WORD
        return size > limit


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
    thought: str = ""
    """The part of the text that is thought, from its beginning; all of it where the thought is unfinished."""
    unfinished_thought: bool = False

    @property
    def answer(self) -> str:
        """The text after the thought."""
        return self.text[len(self.thought) :]

    @property
    def message(self) -> Message:
        """The turn as a message of the agent's history."""
        return Message(role="assistant", content=self.content, tool_calls=self.tool_calls)


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
