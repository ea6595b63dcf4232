"""The format of OpenAI's responses API; `previous_response_id` is not kept: send the whole input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from roll_async.agents.gateway.chat import Json, arguments_of, items, number, text_of
from roll_async.agents.limited_turns import BadRequest
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.rollout.tools import ToolCall


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    if body.get("previous_response_id"):
        raise BadRequest("previous_response_id: not kept here; send the whole input")
    messages = [Message(role="system", content=str(body["instructions"]))] if body.get("instructions") else []
    given = body.get("input")
    if isinstance(given, str):
        messages.append(Message(role="user", content=given))
    else:
        for item in items(body, "input"):
            _add(messages, item)
    if not messages:
        raise BadRequest("input: empty")
    return TurnRequest(
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in items(body, "tools")),
        max_tokens=number(body, "max_output_tokens", int),
        temperature=number(body, "temperature", float),
        top_p=number(body, "top_p", float),
    )


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise BadRequest(f"tools: {tool.get('type')} is not supported, only function")
    kept = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    return {"type": "function", "function": kept}


def _add(messages: list[Message], item: Json) -> None:
    """In that API each call of a turn is a separate item; here they are one message."""
    match item.get("type", "message"):
        case "message":
            role = str(item.get("role", ""))
            role = "system" if role == "developer" else role
            if role not in ("system", "user", "assistant"):
                raise BadRequest(f"input: role {role!r} is not one of system | user | assistant")
            messages.append(Message(role=role, content=text_of(item.get("content"))))
        case "function_call":
            call = ToolCall(
                name=str(item.get("name", "")),
                arguments=arguments_of(item.get("arguments")),
                call_id=str(item.get("call_id", "")),
            )
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                messages[-1] = Message(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call))
            else:
                messages.append(Message(role="assistant", tool_calls=(call,)))
        case "function_call_output":
            said = text_of(item.get("output"))
            messages.append(Message(role="tool", content=said, call_id=str(item.get("call_id", ""))))
        case "reasoning":
            return
        case other:
            raise BadRequest(f"input: {other} is not supported, only messages and function calls")


def _output(reply: TurnReply) -> list[dict[str, object]]:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    found: list[dict[str, object]] = []
    if reply.content or not reply.tool_calls:
        text = {"type": "output_text", "text": reply.content, "annotations": []}
        found.append(
            {
                "type": "message",
                "id": f"msg_{reply.reply_id}",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for call in reply.tool_calls:
        found.append(
            {
                "type": "function_call",
                "id": f"fc_{call.call_id}",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments)),
                "status": "completed",
            }
        )
    return found


def write(reply: TurnReply, model: str, created: int) -> Json:
    """The body of a reply."""
    cut = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.reply_id}",
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": model,
        "output": _output(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def stream(reply: TurnReply, model: str, created: int, body: Json) -> Iterator[str]:
    """Server-sent events of a reply."""
    number = iter(range(1 << 30))

    def event(name: str, **fields: object) -> str:
        return f"event: {name}\ndata: {json.dumps({'type': name, 'sequence_number': next(number), **fields})}\n\n"

    whole: Mapping[str, object] = write(reply, model, created)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_output(reply)):
        here = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            yield event("response.output_item.added", output_index=index, item={**item, "content": []})
            text = {"content_index": 0, **here}
            empty = {"type": "output_text", "text": "", "annotations": []}
            yield event("response.content_part.added", part=empty, **text)
            yield event("response.output_text.delta", delta=reply.content, logprobs=[], **text)
            yield event("response.output_text.done", text=reply.content, logprobs=[], **text)
            yield event("response.content_part.done", part={**empty, "text": reply.content}, **text)
        else:
            yield event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
            yield event("response.function_call_arguments.delta", delta=item["arguments"], **here)
            yield event("response.function_call_arguments.done", arguments=item["arguments"], **here)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=whole)
