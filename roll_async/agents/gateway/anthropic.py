"""The format of Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from roll_async.agents.gateway.chat import Json, arguments_of, items, number, text_of
from roll_async.agents.limited_turns import BadRequest
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.rollout.tools import ToolCall

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    messages = [Message(role="system", content=text_of(body["system"]))] if body.get("system") else []
    for item in items(body, "messages"):
        messages += _messages(item)
    if not messages:
        raise BadRequest("messages: empty")
    stops = body.get("stop_sequences")
    return TurnRequest(
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in items(body, "tools")),
        max_tokens=number(body, "max_tokens", int),
        temperature=number(body, "temperature", float),
        top_p=number(body, "top_p", float),
        stop=tuple(map(str, stops)) if isinstance(stops, list) else (),
    )


def _tool(tool: Json) -> Json:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}


def _messages(item: Json) -> list[Message]:
    """One message, or several: results of tools are blocks of a user message there, and messages of their own here."""
    role, content = str(item.get("role", "")), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"messages: role {role!r} is not one of user | assistant | system")
    if not isinstance(content, list):
        return [Message(role=role, content=text_of(content))]
    found: list[Message] = []
    text: list[str] = []
    calls: list[ToolCall] = []
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                text.append(str(block.get("text", "")))
            case "tool_use":
                call = ToolCall(
                    name=str(block.get("name", "")),
                    arguments=arguments_of(block.get("input")),
                    call_id=str(block.get("id", "")),
                )
                calls.append(call)
            case "tool_result":
                said = text_of(block.get("content"))
                found.append(Message(role="tool", content=said, call_id=str(block.get("tool_use_id", ""))))
            case "thinking" | "redacted_thinking":
                continue
            case other:
                raise BadRequest(f"content: {other} is not supported, only text and tools")
    if text or calls or not found:
        found.append(Message(role=role, content="".join(text), tool_calls=tuple(calls)))
    return found


def _blocks(reply: TurnReply) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(call.arguments)})
    return blocks


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


def stream(reply: TurnReply, model: str, created: int, body: Json) -> Iterator[str]:
    """Server-sent events of a reply."""

    def event(name: str, **fields: object) -> str:
        return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"

    whole: Mapping[str, object] = write(reply, model, created)
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
