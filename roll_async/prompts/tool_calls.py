"""Calls of tools in the text of a model: where the form of a model family is read.

    text of a turn --thoughts are left out--> marks of the family --> JSON or tags --> what is said beside, the calls

`CallFormat` reads every family that marks its calls and writes arguments as JSON; `prompts/call_forms.py` has the other
two kinds, the list of all families, and finds which of them a chat template writes. Nothing of a call is ever
evaluated, and whatever cannot be run is a call with a problem, which the model is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from roll_async.observe.outside import plain
from roll_async.observe.thoughts import THINK, ThoughtMarks, thought_of

Span = tuple[int, int, "ToolCall | None"]
"""(start, end) in a text and the call that stands there; None for marks around calls."""
Kinds = Mapping[str, Mapping[str, object]]
"""By function, its parameters' JSON schemas."""
_BESIDE = frozenset({"id", "type"})
"""Keys that families write beside name and arguments."""
_MOST_MARKS = 8
"""End marks inside the strings of one call."""
_DECODER = json.JSONDecoder(parse_constant=lambda name: _no_number(name))
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|(\\?\Z))', re.DOTALL)
"""A string of JSON; group 1: the text ends inside it. It fits at every quote, so that a search is linear."""
_TOOLS_TEXT = (
    "\n\nYou may call functions. Their signatures are within <tools></tools>:\n<tools>\n{tools}\n</tools>\n\n"
    "For each call, write:\n{example}"
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
    """Calls between marks, with JSON inside: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and its kin."""

    def __init__(
        self,
        family: str,
        *,
        opens: str,
        closes: str = "",
        section: tuple[str, str] | None = None,
        head: str | None = None,
        tail: str = "",
        is_list: bool = False,
    ) -> None:
        """`closes`: "" where the JSON ends the call. `section`: marks around all calls of a turn. `head`: pattern of
        what follows `opens`, with a group `name`, where the JSON is the arguments alone; None = it is the whole call.
        `tail`: pattern between the JSON and `closes`. `is_list`: without a head the JSON is a list of calls.
        """
        self.family, self.opens, self.closes, self.section, self.is_list = family, opens, closes, section, is_list
        self.thoughts: Sequence[ThoughtMarks] = THINK
        self._marks = re.compile("|".join(map(re.escape, (*(section or ()), opens))))
        self._head = re.compile(head) if head is not None else None
        self._end = re.compile(rf"\s*{tail}(?:{re.escape(closes)}|\Z)" if closes else "")

    def with_thoughts(self, thoughts: Sequence[ThoughtMarks]) -> CallFormat:
        """The same form of a model whose thoughts stand between these marks."""
        same = copy(self)
        same.thoughts = thoughts
        return same

    def read(
        self, text: str, tools: Sequence[Mapping[str, object]] = (), *, opened: str = ""
    ) -> tuple[str, list[ToolCall]]:
        """(text without well-formed calls, all calls in the order of the text, malformed ones with their problem), in
        time linear in the text. `tools`: their schemas tell texts from numbers where the form does not. `opened`: by
        the prompt (`observe/thoughts.py: opening_at_end`). Calls inside thoughts are none.
        """
        kinds = kinds_of(tools)
        begins, problem = self._after_thoughts(text, kinds, opened)
        calls: list[ToolCall] = [ToolCall(name="", problem=problem)] if problem else []
        rest, position = [], 0
        for start, end, call in self.find(text, begins, kinds):
            if call is not None:
                calls.append(call)
            if call is None or not call.problem:
                rest.append(text[position:start])
                position = end
        # A turn without calls keeps its white space: it is compared with what clients send back.
        return "".join((*rest, text[position:])).strip() if position else text, calls

    def find(self, text: str, begins: int, kinds: Kinds) -> Iterator[Span]:
        """Calls and the marks around them, from a position on."""
        position, is_inside = begins, False
        while found := self._marks.search(text, position):
            mark, start, position = found[0], found.start(), found.end()
            if mark == self.opens:
                position, calls = self._call(text, position, kinds)
                for call in calls:
                    yield start, position, call
                    start = position  # one piece of text, also where it holds several calls
            elif self.section is not None and mark == self.section[0]:
                following = self._marks.search(text, position)
                is_inside = following is not None and following[0] == self.opens
                if is_inside:
                    yield start, position, None
                else:
                    position = following.end() if following is not None else len(text)
                    yield start, position, ToolCall(name="", problem=f"there is no call of the form of {self.family}")
            elif is_inside:
                is_inside = False
                yield start, position, None

    def _call(self, text: str, start: int, kinds: Kinds) -> tuple[int, list[ToolCall]]:
        """(end, the calls) of what follows an opening mark."""
        head = self._head.match(text, start) if self._head is not None else None
        if self._head is not None and head is None and not self.is_list:
            end = self._after(text, start)
            return end, [ToolCall(name="", problem=f"the call is not of the form of {self.family}")]
        value, problem, end = json_at(text, head.end() if head is not None else start, self.closes or self.opens)
        if not problem and (ended := self._end.match(text, end)) is None:
            problem = f"the call is not valid JSON (Extra data at character {end - start})"
        elif not problem:
            assert ended is not None
            end = ended.end()
        if problem:
            return self._after(text, start), [ToolCall(name=head["name"] if head is not None else "", problem=problem)]
        if head is not None:
            return end, [call_with(head["name"].strip(), value)]
        if self.is_list and isinstance(value, list):
            return end, [call_of(each) for each in value] or [ToolCall(name="", problem="the list of calls is empty")]
        return end, [call_of(value)]

    def _after(self, text: str, start: int) -> int:
        """Where a call that cannot be read ends: at its mark, or before the next call."""
        end = text.find(self.closes or self.opens, start)
        return len(text) if end < 0 else end + len(self.closes)

    def _good(self, text: str, begins: int, kinds: Kinds) -> list[tuple[int, int]]:
        """Where the calls stand that can be run."""
        found = self.find(text, begins, kinds)
        return [(start, end) for start, end, call in found if call is not None and not call.problem]

    def _after_thoughts(self, text: str, kinds: Kinds, opened: str) -> tuple[int, str]:
        """(where the last thought ends, what is wrong with a call inside one that does not end)."""
        if thought_of(opened, text, self.thoughts).rest == text:
            return 0, ""
        # Marks of thoughts in the arguments of a call are text of it.
        closed = [at + len(mark) for mark in (each.closing for each in self.thoughts) if (at := text.find(mark)) >= 0]
        # A call without a mark stands behind the first thought; the others are found from the beginning.
        calls = self._good(text, 0, kinds) or self._good(text, min(closed, default=len(text)), kinds)
        masked, position = [], 0
        for start, end in calls:
            masked += [text[position:start], "." * (end - start)]
            position = end
        thought = thought_of(opened, "".join((*masked, text[position:])), self.thoughts)
        if thought.unfinished and calls:
            return len(text), "the call stands in a thought that does not end: end the thought, then call"
        return len(text) - len(thought.rest), ""


HERMES = CallFormat("Hermes", opens="<tool_call>", closes="</tool_call>")
HERMES_EXAMPLE = '<tool_call>\n{"name": <function>, "arguments": <arguments>}\n</tool_call>'


def write(content: str, calls: Sequence[ToolCall]) -> str:
    """A turn with its calls in our own words, those of Hermes: for display, and for templates that write no calls."""
    written = [
        f"{HERMES.opens}\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n{HERMES.closes}"
        for call in calls
    ]
    return "\n".join(part for part in (content, *written) if part)


def offer(tools: Sequence[Mapping[str, object]], example: str) -> str:
    """Text after a system message that tells the model which functions there are, and by an example how it calls them;
    for templates that do not.
    """
    return _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools), example=example)


