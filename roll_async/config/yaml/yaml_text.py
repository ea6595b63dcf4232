"""YAML text to nodes: plain maps, lists and YAML 1.2 core scalars, within limits, with line numbers.

Reads libyaml's events one by one: limits hold before anything is expanded, and a duplicate key is seen.
"""

import math
import re

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.reader import ReaderError

from roll_async.config.yaml.node import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_STRING_BYTES,
    MAX_VALUES,
    Node,
    Scalar,
    refuse,
)

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # in C: several times as fast
_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_DIGITS = 1000
_CORE_TAG = "tag:yaml.org,2002:"


def resolve(text: str) -> Scalar:
    """The value of a plain scalar under the YAML 1.2 core schema, decimal integers only."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    # Never empty here: that is one of the constants.
    if text[0] in "+-.0123456789":
        if _INT.fullmatch(text):
            # Beyond 64 bits it is refused anyway, and Python refuses to convert very long ones.
            return int(text[:_MAX_DIGITS])
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def parse(text: str, file: str, *, in_override: bool = False) -> Node:
    """The one document of `text`. Raises ConfigError at the first problem (C007 to C010)."""
    return _Parser(text, file, in_override).document()


def decode(raw: bytes, file: str) -> str:
    """UTF-8 text of a file of at most 1 MiB. Raises ConfigError (C008, C010)."""
    if len(raw) > MAX_FILE_BYTES:
        raise refuse("C010", "(file)", file, 1, "too large: file exceeds 1 MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise refuse("C008", "(file)", file, line, f"not readable as YAML: not UTF-8 ({error.reason})") from None


class _Parser:
    """One pass over the events of a text."""

    def __init__(self, text: str, file: str, in_override: bool) -> None:
        self._file, self._in_override = file, in_override
        self._num_values = 0
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}
        """Name to node, number of values and height; None while it is open."""
        self._path: list[str] = []
        if "\0" in text:
            raise self._unreadable(text.count("\n", 0, text.index("\0")) + 1, "contains a NUL character")
        try:
            self._loader = _LOADER(text)
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self._unreadable(line, f"{error.reason} (character {error.position + 1})") from None
        # An argument that is not UTF-8 comes with half surrogates.
        except UnicodeEncodeError as error:
            raise self._unreadable(text.count("\n", 0, error.start) + 1, "not UTF-8") from None

    def document(self) -> Node:
        self._next()
        if isinstance(self._next(), StreamEndEvent):
            raise self._unreadable(1, "it is empty")
        root, _ = self._node(self._next(), 1)
        self._next()
        end = self._next()
        if not isinstance(end, StreamEndEvent):
            raise self._unreadable(self._line(end), "it holds two documents")
        return root

    def _next(self) -> yaml.Event:
        try:
            event = self._loader.get_event()
            assert event is not None, "read on after the end of the stream"
            return event
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            problem = " ".join(p for p in (error.context, error.problem) if p)
            raise self._unreadable(line, problem) from None
        except ReaderError as error:
            raise self._unreadable(1, f"{error.reason} (character {error.position + 1})") from None

    def _line(self, event: yaml.Event) -> int:
        return 0 if self._in_override else event.start_mark.line + 1

    def _unreadable(self, line: int, problem: str) -> ValueError:
        return refuse(
            "C008", "(file)", self._file, 0 if self._in_override else line, f"not readable as YAML: {problem}"
        )

    def _refuse(self, id: str, event: yaml.Event, message: str) -> ValueError:
        return refuse(id, ".".join(self._path) or "(file)", self._file, self._line(event), message)

    def _count(self, event: yaml.Event, num: int, depth: int) -> None:
        self._num_values += num
        if self._num_values > MAX_VALUES:
            raise self._refuse("C010", event, f"too large: number of values exceeds {MAX_VALUES}")
        if depth > MAX_DEPTH:
            raise self._refuse("C010", event, f"too large: depth exceeds {MAX_DEPTH}")

    def _node(self, event: yaml.Event, depth: int) -> tuple[Node, int]:
        """The node that starts with `event`, and its height (a scalar has 0)."""
        if isinstance(event, AliasEvent):
            return self._alias(event, depth)
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)
        if event.tag is not None:
            tag = event.tag.replace(_CORE_TAG, "!!", 1)
            raise self._refuse("C009", event, f"YAML tag '{tag}' is not allowed; write plain maps, lists and scalars")
        before = self._num_values
        self._count(event, 1, depth - 1 if isinstance(event, ScalarEvent) else depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, ScalarEvent):
            node, height = Node(self._scalar(event), self._file, self._line(event)), 0
        elif isinstance(event, SequenceStartEvent):
            node, height = self._list(event, depth)
        else:
            node, height = self._map(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, self._num_values - before, height)
        return node, height

    def _alias(self, event: AliasEvent, depth: int) -> tuple[Node, int]:
        if event.anchor not in self._anchors:
            raise self._unreadable(self._line(event), f"undefined alias '{event.anchor}'")
        anchored = self._anchors[event.anchor]
        if anchored is None:
            raise self._refuse(
                "C010", event, f"too large: alias '{event.anchor}' inside itself exceeds {MAX_DEPTH} levels"
            )
        node, num, height = anchored
        # Counted as if written out: a few lines of aliases can stand for billions of values.
        self._count(event, num, depth + height - 1)
        return node.at(self._file, self._line(event)), height

    def _scalar(self, event: ScalarEvent) -> Scalar:
        text = event.value
        # Characters first: they are never more than bytes, and need no copy.
        if len(text) > MAX_STRING_BYTES or len(text.encode()) > MAX_STRING_BYTES:
            raise self._refuse("C010", event, "too large: string exceeds 64 KiB")
        return text if event.style else resolve(text)  # what is quoted is a text

    def _list(self, start: SequenceStartEvent, depth: int) -> tuple[Node, int]:
        items, height = [], 0
        while not isinstance(event := self._next(), CollectionEndEvent):
            self._path.append(str(len(items)))
            item, below = self._node(event, depth + 1)
            self._path.pop()
            items.append(item)
            height = max(height, below)
        return Node(items, self._file, self._line(start)), height + 1

    def _map(self, start: MappingStartEvent, depth: int) -> tuple[Node, int]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        height = 0
        while not isinstance(event := self._next(), CollectionEndEvent):
            key = self._key(event, is_top=depth == 1)
            # Quoted, it is a key like any other.
            is_merge = key == "<<" and isinstance(event, ScalarEvent) and not event.style
            self._path.append(key)
            if key in own:
                a, b = own[key].line, self._line(event)
                message = f"key '{key[:80]}' is given twice (lines {a} and {b}); keep one"
                raise self._refuse("C007", event, message)
            value, below = self._node(self._next(), depth + 1)
            if is_merge:
                for source in self._merge_sources(event, value):
                    merged = {**source, **merged}
            else:
                own[key] = value.at(self._file, self._line(event))
            self._path.pop()
            height = max(height, below)
        # Keys of the map itself win over merged ones, as YAML has it.
        return Node({**merged, **own}, self._file, self._line(start)), height + 1

    def _key(self, event: yaml.Event, *, is_top: bool) -> str:
        """A map key. An anchor on it names a string like any other value. Below the top a whole number is read as its
        text: settings of worlds have such keys, and one error here would hide all others of the file.
        """
        key = self._node(event, 1)[0].value if isinstance(event, ScalarEvent | AliasEvent) else None
        self._num_values -= 1  # keys are not values
        if isinstance(key, int) and not isinstance(key, bool) and not is_top:
            return str(key)
        if not isinstance(key, str):
            what = (
                f"key {event.value[:80]!r} is not a string; quote it"
                if isinstance(event, ScalarEvent)
                else "a key is not a string"
            )
            raise self._unreadable(self._line(event), what)
        return key

    def _merge_sources(self, event: yaml.Event, value: Node) -> list[dict[str, Node]]:
        """The maps of a `<<`, earlier ones first: they win."""
        sources = value.value if isinstance(value.value, list) else [value]
        maps = [source.value for source in sources if isinstance(source.value, dict)]
        if len(maps) != len(sources):
            raise self._unreadable(self._line(event), "'<<' needs a map or a list of maps")
        return maps
