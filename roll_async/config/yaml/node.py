"""A parsed value and the place it was written."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from roll_async.config.yaml.diagnostics import ConfigError, Diagnostic

Scalar: TypeAlias = str | int | float | bool | None
Plain: TypeAlias = "Scalar | list[Plain] | dict[str, Plain]"

MAX_FILE_BYTES = 1 << 20
MAX_STRING_BYTES = 64 << 10
MAX_VALUES = 100_000
MAX_DEPTH = 32


class Node:
    """Shared freely between trees, hence never changed."""

    __slots__ = ("file", "line", "value")

    def __init__(self, value: "Scalar | list[Node] | dict[str, Node]", file: str, line: int) -> None:
        self.value = value
        self.file = file
        self.line = line

    def at(self, file: str, line: int) -> "Node":
        """The same value written elsewhere."""
        return Node(self.value, file, line)

    @property
    def where(self) -> str:
        """FILE:LINE, or the override."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def from_override(self) -> bool:
        """Whether a KEY=VALUE argument set it."""
        return self.line == 0


def plain(node: Node) -> Plain:
    """The value without places."""
    value = node.value
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    return value


def find(root: Node, path: Sequence[str]) -> Node | None:
    """The node at a path of map keys, None if it is not there."""
    node: Node | None = root
    for key in path:
        if node is None or not isinstance(node.value, dict):
            return None
        node = node.value.get(key)
    return node


def nearest(root: Node, path: Sequence[str]) -> Node:
    """The node at a path, or the deepest written section above it. List items count as keys."""
    node = root
    for key in path:
        value = node.value
        if isinstance(value, dict) and key in value:
            node = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):  # isdigit() takes superscripts, too
            node = value[int(key)]
        else:
            break
    return node


def put(root: Node, path: Sequence[str], new: Node) -> Node:
    """The tree with `new` at a path of map keys; a value on the path that is no map is replaced by a map."""
    if not path:
        return new
    children = root.value if isinstance(root.value, dict) else {}
    below = children.get(path[0]) or Node({}, new.file, new.line)
    if not isinstance(below.value, dict) and len(path) > 1:
        below = Node({}, new.file, new.line)
    return Node({**children, path[0]: put(below, path[1:], new)}, root.file, root.line)


def drop(root: Node, path: Sequence[str]) -> Node:
    """The tree without the key at a path that exists; maps that become empty are removed, too."""
    assert isinstance(root.value, dict)
    children = dict(root.value)
    if len(path) == 1:
        del children[path[0]]
    else:
        below = drop(children[path[0]], path[1:])
        if below.value:
            children[path[0]] = below
        else:
            del children[path[0]]
    return Node(children, root.file, root.line)


def leaves(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """All leaves below the node (values that are no maps), with their dotted paths."""
    if isinstance(node.value, dict) and node.value:
        for key, child in node.value.items():
            yield from leaves(child, f"{path}.{key}")
    else:
        yield path, node


def diagnostic(id: str, key: str, node: Node, message: str) -> Diagnostic:
    """A problem at the place of a node."""
    return Diagnostic(id=id, key=key, file=node.file, line=node.line, message=message)


def refuse(id: str, key: str, file: str, line: int, message: str) -> ConfigError:
    """An error that ends its phase at once."""
    return ConfigError((Diagnostic(id=id, key=key, file=file, line=line, message=message),))


def type_name(node: Node) -> str:
    """Name of a value's type in messages."""
    value = node.value
    match value:
        case None:
            return "null"
        case dict():
            return "map"
        case _:
            return type(value).__name__