def parse_call(text: str, key: str = "arguments") -> ToolCall:
    """The call that `{"name": ..., "arguments": {...}}` is, or says that it cannot be."""
    try:
        value, end = decoded(text, 0)
    except ValueError as error:
        return ToolCall(name="", problem=f"the call is not valid JSON ({error})")
    if end < len(text.rstrip()):
        return ToolCall(name="", problem=f"the call is not valid JSON (Extra data at character {end})")
    return call_of(value, key)


def call_of(value: object, key: str = "arguments") -> ToolCall:
    """The call that a value of JSON is. Under a key that is not of the form the arguments may stand: a problem."""
    form = f'a call is {{"name": string, "{key}": object}}'
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", problem=form)
    if unknown := sorted(value.keys() - {"name", key} - _BESIDE):
        return ToolCall(name="", problem=f"{form}, without {', '.join(map(json.dumps, unknown))[:200]}")
    return call_with(value["name"], value.get(key, {}), form)


def call_with(name: str, arguments: object, form: str = "the arguments of a call are a JSON object") -> ToolCall:
    """The call of a function with arguments as an object, or as the text of one."""
    if isinstance(arguments, str):
        try:
            arguments, end = decoded(arguments, 0) if arguments.strip() else ({}, 0)
        except ValueError as error:
            return ToolCall(name="", problem=f"the arguments are a text that is not valid JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(name="", problem=form)
    return ToolCall(name=name, arguments=arguments)


def json_at(text: str, start: int, mark: str) -> tuple[object, str, int]:
    """(value, problem, end) of the JSON that begins here and ends before `mark`, which may stand in strings, too."""
    problem, stop = "", start
    # To the next mark only: an error of Python's reader costs as much as the text that it is given.
    for _ in range(1 + _MOST_MARKS):
        stop = text.find(mark, stop)
        piece = text[start:] if stop < 0 else text[start:stop]
        try:
            value, end = decoded(piece, 0)
            return value, "", start + end
        except ValueError as error:
            problem = problem or f"the call is not valid JSON ({error})"
            if stop < 0 or not _ends_in_string(piece):
                break
        stop += len(mark)
    return None, problem, start


def decoded(text: str, start: int) -> tuple[object, int]:
    """(value of JSON that begins here, its end). Raises ValueError for what is none, or is none to keep."""
    begins = _SPACE.match(text, start)
    assert begins is not None
    try:
        value, end = _DECODER.raw_decode(text, begins.end())
        return plain(value), end
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError(str(error)) from error


def kinds_of(tools: Sequence[Mapping[str, object]]) -> Kinds:
    """Of schemas as of the chat completions API; what is no schema is left out."""
    found: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        described = tool.get("function")
        parameters = described.get("parameters") if isinstance(described, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(described, Mapping):
            found[str(described.get("name"))] = properties if isinstance(properties, Mapping) else {}
    return found


def name_of(schema: object) -> str:
    """Of a function, by its JSON schema. Raises ValueError for what is no schema of one."""
    described = schema.get("function") if isinstance(schema, Mapping) else None
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f'a tool is {{"type": "function", "function": {{"name": text, ...}}}}, not {repr(schema)[:200]}'
        )
    return name


def _ends_in_string(text: str) -> bool:
    return any(found[1] is not None for found in _STRING.finditer(text))


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
