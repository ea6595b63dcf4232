"""The format of OpenAI's chat completions API: bodies to requests, replies to bodies and to a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from roll_async.agents.gateway.bounds import parsed
from roll_async.agents.gateway.fields import CACHE, EFFORT, LABEL, SAMPLING, Field, Json, acts, ignored, refused
from roll_async.agents.messages import Message, TurnReply, TurnRequest
from roll_async.agents.turn_handler import BadRequest
from roll_async.prompts.tool_calls import ToolCall

PARALLEL = refused("a turn is what the policy said, with all of its calls", True)
FIELDS: Mapping[str, Field] = {
    "messages": acts(),
    "messages[].name": ignored("chat templates have no names"),
    "messages[].audio": refused("only text"),
    "messages[].function_call": refused("use tool_calls"),
    "model": acts("any name; the endpoint has one policy"),
    "tools": acts("functions only"),
    "tools[].function.strict": ignored("calls are as the policy wrote them, not forced into the schema", False),
    "tool_choice": acts("auto or none; others are refused"),
    "parallel_tool_calls": PARALLEL,
    "functions": refused("use tools"),
    "function_call": refused("use tool_choice"),
    "max_completion_tokens": acts("beside the run's own limit"),
    "max_tokens": acts("as max_completion_tokens"),
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "top_k": SAMPLING,
    "stop": SAMPLING,
    "frequency_penalty": refused("penalties are no part of a policy whose log-probs are compared", 0),
    "presence_penalty": refused("penalties are no part of a policy whose log-probs are compared", 0),
    "logit_bias": refused("tokens have the log-probs of the policy", {}),
    "seed": ignored("engines batch requests, so a seed repeats nothing"),
    "n": refused("one choice per request; send the request n times", 1),
    "logprobs": refused("they are recorded and not sent", False),
    "top_logprobs": refused("they are recorded and not sent", 0),
    "response_format": refused("nothing forces the policy into a format", {"type": "text"}),
    "modalities": refused("only text", ["text"]),
    "audio": refused("only text"),
    "prediction": ignored("it changes only the speed"),
    "reasoning_effort": EFFORT,
    "verbosity": EFFORT,
    "web_search_options": refused("there is no web search; give a tool"),
    "moderation": refused("nothing is moderated"),
    "store": refused("nothing is stored for later requests", False),
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
"""All of `openai.types.chat.CompletionCreateParams` (openai 3.54), and top_k as vLLM has it."""


def read(body: Json) -> TurnRequest:
    """Raises BadRequest naming the field."""
    messages = tuple(message(item) for item in items(body, "messages"))
    if not messages:
        raise BadRequest("messages: empty")
    text(body, "model")  # any name is taken, if it is a text
    most, old = whole(body, "max_completion_tokens", 1), whole(body, "max_tokens", 1)
    return TurnRequest(
        messages=messages,
        tools=tuple(map(_tool, items(body, "tools"))) if offers_tools(body.get("tool_choice")) else (),
        max_tokens=old if most is None else most,
        temperature=number(body, "temperature", 2.0),
        top_p=number(body, "top_p", 1.0),
        top_k=whole(body, "top_k", -1),  # vLLM's -1 is no limit
        stop=stops(body, "stop"),
    )


def message(item: Json) -> Message:
    """A message of a history, or of a reply. Raises BadRequest for a role or a content that is none."""
    role = text(item, "role")
    # The API's newer name of the one, its older name of the other.
    role = {"developer": "system", "function": "tool"}.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages: role {role[:20]!r} is not one of system | user | assistant | tool")
    return Message(
        role=role,
        content=text_of(item.get("content")),
        tool_calls=tuple(_call(call) for call in items(item, "tool_calls")),
        call_id=text(item, "tool_call_id"),
    )


def _call(item: Json) -> ToolCall:
    function = item.get("function")
    if not isinstance(function, dict):
        raise BadRequest("tool_calls: a call has no function")
    return ToolCall(
        name=text(function, "name"), arguments=arguments_of(function.get("arguments")), call_id=text(item, "id")
    )


def _tool(item: Json) -> Json:
    if item.get("type", "function") != "function" or not isinstance(item.get("function"), dict):
        raise BadRequest("tools: only functions are supported, as {type: function, function: {...}}")
    checked_tool(item["function"], "parameters")  # type: ignore[arg-type]
    return item


def checked_tool(function: Json, schema: str) -> None:
    """Raises BadRequest for a function that no template can write."""
    if not text(function, "name"):
        raise BadRequest("tools: a function has no name")
    text(function, "description")
    if not isinstance(function.get(schema), dict | None):
        raise BadRequest(f"tools: {schema} is no object")


def offers_tools(choice: object, none: object = "none", auto: object = "auto") -> bool:
    """Raises BadRequest for a choice that would force the policy."""
    if choice not in (None, none, auto):
        raise BadRequest("tool_choice: nothing forces the policy to call a tool; auto and none are supported")
    return choice != none


def arguments_of(value: object) -> Mapping[str, object]:
    """Arguments of a call in a history: an object, or its JSON text; anything else is stored under `text`."""
    if isinstance(value, str):
        try:
            value = parsed(value or "{}")
        except BadRequest:
            return {"text": value}
    return value if isinstance(value, dict) else {"text": str(value)}


def text(item: Json, name: str) -> str:
    """A text, empty when absent."""
    value = item.get(name)
    if not isinstance(value, str | None):
        raise BadRequest(f"{name}: expected a text, got {type(value).__name__}")
    return value or ""


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
        # A turn of the API's own models may be a refusal, under its own key.
        elif isinstance(part, dict) and isinstance(part.get("text", part.get("refusal")), str):
            parts.append(str(part.get("text", part.get("refusal"))))
        else:
            kind = str(part.get("type"))[:20] if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"content: {kind} is not supported, only text")
    return "".join(parts)


def items(body: Json, name: str) -> Sequence[dict]:
    """A list of objects; empty when absent."""
    found = body.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadRequest(f"{name}: expected a list of objects")
    return found


def stops(body: Json, name: str) -> tuple[str, ...]:
    """One text or a list of them."""
    found = body.get(name)
    found = [found] if isinstance(found, str) else found or []
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        raise BadRequest(f"{name}: expected a text or a list of texts")
    return tuple(found)


def number(body: Json, name: str, most: float) -> float | None:
    """A number from 0 to `most`, None when absent."""
    value = body.get(name)
    if value is None:
        return None
    # In Python true is a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadRequest(f"{name}: expected a number from 0 to {most:g}, got {str(value)[:20]}")
    return float(value)


def whole(body: Json, name: str, least: int) -> int | None:
    """A whole number, None when absent."""
    value = body.get(name)
    if value is None:
        return None
    # In Python true is a whole number.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{name}: expected a whole number from {least}, got {str(value)[:20]}")
    return value


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
        # The API has arguments as JSON inside a text.
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
        for c in said.tool_calls
    ]
    return {"content": said.content or None, "tool_calls": calls}  # null, as the API has it beside calls


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


def stream(reply: TurnReply, model: str, created: int, include_usage: bool) -> Iterator[str]:
    """Server-sent events of a reply."""
    head = {"id": reply.reply_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def chunk(delta: Mapping[str, object], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    said = _said(reply)
    calls = said.pop("tool_calls", None)
    yield chunk({"role": "assistant", "content": ""})  # the API's first chunk has the role and no text
    if said["content"]:
        yield chunk({"content": said["content"]})
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, reply.finish_reason)
    if include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"
