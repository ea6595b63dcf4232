"""The format of Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from roll_async.agents.gateway.chat import (
    arguments_of,
    checked_tool,
    items,
    number,
    offers_tools,
    stops,
    text,
    text_of,
    whole,
)
from roll_async.agents.gateway.fields import CACHE, EFFORT, LABEL, SAMPLING, Field, Json, acts, ignored, refused
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.agents.turn_handler import BadRequest
from roll_async.prompts.tool_calls import ToolCall

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


FIELDS: Mapping[str, Field] = {
    "messages": acts(),
    "messages[].content[].cache_control": CACHE,
    "messages[].content[].citations": ignored("only their text is read"),
    "messages[].content[].is_error": ignored("chat templates have no mark for it; say it in the content", False),
    "system": acts(),
    "system[].cache_control": CACHE,
    "system[].citations": ignored("only their text is read"),
    "model": acts("any name; the endpoint has one policy"),
    "tools": acts("functions only"),
    "tools[].cache_control": CACHE,
    "tools[].strict": ignored("calls are as the policy wrote them, not forced into the schema", False),
    "tools[].defer_loading": refused("all tools are shown", False),
    "tools[].allowed_callers": refused("only the policy calls", ["direct"]),
    "tools[].eager_input_streaming": ignored("a turn is sent when it is whole"),
    "tools[].input_examples": refused("chat templates have no place for them; write them into the description", []),
    "tool_choice": acts("auto or none; others are refused"),
    "tool_choice.disable_parallel_tool_use": refused("a turn is what the policy said, with all of its calls", False),
    "max_tokens": acts("beside the run's own limit"),
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "top_k": SAMPLING,
    "stop_sequences": SAMPLING,
    "thinking": ignored(EFFORT.says, {"type": "disabled"}),
    "output_config": refused("nothing forces the policy into a format or an effort", {}),
    "output_format": refused("nothing forces the policy into a format"),
    "container": refused("there are no containers"),
    "context_management": refused("nothing is cut from the messages"),
    "mcp_servers": refused("give their tools as functions", []),
    "inference_geo": refused("engines are where they are"),
    "speed": refused("there is one speed", "standard"),
    "service_tier": ignored("there is one queue", "auto", "standard_only"),
    "stream": acts("a turn is sent when it is whole"),
    "cache_control": CACHE,
    "metadata": LABEL,
    "user_profile_id": LABEL,
}
"""All of `types/beta/message_create_params.py` of github.com/anthropics/anthropic-sdk-python, commit 014c84ed; those
of `count_tokens` are among them. The header `anthropic-beta` is not read.
"""


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    text(body, "model")
    system = text_of(body.get("system"))
    messages = [Message(role="system", content=system)] if system else []
    for item in items(body, "messages"):
        messages += _messages(item)
    if not messages:
        raise BadRequest("messages: empty")
    choice = body.get("tool_choice")
    # An object in this API, a text in OpenAI's.
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return TurnRequest(
        messages=tuple(messages),
        tools=tuple(map(_tool, items(body, "tools"))) if offers_tools(kind) else (),
        max_tokens=whole(body, "max_tokens", 1),
        temperature=number(body, "temperature", 1.0),  # this API's range; OpenAI's ends at 2
        top_p=number(body, "top_p", 1.0),
        top_k=whole(body, "top_k", 0),
        stop=stops(body, "stop_sequences"),
    )


def _tool(tool: Json) -> Json:
    # Other types are the provider's own tools, which nobody runs here.
    if tool.get("type", "custom") not in (None, "custom"):
        raise BadRequest(f"tools: {str(tool['type'])[:20]} is not supported, only functions")
    checked_tool(tool, "input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _messages(item: Json) -> list[Message]:
    """One message, or several: results of tools are blocks of a user message there, and messages of their own here."""
    role, content = text(item, "role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages: role {role[:20]!r} is not one of user | assistant | system")
    if not isinstance(content, list):
        return [Message(role=role, content=text_of(content))]
    found: list[Message] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                said.append(text(block, "text"))
            case "tool_use":
                call = ToolCall(
                    name=text(block, "name"), arguments=arguments_of(block.get("input")), call_id=text(block, "id")
                )
                calls.append(call)
            case "tool_result":
                result = text_of(block.get("content"))
                found.append(Message(role="tool", content=result, call_id=text(block, "tool_use_id")))
            case "thinking" | "redacted_thinking":
                continue
            case other:
                raise BadRequest(f"content: {str(other)[:20]} is not supported, only text and tools")
    # Results alone are no turn of the user: no empty message follows them.
    if said or calls or not found:
        found.append(Message(role=role, content="".join(said), tool_calls=tuple(calls)))
    return found


def _blocks(reply: TurnReply) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    # A reply has at least one block.
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(call.arguments)})
    return blocks


# `created` is for the other dialects: this API says no time.
def write(reply: TurnReply, model: str, created: int) -> Json:
    """The body of a reply."""
    return {
        "id": reply.reply_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": _STOP[reply.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def stream(reply: TurnReply, model: str, created: int, include_usage: bool) -> Iterator[str]:
    """Server-sent events of a reply."""

    def event(name: str, **fields: object) -> str:
        return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"

    whole: Mapping[str, object] = write(reply, model, created)
    # The API counts the output in `message_delta`, at the end.
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(_blocks(reply)):
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event(
        "message_delta",
        delta={"stop_reason": _STOP[reply.finish_reason], "stop_sequence": None},
        usage={"output_tokens": reply.completion_tokens},
    )
    yield event("message_stop")
