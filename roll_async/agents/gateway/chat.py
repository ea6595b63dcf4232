"""The format of OpenAI's chat completions API: bodies to requests, replies to bodies and to a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from roll_async.agents.limited_turns import BadRequest
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.rollout.tools import ToolCall

Json = Mapping[str, object]
N = TypeVar("N", int, float)


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    if number(body, "n", int) not in (None, 1):
        raise BadRequest("n: one choice per request; send the request n times")
    messages = tuple(message(item) for item in items(body, "messages"))
    if not messages:
        raise BadRequest("messages: empty")
    stop = body.get("stop")
    return TurnRequest(
        messages=messages,
        tools=tuple(items(body, "tools")) if body.get("tool_choice") != "none" else (),
        max_tokens=number(body, "max_completion_tokens", int) or number(body, "max_tokens", int),
        temperature=number(body, "temperature", float),
        top_p=number(body, "top_p", float),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)) if isinstance(stop, list) else (),
    )


def message(item: Json) -> Message:
    """A message of a history, or of a reply. Raises BadRequest for a role or a content that is none."""
    role = str(item.get("role", ""))
    role = {"developer": "system", "function": "tool"}.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages: role {role!r} is not one of system | user | assistant | tool")
    return Message(
        role=role,
        content=text_of(item.get("content")),
        tool_calls=tuple(_call(call) for call in items(item, "tool_calls")),
        call_id=str(item.get("tool_call_id") or ""),
    )


def _call(item: Json) -> ToolCall:
    function = item.get("function")
    if not isinstance(function, dict):
        raise BadRequest("messages: a tool call has no function")
    return ToolCall(
        name=str(function.get("name", "")),
        arguments=arguments_of(function.get("arguments")),
        call_id=str(item.get("id") or ""),
    )


def arguments_of(value: object) -> Mapping[str, object]:
    """Arguments of a call in a history: an object, or its JSON text; anything else is stored under `text`."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (json.JSONDecodeError, RecursionError):
            return {"text": value}
    return value if isinstance(value, dict) else {"text": str(value)}


def text_of(content: object) -> str:
    """Text of a string or of a list of text parts. Raises BadRequest for images and audio."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text", part.get("refusal")), str):
            parts.append(str(part.get("text", part.get("refusal"))))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"content: {kind} is not supported, only text")
    return "".join(parts)


def items(body: Json, name: str) -> Sequence[dict]:
    """A list of objects; empty when absent."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadRequest(f"{name}: expected a list of objects")
    return found


def number(body: Json, name: str, kind: type[N]) -> N | None:
    """A number, None when absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name}: expected a number, got {value!r}")
    return kind(value)


def write(reply: TurnReply, model: str, created: int) -> Json:
    """The body of a reply."""
    return {
        "id": reply.reply_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **_said(reply)},
                "finish_reason": reply.finish_reason,
                "logprobs": None,
            }
        ],
        "usage": usage(reply),
    }


def _said(said: TurnReply | Message) -> dict[str, object]:
    if not said.tool_calls:
        return {"content": said.content}
    calls = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
        for c in said.tool_calls
    ]
    return {"content": said.content or None, "tool_calls": calls}


def written(message: Message) -> Json:
    """A message as clients send it: the reverse of `message`."""
    answers = {"tool_call_id": message.call_id} if message.call_id else {}
    return {"role": message.role, **_said(message), **answers}


def usage(reply: TurnReply) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def stream(reply: TurnReply, model: str, created: int, body: Json) -> Iterator[str]:
    """Server-sent events of a reply."""
    head = {"id": reply.reply_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def chunk(delta: Mapping[str, object], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    said = _said(reply)
    calls = said.pop("tool_calls", None)
    yield chunk({"role": "assistant", "content": ""})
    if said["content"]:
        yield chunk({"content": said["content"]})
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, reply.finish_reason)
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"
