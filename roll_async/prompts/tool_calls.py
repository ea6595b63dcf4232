"""Calls of tools in the text of a model: the one place where the form of a model family is read and written.

    text of a turn --read--> what is said beside the calls, the calls      message with calls --write--> text
    tools --offer--> text of the system message, where the chat template knows no tools

A renderer has the format of its model (`agents/rendering.py`, `calls`); whoever reads or writes calls asks it. A family
with another form is a sub-class of `CallFormat`, given to the renderer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roll_async.observe.outside import plain

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TOOLS_TEXT = (
    "\n\nYou may call functions. Their signatures are within <tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each "
    'call, return a JSON object within <tool_call></tool_call>:\n<tool_call>\n{{"name": <function>, "arguments": '
    "<arguments>}}\n</tool_call>"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call found in a turn."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be run; the model is told."""
    call_id: str = ""
    """Of an agent's API; empty where tools are called in the text alone."""


class CallFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write them."""

    def read(self, text: str, *, unclosed: bool = False) -> tuple[str, list[ToolCall]]:
        """(text without well-formed calls, all calls in the order of the text, malformed ones with their problem), in
        time linear in the text. `unclosed`: the last call may lack its end, as that of a turn that was cut does.
        """
        calls: list[ToolCall] = []
        rest, position = [], 0
        for start, end in _spans(text, unclosed=unclosed):
            calls.append(parse_call(text[start:end].strip()))
            if not calls[-1].problem:
                rest.append(text[position : start - len(_OPEN)])
                position = end + len(_CLOSE)
        # A turn without calls keeps its white space: it is compared with what clients send back.
        return "".join((*rest, text[position:])).strip() if position else text, calls

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """A turn with its calls as the model would write it."""
        written = [
            f"{_OPEN}\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n{_CLOSE}" for call in calls
        ]
        return "\n".join(part for part in (content, *written) if part)

    def offer(self, tools: Sequence[Mapping[str, object]]) -> str:
        """Text after a system message that tells the model which functions there are, and how it calls them."""
        return _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools))


HERMES = CallFormat()


def parse_call(text: str) -> ToolCall:
    """The call that `{"name": ..., "arguments": {...}}` is, or says that it cannot be. Never evaluated."""
    try:
        call = plain(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        return ToolCall(name="", problem=f"the call is not valid JSON ({reason})")
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name="", problem='a call is {"name": string, "arguments": object}')
    return ToolCall(name=name, arguments=arguments)


def name_of(schema: object) -> str:
    """Of a function, by its JSON schema. Raises ValueError for what is no schema of one."""
    described = schema.get("function") if isinstance(schema, Mapping) else None
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f'a tool is {{"type": "function", "function": {{"name": text, ...}}}}, not {repr(schema)[:200]}'
        )
    return name


def _spans(text: str, *, unclosed: bool) -> Iterator[tuple[int, int]]:
    """(start, end) of what stands between the marks of each call."""
    start = text.find(_OPEN)
    while start >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            if unclosed:
                yield start, len(text)
            return
        yield start, end
        start = text.find(_OPEN, end + len(_CLOSE))


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
