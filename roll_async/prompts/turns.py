"""Turns of a chat as OpenAI's interface writes them: read from rows, whole, and written in the form a template takes.

    {"role": "assistant", "content": null, "reasoning_content": "...", "tool_calls": [{"id": "c1", "type": "function",
     "function": {"name": "f", "arguments": "{\"city\": \"Z\"}"}}]}
    {"role": "tool", "tool_call_id": "c1", "content": "rain"}

Templates differ in the form: some iterate over the arguments of a call and others write their text, some know a
`developer`, some take a text as a list of parts. `Form` is one of these; which one a template needs is found by
rendering a chat whose texts are marks (`marked`): the form in which no mark is left out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Turn = Mapping[str, object]
IMAGE = "<image>"
"""Where texts of verl's rows have one of the column `images`, and what people and judges read in its place."""
IMAGE_PART = {"type": "image"}
"""In the place of an image whose file was taken out of the chat: templates ask for no more."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which servers return a thought; rows keep the first."""
_REMEDIES = {
    "function_call": "write it as tool_calls",
    "refusal": "write it as content",
    "audio": "write what is said as content",
}
"""What else OpenAI's interface has in a turn. Null and empty, as its clients write them, they say nothing."""
_MARK = "roll{}said"  # letters and digits: no template changes them, whatever it escapes


def parse_turns(turns: object, column: str, *, answered: bool = False) -> tuple[Turn, ...]:
    """The chat of a row, its arguments as JSON text and its contents as plain text, beside images (`IMAGE_PART`, as
    `images.py: taken_out` leaves them) as parts. Raises ValueError, with key and remedy, for what is no chat and for
    what a turn says that could not be kept. `answered`: it is trained on as it is; else it ends before an answer.
    """
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{column}: the chat must be a non-empty list of {{role: text, content: text}}")
    found = tuple(_turn(turn, f"{column}.{index}") for index, turn in enumerate(turns))
    if answered:
        if not any(turn["role"] == "assistant" for turn in found):
            raise ValueError(
                f"{column}: no turn of the assistant: there is nothing to train on; add one, or take it out"
            )
    elif found[-1]["role"] == "assistant":
        raise ValueError("the chat ends with an answer of the assistant; there is nothing to generate")
    return found


def _turn(turn: Mapping[str, object], key: str) -> Turn:
    given = {name: value for name, value in turn.items() if value is not None}  # parquet has null for a key it lacks
    role, content = given.pop("role", None), given.pop("content", None)
    if not isinstance(role, str) or not role:
        raise ValueError(f"{key}.role: {role!r:.60} is no text; write system, user, assistant or tool")
    calls = _calls(given.pop("tool_calls", None), f"{key}.tool_calls")
    if calls and role != "assistant":
        raise ValueError(f"{key}.tool_calls: a turn of role {role} calls no tools; remove them, or set role: assistant")
    if content is None and not calls:
        raise ValueError(f"{key}.content: missing; write text (it may be null beside tool_calls alone)")
    found: dict[str, object] = {"role": role, "content": "" if content is None else _text(content, f"{key}.content")}
    for name in filter(given.__contains__, _THOUGHTS):
        if thought := _string(given.pop(name), f"{key}.{name}"):
            if found.setdefault(_THOUGHTS[0], thought) != thought:
                raise ValueError(f"{key}.{name}: another thought than another key of this turn has; keep one")
    if calls:
        found["tool_calls"] = calls
    for name, remedy in _REMEDIES.items():
        if given.pop(name, None):
            raise ValueError(f"{key}.{name}: it would be lost; {remedy}")
    for name, value in given.items():
        if value not in ("", [], {}):  # a template may read names of its own; JSON is all that it could be given
            found[name] = _string(value, f"{key}.{name}") if name in ("name", "tool_call_id") else value
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError) as error:  # half of a surrogate pair is no text for a tokenizer or a file
        raise ValueError(f"{key}: {error}; remove it, or write it as text") from error
    return found


def _string(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r:.60} is no text; write a string")
    return value


