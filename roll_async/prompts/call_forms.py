"""The forms of calls that model families have, and which of them a chat template writes.

    probe calls --template--> text of a turn --each form reads--> the one that gives the same calls back

A further family is an entry of FORMS, and a shape of its template in `tests/unit/prompts/test_call_forms.py`. What has
no form here is offered tools in our own words (`agents/rendering.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from roll_async.prompts.tool_calls import (
    HERMES,
    CallFormat,
    Kinds,
    Span,
    ToolCall,
    call_of,
    call_with,
    decoded,
    kinds_of,
)

Render = Callable[[list[dict]], str]
"""A chat as the template says it, with PROBE_TOOL offered; empty where it refuses."""
_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
}


_WORDS: Mapping[str, tuple[object, str]] = {
    "True": (True, "boolean"),
    "False": (False, "boolean"),
    "None": (None, "null"),
}
"""Values as templates of Qwen 3.5 print them, and the types that they may have."""


class TaggedCalls(CallFormat):
    """Arguments one by one, as text between tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    An end tag counts where a tag of the form follows it, so that a value may hold one. What opens a call may not stand
    in a value.
    """

    def __init__(
        self,
        family: str,
        *,
        opens: str,
        name_ends: str,
        key: tuple[str, str],
        value: tuple[str, str],
        closes: str,
        section: tuple[str, str] | None = None,
        is_padded: bool = False,
    ) -> None:
        """`name_ends`: "" where the first argument ends the name. `key`, `value`: what opens and closes them.
        `is_padded`: a value stands on lines of its own.
        """
        super().__init__(family, opens=opens, closes=closes, section=section)
        self._key, self._is_padded = key, is_padded
        open_key, close_key, open_value, close_value = map(re.escape, (*key, *value))
        follows = rf"\s*(?:{open_key}|{re.escape(closes)})"
        name = rf"(?P<name>[^<>\"]*?){re.escape(name_ends)}" if name_ends else rf"(?P<name>[^<>{{}}\"]*?)(?={follows})"
        self._name = re.compile(name)
        self._argument = re.compile(rf"\s*{open_key}([^<>\"]*+){close_key}\s*?{open_value}")
        self._value_ends = re.compile(rf"{close_value}(?={follows})")
        self._ends = re.compile(rf"\s*{re.escape(closes)}")

    def _call(self, text: str, start: int, kinds: Kinds) -> tuple[int, list[ToolCall]]:
        limit = text.find(self.opens, start)
        piece = text[start:] if limit < 0 else text[start:limit]
        try:
            end, call = self._parsed(piece, kinds)
        except ValueError as error:
            end, problem = piece.find(self.closes), f"the call is not of the form of {self.family}: {error}"
            return start + (len(piece) if end < 0 else end + len(self.closes)), [ToolCall(name="", problem=problem)]
        return start + end, [call]

    def _parsed(self, text: str, kinds: Kinds) -> tuple[int, ToolCall]:
        """(end, the call) of what follows an opening mark. Raises ValueError saying what is wrong."""
        begins = self._name.match(text)
        name = "" if begins is None else begins["name"].strip()
        if begins is None or not name:
            raise ValueError("it has no name")
        known, arguments, position = kinds.get(name, {}), {}, begins.end()
        while found := self._argument.match(text, position):
            key, ends = found[1].strip(), self._value_ends.search(text, found.end())
            if ends is None or key in arguments:
                raise ValueError(f"argument {json.dumps(key)} {'has no end' if ends is None else 'is given twice'}")
            try:
                arguments[key] = typed(self._value(text[found.end() : ends.start()]), known.get(key))
            except ValueError as error:
                raise ValueError(f"argument {json.dumps(key)}: {error}") from error
            position = ends.end()
        end = self._ends.match(text, position)
        if end is None:
            raise ValueError(f"{self.closes} is missing after its arguments")
        return end.end(), ToolCall(name=name, arguments=arguments)

    def _value(self, text: str) -> str:
        # One line break on each side is of the form; further ones, and indents, are of the value.
        return text.removeprefix("\n").removesuffix("\n") if self._is_padded else text


class BareCalls(CallFormat):
    """Calls that are the turn itself, without a mark: `{"name": ..., "parameters": {...}}`, or a line with the name and
    then the arguments. A mark may stand before them.
    """

    def __init__(self, family: str, *, opens: str, begins: str, is_strict: bool = False) -> None:
        """`begins`: pattern of what stands before the JSON of a call, with a group `name` where that is the arguments.
        `is_strict`: nothing but calls follows the mark.
        """
        super().__init__(family, opens=opens)
        self._begins, self._is_strict = re.compile(begins), is_strict
        self._has_head = "name" in self._begins.groupindex

    def find(self, text: str, begins: int, kinds: Kinds) -> Iterator[Span]:
        start = position = begins
        while True:
            is_marked, is_empty = position > start, True
            while (read := self._next(text, position, kinds, is_marked)) is not None:
                position, call = read
                yield start, position, call
                start, is_empty = position, False
            if is_marked and is_empty and self._is_strict:
                position = len(text)
                yield start, position, ToolCall(name="", problem=f"the call is not of the form of {self.family}")
            start = text.find(self.opens, position)
            if start < 0:
                return
            position = start + len(self.opens)

    def _next(self, text: str, position: int, kinds: Kinds, is_marked: bool) -> tuple[int, ToolCall] | None:
        """(end, the call) that begins here. After one that is no JSON nothing is read: its end is not known."""
        found = self._begins.match(text, position)
        if found is None:
            return None
        name = found["name"] if self._has_head else ""
        if name and kinds and name not in kinds:
            return None  # an answer
        try:
            value, end = decoded(text, found.end())
        except ValueError as error:
            return len(text), ToolCall(name="", problem=f"the call is not valid JSON ({error})")
        if name:
            return end, call_with(name, value)
        return (end, call_of(value, "parameters")) if is_marked or self._is_call(value, kinds) else None

    @staticmethod
    def _is_call(value: object, kinds: Kinds) -> bool:
        """An answer may be JSON, too."""
        if not isinstance(value, dict):
            return False
        named = isinstance(name := value.get("name"), str) and name in kinds
        return named or "parameters" in value or any(isinstance(each, dict) for each in value.values())


def typed(text: str, schema: object) -> object:
    """The value of an argument that a form writes as text: of the types of its schema, of any type without one. Raises
    ValueError for a number or a nesting that is too large.
    """
    types = frozenset(_types(schema))
    if types == {"string"}:
        return text
    word, kind = _WORDS.get(text, (None, ""))
    if kind in types:
        return word
    try:
        value, end = decoded(text, 0)
    except ValueError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            return text
        raise
    fits = not types or "string" not in types or bool(_TYPES.get(type(value), frozenset()) & types)
    return value if fits and not text[end:].strip() else text


def _types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        for branch in union if isinstance(union, list) else ():
            if isinstance(branch, Mapping) and isinstance(branch.get("type"), str):
                yield branch["type"]


FORMS: Sequence[CallFormat] = (
    HERMES,
    TaggedCalls(
        "Qwen3-Coder",
        opens="<function=",
        name_ends=">",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        closes="</function>",
        section=("<tool_call>", "</tool_call>"),
        is_padded=True,
    ),
    TaggedCalls(
        "GLM-4.5",
        opens="<tool_call>",
        name_ends="",
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        closes="</tool_call>",
    ),
    *(
        TaggedCalls(
            family,
            opens=f'<{prefix}invoke name="',
            name_ends='">',
            key=(f'<{prefix}parameter name="', '">'),
            value=("", f"</{prefix}parameter>"),
            closes=f"</{prefix}invoke>",
            section=(f"<{section}>", f"</{section}>"),
        )
        for family, prefix, section in (
            ("MiniMax", "", "minimax:tool_call"),
            ("Muse", "atem:", "atem:function_calls"),
        )
    ),
    CallFormat(
        "Mistral",
        opens="[TOOL_CALLS]",
        head=r"\s*(?P<name>[^\s\[{]{1,256})(?:\[CALL_ID\][^\s\[{]{1,64})?\[ARGS\]",
        is_list=True,
    ),
    *(
        CallFormat(
            family,
            opens="<｜tool▁call▁begin｜>",
            closes="<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            head=head,
            tail=tail,
        )
        for family, head, tail in (
            ("DeepSeek-V3", r"\s*function<｜tool▁sep｜>(?P<name>[^\n<]{1,256})\n```json\n", r"(?:```\s*)?"),
            ("DeepSeek-V3.1", r"(?P<name>[^\n<]{1,256})<｜tool▁sep｜>", ""),
        )
    ),
    CallFormat(
        "Kimi-K2",
        opens="<|tool_call_begin|>",
        closes="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        head=r"\s*(?:functions\.)?(?P<name>[^\s<:]{1,256})(?::\d{1,9})?\s*<\|tool_call_argument_begin\|>",
    ),
    CallFormat(
        "gpt-oss",
        opens="to=functions.",
        closes="<|call|>",
        head=r"(?P<name>[^\s<]{1,256})\s*(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
    ),
    BareCalls("Llama-3", opens="<|python_tag|>", begins=r'[\s;,]*(?=\{\s*"(?:name|type|id)"\s*:)', is_strict=True),
    BareCalls("GLM-4", opens="<|assistant|>", begins=r"\s*(?P<name>[\w.-]{1,64})[^\S\n]*\n\s*(?=\{)"),
)
"""The first one that reads the template's calls is the model's."""

_ANSWER = "@roll-answer@"
_ARGUMENTS = {"roll_text": 'a "b" \\ \u00fc {}\n  c', "roll_number": 5, "roll_flag": True, "roll_list": ["d", 1]}
_SCHEMAS = {"roll_text": "string", "roll_number": "integer", "roll_flag": "boolean", "roll_list": "array"}
PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "roll_probe",
        "description": "?",
        "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in _SCHEMAS.items()}},
    },
}
_PROBES = (
    ToolCall(name="roll_probe", arguments=_ARGUMENTS),
    ToolCall(name="roll_probe", arguments={"roll_number": 7}),
)
_EXAMPLE = ToolCall(name="function_name", arguments={"argument_name": "value"})


def plain_id(name: str, number: int) -> str:
    """Of the n-th call of a chat: nine letters and digits, which is what Mistral's templates take."""
    return f"call{number:05d}"


