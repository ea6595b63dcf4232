"""From the bytes of a request to a turn that is asked for, within bounds; what no client may send is refused here.

It is a function of bytes, so that a long body is read in another process (`agents/processes/beside.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from roll_async.agents.gateway import anthropic, chat, responses
from roll_async.agents.gateway.bounds import MAX_MESSAGES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOOLS, measure, parsed
from roll_async.agents.gateway.fields import check
from roll_async.agents.messages import TurnRequest
from roll_async.agents.turn_handler import BadRequest
from roll_async.schema import COLDEST, SamplingParams

DIALECTS = {"chat": chat, "responses": responses, "anthropic": anthropic}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    turn: TurnRequest
    digest: str
    """Of the whole body."""
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]
    """Names of fields that have no effect."""
    sampling: tuple[str, ...]
    """Names of fields that have an effect where requests choose how they are sampled."""


def read(dialect: str, raw: bytes, takes_sampling: bool = True) -> Asked:
    """`takes_sampling`: whether the request chooses how it is sampled; else those fields may say anything. Raises
    BadRequest naming the field.
    """
    try:
        body = parsed(raw.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"not UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("not a JSON object")
    form = DIALECTS[dialect]
    ignored, sampling = check(body, form.FIELDS)
    stream, options = body.get("stream"), body.get("stream_options")
    if not isinstance(stream, bool | None):
        raise BadRequest("stream: expected true or false")
    if not isinstance(options, dict | None):
        raise BadRequest("stream_options: expected an object")
    turn = form.read(body if takes_sampling else {name: body[name] for name in body if name not in sampling})
    if turn.temperature is not None and turn.temperature < COLDEST:
        turn = replace(turn, temperature=0.0)
    _bound(turn)
    return Asked(
        turn=turn,
        digest=hashlib.blake2b(raw, digest_size=16).hexdigest(),  # the same id with another body is another request
        stream=bool(stream),
        include_usage=bool((options or {}).get("include_usage")),
        ignored=tuple(ignored),
        sampling=tuple(sampling),
    )


def _bound(turn: TurnRequest) -> None:
    for name, count, most in (
        ("messages", len(turn.messages), MAX_MESSAGES),
        ("tools", len(turn.tools), MAX_TOOLS),
        ("stop", len(turn.stop), MAX_STOPS),
    ):
        if count > most:
            raise BadRequest(f"{name}: {count} of them, at most {most} are read")
    for stop in turn.stop:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise BadRequest(f"stop: a text of {len(stop)} characters; give 1 to {MAX_STOP_CHARACTERS}")
    given = {"temperature": turn.temperature, "top_p": turn.top_p, "top_k": turn.top_k}
    try:
        SamplingParams(max_new_tokens=1, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise BadRequest(str(error)) from error
    # Each was within the bounds when it was parsed; together they may not be.
    measure([call.arguments for message in turn.messages for call in message.tool_calls])