def _text(content: object, key: str) -> str | list[dict[str, str]]:
    """Of a string, or of a list of text parts; with images among them, the parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{key}: {content!r:.60} is no text; write a string or a list of parts of type text")
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
        if not is_text and part is not IMAGE_PART:  # an equal one of the row's own has no file
            raise ValueError(f"{key}.{index}: {part!r:.60} is no part of type text; write content: text alone")
    if any("text" not in part for part in content):
        return [{"type": "text", "text": part["text"]} if "text" in part else part for part in content]
    return "".join(part["text"] for part in content)


def text_of(turn: Turn) -> str:
    """What a turn says, with `IMAGE` where one stands."""
    content = turn["content"]
    return "".join(part.get("text", IMAGE) for part in content) if isinstance(content, list) else str(content)


def with_texts(turn: Turn, change: Callable[[str, str], object]) -> dict[str, object]:
    """The turn with `change(key, text)` in the place of each text of its content."""
    content = turn["content"]
    if not isinstance(content, list):
        return {**turn, "content": change("content", str(content))}
    parts = enumerate(content)
    changed = [{**part, "text": change(f"content.{i}", part["text"])} if "text" in part else part for i, part in parts]
    return {**turn, "content": changed}


def _calls(calls: object, key: str) -> list[dict[str, object]]:
    if not calls:
        return []
    if not isinstance(calls, list):
        raise ValueError(f"{key}: {calls!r:.60} must be a list of calls")
    return [_call(call, f"{key}.{index}") for index, call in enumerate(calls)]


def _call(call: object, key: str) -> dict[str, object]:
    function = call.get("function", call) if isinstance(call, dict) else None  # some files leave the wrapping out
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'{key}: {call!r:.60} is no call; write {{"function": {{"name": text, "arguments": JSON}}}}')
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(f"{key}.function.arguments: {arguments!r:.60} is no JSON object; write one, or its text")
    named = {} if call.get("id") is None else {"id": _string(call["id"], f"{key}.id")}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": text or "{}"}}


@dataclass(frozen=True, slots=True)
class Form:
    """What a template takes."""

    developer: str = "system"
    """Role of a `developer`."""
    arguments_as_text: bool = False
    content_as_parts: bool = False
    content_may_be_null: bool = False
    """A turn that only calls tools has null, as OpenAI's clients write it, and not the empty text."""
    thought: str = _THOUGHTS[0]
    """Key of a turn's thought."""

    def written(self, chat: Sequence[Turn]) -> list[dict[str, object]]:
        """The chat in this form."""
        names: dict[object, object] = {}
        return [self._turn(turn, names) for turn in chat]

    def _turn(self, turn: Turn, names: dict[object, object]) -> dict[str, object]:
        found = dict(turn)
        if turn["role"] == "developer":
            found["role"] = self.developer
        if self.content_may_be_null and _is_silent(turn):
            found["content"] = None
        elif self.content_as_parts and isinstance(turn["content"], str):
            found["content"] = [{"type": "text", "text": turn["content"]}]
        if (thought := found.pop(_THOUGHTS[0], None)) is not None:
            found[self.thought] = thought
        if calls := _calls_of(turn):
            names.update((call.get("id"), call["function"]["name"]) for call in calls)
            found["tool_calls"] = (
                calls
                if self.arguments_as_text
                else [
                    {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
                    for c in calls
                ]
            )
        if turn["role"] == "tool" and "name" not in turn and (name := names.get(turn.get("tool_call_id"))):
            found["name"] = name  # OpenAI's form leaves it out, and some templates write it
        return found


def forms_for(source: str, chat: Sequence[Turn]) -> Iterator[Form]:
    """Forms in which the template of this source may take the chat, the likeliest first."""
    calls, yes_too = any(map(_calls_of, chat)), (False, True)
    named = any(turn["role"] == "developer" for turn in chat) and "developer" in source
    for parts, null, as_text, developer in itertools.product(
        yes_too,
        yes_too if any(map(_is_silent, chat)) else (False,),
        yes_too if calls else (False,),
        ("developer", "system") if named else ("system",),
    ):
        yield Form(developer, as_text, parts, null, _thought_of(source) or _THOUGHTS[0])


def keeps_thoughts(source: str) -> bool:
    """Whether a template knows thoughts, so that those it leaves out are left out by design: most say the thoughts of
    the last question alone.
    """
    return _thought_of(source) is not None or "</think>" in source


def _thought_of(source: str) -> str | None:
    """The key under which a template looks for a thought."""
    return next((name for name in _THOUGHTS if re.search(rf"[.'\"]{name}\b", source)), None)


def marked(chat: Sequence[Turn], *, thoughts: bool) -> tuple[list[Turn], dict[str, str]]:
    """(the chat with a mark in the place of every text, {mark: the key of its text} of those that have to be said).
    Chats of one shape are equal then. `thoughts`: that of the turns, too.
    """
    keys: dict[str, str] = {}
    ids: dict[object, str] = {}

    def mark(key: str, text: object) -> object:
        if not isinstance(text, str) or not text.strip():
            return text
        keys[(made := _MARK.format(len(keys)))] = key
        return made

    def call_mark(call: dict, key: str) -> dict:
        name, arguments = mark(f"{key}.function.name", call["function"]["name"]), "{}"
        if json.loads(call["function"]["arguments"]):
            arguments = json.dumps({"key": mark(f"{key}.function.arguments", "said")})
        named = {"id": id_of(call["id"])} if "id" in call else {}
        return {**call, **named, "function": {"name": name, "arguments": arguments}}

    def id_of(given: object) -> str:
        return ids.setdefault(given, f"call{len(ids):05}")  # nine characters, which some templates demand

    found: list[Turn] = []
    for index, turn in enumerate(chat):
        shape = with_texts(turn, lambda key, text, index=index: mark(f"{index}.{key}", text))
        if _THOUGHTS[0] in turn:
            shape[_THOUGHTS[0]] = mark(f"{index}.{_THOUGHTS[0]}", turn[_THOUGHTS[0]]) if thoughts else "thought"
        if calls := _calls_of(turn):
            shape["tool_calls"] = [call_mark(call, f"{index}.tool_calls.{i}") for i, call in enumerate(calls)]
        if "tool_call_id" in turn:
            shape["tool_call_id"] = id_of(turn["tool_call_id"])
        if "name" in turn:
            shape["name"] = "name"
        found.append(shape)
    return found, keys


def _calls_of(turn: Turn) -> list[dict]:
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _is_silent(turn: Turn) -> bool:
    return not turn["content"] and bool(_calls_of(turn))