def naming_id(name: str, number: int) -> str:
    """Likewise; the template of Kimi K2 writes it in place of the name."""
    return f"functions.{name}:{number}"


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """How a chat template is given calls, and the form in which it writes them."""

    form: CallFormat
    id_of: Callable[[str, int], str] = plain_id
    """Of the n-th call of a chat, with its function's name."""
    as_text: bool = False
    """Arguments as the text of JSON."""
    takes_several: bool = True
    """In one turn."""
    example: str = ""
    """What a model writes to call `function_name`."""

    def message(self, content: str, calls: Sequence[ToolCall], number: int) -> dict:
        """A turn with calls, the first of which is the n-th of the chat."""
        said = [
            {
                "id": self.id_of(call.name, number + i),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments)) if self.as_text else dict(call.arguments),
                },
            }
            for i, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": content, "tool_calls": said}


def written_by(render: Render) -> TemplateCalls | None:
    """What the template writes calls in, by reading back what it makes of some; None where no form reads them."""
    for id_of in (plain_id, naming_id):
        for as_text in (False, True):
            for form in FORMS:
                found = TemplateCalls(form, id_of, as_text)
                if _reads(found, render, _PROBES[:1]):
                    takes_several = _reads(found, render, _PROBES)
                    example = turn_of(render, found.message("", [_EXAMPLE], 0))
                    return TemplateCalls(form, id_of, as_text, takes_several, example.strip())
    return None


def _reads(style: TemplateCalls, render: Render, calls: Sequence[ToolCall]) -> bool:
    text = turn_of(render, style.message("", calls, 0))
    found = [call for *_, call in style.form.find(text, 0, kinds_of([PROBE_TOOL])) if call is not None]
    return found == list(calls)


def turn_of(render: Render, message: dict) -> str:
    """What the template makes of a turn, from where its content would begin to where that would end."""
    question = {"role": "user", "content": "?"}
    text, other = render([question, message]), render([question, {"role": "assistant", "content": _ANSWER}])
    begins = len(os.path.commonprefix([text, other]))
    return text[begins:].removesuffix(other.rpartition(_ANSWER)[2])
