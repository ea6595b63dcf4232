"""The format of OpenAI's responses API; `previous_response_id` is not kept: send the whole input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from roll_async.agents.gateway.chat import (
    PARALLEL,
    arguments_of,
    checked_tool,
    items,
    number,
    offers_tools,
    text,
    text_of,
    whole,
)
from roll_async.agents.gateway.fields import CACHE, EFFORT, LABEL, SAMPLING, Field, Json, acts, ignored, refused
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.agents.turn_handler import BadRequest
from roll_async.prompts.tool_calls import ToolCall

_KEPT = "nothing is kept between requests; send the whole input"
FIELDS: Mapping[str, Field] = {
    "input": acts(),
    "instructions": acts(),
    "model": acts("any name; the endpoint has one policy"),
    "tools": acts("functions only"),
    "tools[].strict": ignored("calls are as the policy wrote them, not forced into the schema", False),
    "tools[].async": refused("calls are answered in the next request", False),
    "tools[].defer_loading": refused("all tools are shown", False),
    "tools[].output_schema": ignored("results are taken as they are"),
    "tools[].allowed_callers": refused("only the policy calls", ["direct"]),
    "tool_choice": acts("auto or none; others are refused"),
    "parallel_tool_calls": PARALLEL,
    "max_tool_calls": ignored("it counts the provider's own tools, and there are none"),
    "max_output_tokens": acts("beside the run's own limit"),
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "top_logprobs": refused("they are recorded and not sent", 0),
    "include": refused("nothing more is sent", [], ["reasoning.encrypted_content"]),
    "text": refused("nothing forces the policy into a format", {}, {"format": {"type": "text"}}),
    "image": refused("only text"),
    "reasoning": EFFORT,
    "previous_response_id": refused(_KEPT),
    "conversation": refused(_KEPT),
    "store": refused(_KEPT, False),
    "prompt": refused("there are no stored prompts"),
    "background": refused("a reply is waited for", False),
    "background_options": refused("a reply is waited for"),
    "context_management": refused("nothing is cut from the input"),
    "truncation": refused("nothing is cut from the input", "disabled"),
    "moderation": refused("nothing is moderated"),
    "access_programs": refused("there are none", []),
    "stream": acts("a turn is sent when it is whole"),
    "stream_options": acts(),
    "stream_options.include_obfuscation": refused("nothing is padded", False),
    "metadata": LABEL,
    "user": LABEL,
    "safety_identifier": LABEL,
    "service_tier": ignored("there is one queue", "auto", "default"),
    "prompt_cache_key": CACHE,
    "prompt_cache_options": CACHE,
    "prompt_cache_retention": CACHE,
}
"""All of `openai.types.responses.ResponseCreateParams` (openai 3.54)."""


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    text(body, "model")
    system, given = text(body, "instructions"), body.get("input")
    messages = [Message(role="system", content=system)] if system else []
    if isinstance(given, str):
        messages.append(Message(role="user", content=given))
    else:
        for item in items(body, "input"):
            _add(messages, item)
    if not messages:
        raise BadRequest("input: empty")
    return TurnRequest(
        messages=tuple(messages),
        tools=tuple(map(_tool, items(body, "tools"))) if offers_tools(body.get("tool_choice")) else (),
        max_tokens=whole(body, "max_output_tokens", 1),
        temperature=number(body, "temperature", 2.0),
        top_p=number(body, "top_p", 1.0),  # this API has neither top_k nor stop strings
    )


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise BadRequest(f"tools: {str(tool.get('type'))[:20]} is not supported, only function")
    checked_tool(tool, "parameters")
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _add(messages: list[Message], item: Json) -> None:
    """In that API each call of a turn is a separate item; here they are one message."""
    match item.get("type", "message"):
        case "message":
            role = text(item, "role")
            role = "system" if role == "developer" else role
            if role not in ("system", "user", "assistant"):
                raise BadRequest(f"input: role {role[:20]!r} is not one of system | user | assistant")
            messages.append(Message(role=role, content=text_of(item.get("content"))))
        case "function_call":
            call = ToolCall(
                name=text(item, "name"), arguments=arguments_of(item.get("arguments")), call_id=text(item, "call_id")
            )
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                messages[-1] = Message(role="assistant", content=last.content, tool_calls=(*last.tool_calls, call))
            else:
                messages.append(Message(role="assistant", tool_calls=(call,)))
        case "function_call_output":
            said = text_of(item.get("output"))
            messages.append(Message(role="tool", content=said, call_id=text(item, "call_id")))
        case "reasoning":
            return
        case other:
            raise BadRequest(f"input: {str(other)[:20]} is not supported, only messages and function calls")


def _output(reply: TurnReply) -> list[dict[str, object]]:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    found: list[dict[str, object]] = []
    if reply.content or not reply.tool_calls:
        text = {"type": "output_text", "text": reply.content, "annotations": []}
        found.append(
            {"type": "message", "id": f"msg_{reply.reply_id}", "role": "assistant", "status": status, "content": [text]}
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
        # The client's types require these three.
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


def stream(reply: TurnReply, model: str, created: int, include_usage: bool) -> Iterator[str]:
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
            place = {"content_index": 0, **here}
            empty = {"type": "output_text", "text": "", "annotations": []}
            yield event("response.content_part.added", part=empty, **place)
            yield event("response.output_text.delta", delta=reply.content, logprobs=[], **place)
            yield event("response.output_text.done", text=reply.content, logprobs=[], **place)
            yield event("response.content_part.done", part={**empty, "text": reply.content}, **place)
        else:
            yield event("response.output_item.added", output_index=index, item={**item, "arguments": ""})
            yield event("response.function_call_arguments.delta", delta=item["arguments"], **here)
            yield event("response.function_call_arguments.done", arguments=item["arguments"], **here)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=whole)
