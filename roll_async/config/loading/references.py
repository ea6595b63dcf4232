"""`${a.b}`: the value at that path of the merged file."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from roll_async.config.yaml.diagnostics import MAX_DIAGNOSTICS, ConfigError, Diagnostic, shown
from roll_async.config.yaml.node import (
    MAX_DEPTH,
    MAX_STRING_BYTES,
    MAX_VALUES,
    Node,
    Scalar,
    diagnostic,
    find,
    leaves,
    plain,
    type_name,
)
from roll_async.config.yaml.suggest import closest

_TOKEN = re.compile(r"\$\$\{|\$\{[^}]*\}|\$\{")
_NAME = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)*)\}")
_MAX_CHAIN = 64
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class AliasConflict:
    """Two values of one key in one source: they must be equal, which is known once references are resolved."""

    canonical: str
    present: Node
    written: str
    other: Node

    def is_settled(self) -> bool:
        """Both are the same value of the same type: 1 is not true."""
        a, b = plain(self.present), plain(self.other)
        return type(a) is type(b) and a == b

    def conflict(self) -> Diagnostic:
        """C016."""
        message = f"also given as '{self.written}' ({self.other.where}) with another value; keep '{self.canonical}'"
        return diagnostic("C016", self.canonical, self.present, message)


class _Stop(Exception):
    """The current value cannot be resolved; the reason has been added to the errors."""


class _Resolver:
    """Resolves one tree. A resolved value is (node, number of values, height)."""

    def __init__(self, root: Node, moved: Mapping[str, tuple[str, ...]] = {}) -> None:
        self._root, self._moved = root, moved
        self._known: dict[str, tuple[Node, int, int]] = {}
        self._chain: list[str] = []
        self._failed: set[str] = set()
        """Names whose value holds an error that is already reported."""
        self._num_text = 0
        self._names: list[str] | None = None
        self.errors: list[Diagnostic] = []

    def resolve(self, node: Node, path: str, depth: int) -> tuple[Node, int, int]:
        """`node` with every reference below it replaced."""
        if depth > MAX_DEPTH + 1:
            raise self._stop("C010", path, node, f"too large: depth exceeds {MAX_DEPTH}")
        value = node.value
        if isinstance(value, str):
            return self._text(node, value, path, depth) if "${" in value else (node, 1, 0)
        if not isinstance(value, dict | list):
            return node, 1, 0
        items = list(value.items()) if isinstance(value, dict) else [(str(i), v) for i, v in enumerate(value)]
        num, height, resolved = 1, 0, []
        for key, child in items:
            below = self._child(child, f"{path}.{key}" if path else key, depth)
            num, height = num + below[1], max(height, below[2])
            resolved.append(below[0])
            if num > MAX_VALUES:
                raise self._stop("C010", path, node, f"too large: number of values exceeds {MAX_VALUES}")
        if isinstance(value, dict):
            result = Node(dict(zip(value, resolved, strict=True)), node.file, node.line)
        else:
            result = Node(list(resolved), node.file, node.line)
        return result, num, height + 1

    def _child(self, child: Node, path: str, depth: int) -> tuple[Node, int, int]:
        if self._chain:
            return self.resolve(child, path, depth + 1)
        try:
            return self.resolve(child, path, depth + 1)
        except _Stop:  # recorded; go on, so that all errors of the file are reported at once
            return child, 1, 0

    def _text(self, node: Node, text: str, path: str, depth: int) -> tuple[Node, int, int]:
        alone = _NAME.fullmatch(text)
        if alone:
            target, num, height = self._target(alone[1], node, path, depth)
            # A known value was resolved at another depth; from here it may reach too deep.
            if depth + height > MAX_DEPTH + 1:
                raise self._stop("C010", path, node, f"too large: depth exceeds {MAX_DEPTH}")
            return target.at(node.file, node.line), num, height
        parts, end = [], 0
        for token in _TOKEN.finditer(text):
            parts += [text[end : token.start()], self._token(token[0], node, path, depth, text[token.start() :])]
            end = token.end()
        result = "".join([*parts, text[end:]])
        self._num_text += len(result)
        if len(result.encode()) > MAX_STRING_BYTES or self._num_text > _MAX_TEXT:
            what = "string exceeds 64 KiB" if self._num_text <= _MAX_TEXT else "text made of references exceeds 1 MiB"
            raise self._stop("C010", path, node, f"too large: {what}")
        return Node(result, node.file, node.line), 1, 0

    def _token(self, token: str, node: Node, path: str, depth: int, rest: str) -> str:
        if token == "$${":
            return "${"
        name = _NAME.fullmatch(token)
        if name is None:
            raise self._unsupported(token if token != "${" else rest, node, path)
        target = self._target(name[1], node, path, depth)[0]
        if isinstance(target.value, dict | list):
            message = f"expected scalar, got {type_name(target)} {shown(plain(target))}"
            raise self._stop("C003", path, node, message)
        return scalar_text(target.value)

    def _target(self, name: str, node: Node, path: str, depth: int) -> tuple[Node, int, int]:
        """The resolved value at `name`, as seen from the key `path`."""
        name = self._canonical(name)
        if name not in self._known:
            if name in self._failed and name not in self._chain:
                raise _Stop
            self._enter(name, node, path)
            try:
                found = self._walk(name, node, path, depth)
                # Until it is resolved: so it stays there when `resolve` raises.
                self._failed.add(name)
                self._known[name] = self.resolve(found, name, depth)
                self._failed.discard(name)
            finally:
                self._chain.pop()
        return self._known[name]

    def _canonical(self, name: str) -> str:
        """The canonical name of a key; a reference may use the alias under which the key was written."""
        parts = name.split(".")
        # The longest written name first: a key below a renamed section may have a name of its own.
        for end in range(len(parts), 0, -1) if self._moved else ():
            written = ".".join(parts[:end])
            if written in self._moved and find(self._root, parts[:end]) is None:
                return ".".join([self._moved[written][0], *parts[end:]])
        return name

    def _enter(self, name: str, node: Node, path: str) -> None:
        if name in self._chain:
            cycle = " -> ".join([*self._chain[self._chain.index(name) :], name])
            raise self._stop("C012", path, node, f"interpolation cycle: {cycle}")
        if len(self._chain) >= _MAX_CHAIN:
            raise self._stop("C010", path, node, f"too large: chain of references exceeds {_MAX_CHAIN}")
        self._chain.append(name)

    def _walk(self, name: str, node: Node, path: str, depth: int) -> Node:
        """The unresolved node at `name`; references along the path are followed."""
        here, walked = self._root, []
        for key in name.split("."):
            if isinstance(here.value, str) and (alone := _NAME.fullmatch(here.value)):
                here = self._target(alone[1], node, path, depth)[0]
            if not isinstance(here.value, dict) or key not in here.value:
                raise self._unknown(name, node, path)
            here = here.value[key]
            walked.append(key)
        return here

    def _unknown(self, name: str, node: Node, path: str) -> _Stop:
        if self._names is None:
            self._names = [n for n, _ in zip((n for n, _ in written(self._root)), range(1000), strict=False)]
        # Only for the first errors: a search compares the name with all others.
        near = closest(name, [n for n in self._names if n != path]) if len(self.errors) < 20 else None
        assert isinstance(self._root.value, dict)
        top = [*islice(self._root.value, 20), *(["..."] if len(self._root.value) > 20 else [])]
        hint = f"did you mean '{near}'?" if near else f"at its top it has: {', '.join(top)}"
        return self._stop("C011", path, node, f"${{{name}}} names no key of this config; {hint}")

    def _unsupported(self, token: str, node: Node, path: str) -> _Stop:
        return self._stop("C013", path, node, f"'{token[:80]}' is not supported; only ${{dotted.key}} is")

    def _stop(self, id: str, path: str, node: Node, message: str) -> _Stop:
        if len(self.errors) < MAX_DIAGNOSTICS:
            self.errors.append(diagnostic(id, path or "(file)", node, message))
        return _Stop()


def resolve_references(
    root: Node, moved: Mapping[str, tuple[str, ...]] = {}, doubts: Iterable[AliasConflict] = ()
) -> tuple[Node, list[Diagnostic]]:
    """The tree without references and without `vars`, and the doubts that turned out to be conflicts (C016).

    `moved`: keys whose canonical name differs from the name under which they were written. Raises ConfigError with
    every C003 and C010 to C013.
    """
    resolver = _Resolver(root, moved)
    try:
        resolved = resolver.resolve(root, "", 1)[0]
    except _Stop:
        resolved = root
    assert resolved is not root or resolver.errors, "a value that cannot be resolved has its error"
    conflicts = []
    for doubt in doubts if not resolver.errors else ():
        sides = (resolver.resolve(node, doubt.canonical, 1)[0] for node in (doubt.present, doubt.other))
        present, other = sides
        if not AliasConflict(doubt.canonical, present, doubt.written, other).is_settled():
            conflicts.append(doubt.conflict())
    if resolver.errors:
        raise ConfigError(tuple(resolver.errors))
    assert isinstance(resolved.value, dict)
    return Node({k: v for k, v in resolved.value.items() if k != "vars"}, resolved.file, resolved.line), conflicts


def find_resolved(root: Node, path: Sequence[str]) -> Node | None:
    """The value at a path of a tree with references; None if there is none, or its reference cannot be resolved."""
    resolver, here = _Resolver(root), root
    for key in path:
        if not isinstance(here.value, dict) or key not in here.value:
            return None
        here = here.value[key]
        if isinstance(here.value, str) and "${" in here.value:
            try:
                here = resolver.resolve(here, key, 1)[0]
            except _Stop:
                return None
    return here


def written(root: Node) -> list[tuple[str, Node]]:
    """All leaves of the file by dotted path."""
    assert isinstance(root.value, dict)
    return [leaf for key, child in root.value.items() for leaf in leaves(child, key)]


def scalar_text(value: Scalar) -> str:
    """A scalar inside text, as YAML writes it."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"  # Python would write True
        case _:
            return str(value)
