"""The files and overrides of a run, in the order in which later wins: includes, KEY=VALUE."""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll_async.config.secrets import shown_override
from roll_async.config.yaml.diagnostics import ConfigError, Diagnostic, shown
from roll_async.config.yaml.node import MAX_FILE_BYTES, Node, plain, put, refuse, type_name
from roll_async.config.yaml.yaml_text import decode, parse

SHIPPED = (Path(__file__).resolve().parents[2] / "shipped" / "configs").resolve()
"""The configs that come with the package, whose names are found from every folder. In a checkout `shipped/` holds links
to its folders, in a wheel copies.
"""
CHECKOUT = SHIPPED.parent
"""What shipped configs name is looked for here too: of an installed package it is `shipped/`, with the examples."""
OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=")
_MAX_INCLUDE_DEPTH = 8
_MAX_INCLUDES = 1000
"""Files read for one config; files that include one another several times would otherwise grow exponentially."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Everything that is written about one run, in the order in which later wins."""

    files: tuple[Node, ...]
    """Includes before what includes them, as `_self_` says; `vars` is still in them, `defaults` is not."""
    overrides: tuple[tuple[tuple[str, ...], Node], ...]
    """(path, value) of each KEY=VALUE."""

    def as_written(self) -> Node:
        """All of it merged under the names that were written."""
        root = self.files[0]
        for file in self.files[1:]:
            root = merge(root, file)
        for path, value in self.overrides:
            root = put(root, path, value)
        return root


def read_sources(path: Path, overrides: Sequence[str], missing: list[str] | None = None) -> Sources:
    """The file with its includes, and the overrides. Raises ConfigError; with a list `missing`, names of includes that
    are not there, or are empty, are added to it instead.
    """
    files = tuple(_Reader(missing=missing).read(path, ()))
    return Sources(files=files, overrides=_parsed(overrides))


@dataclass(kw_only=True, slots=True)
class _Reader:
    """Reads a file with its includes."""

    parsed: dict[str, Node] = field(default_factory=dict)
    own: dict[str, Node] = field(default_factory=dict)
    """Files without their `defaults`; a file that is included twice is the same object."""
    num_includes: int = 0
    missing: list[str] | None = None
    """Includes that were not found or are empty, if they may be missing."""

    def read(self, path: Path, chain: tuple[str, ...]) -> list[Node]:
        """The file and its includes in the order of merging. `chain`: the files that led here."""
        key = os.path.abspath(path)
        if key not in self.parsed:
            self.parsed[key] = _parse_file(path)
        root = self.parsed[key]
        assert isinstance(root.value, dict)
        if key not in self.own:
            self.own[key] = Node({k: v for k, v in root.value.items() if k != "defaults"}, root.file, root.line)
        own = self.own[key]
        if "defaults" not in root.value:
            return [own]
        result: list[Node] = []
        for index, name in enumerate(_include_names(root.value["defaults"])):
            place = root.value["defaults"]
            assert isinstance(place.value, list)
            # A `_self_` that nobody wrote has no place of its own.
            item = place.value[index] if index < len(place.value) else place
            result += [own] if name == "_self_" else self._include(path, name, index, item, (*chain, key))
        return result

    def _include(self, path: Path, name: str, index: int, item: Node, chain: tuple[str, ...]) -> list[Node]:
        def refused(why: str) -> ConfigError:
            return refuse("C014", f"defaults.{index}", item.file, item.line, f"cannot include '{name}': {why}")

        target = name.removesuffix("@_here_").strip()
        beside = found = _existing(Path(os.path.normpath(path.parent / target)))
        if os.sep not in target and (beside is None or _same(beside, path)):  # it may be called like the shipped one
            found = _existing(SHIPPED / target) or beside
        if found is None or (self.missing is not None and _is_empty(found)):
            if self.missing is None:
                raise refused("not found")
            self.missing.append(name)
            return []
        key = os.path.abspath(found)
        if key in chain:
            cycle = [*chain[chain.index(key) :], key]
            raise refused(f"cycle {' -> '.join(os.path.basename(c) for c in cycle)}")
        if not stat.S_ISREG(os.stat(found).st_mode):
            raise refused("not a regular file")
        if len(chain) > _MAX_INCLUDE_DEPTH:
            raise refused(f"more than {_MAX_INCLUDE_DEPTH} levels deep")
        self.num_includes += 1
        if self.num_includes > _MAX_INCLUDES:
            message = f"too large: number of includes exceeds {_MAX_INCLUDES}"
            raise refuse("C010", f"defaults.{index}", item.file, item.line, message)
        return self.read(found, chain)


def _same(file: Path, other: Path) -> bool:
    return os.path.abspath(file) == os.path.abspath(other)


def _is_empty(file: Path) -> bool:
    return file.is_file() and file.stat().st_size == 0


def _existing(target: Path) -> Path | None:
    """The file as named or with `.yaml`; anything but a regular file only if no regular file exists."""
    other = None
    for candidate in (target, target.with_name(target.name + ".yaml")) if target.name else ():
        try:
            is_regular = stat.S_ISREG(os.stat(candidate).st_mode)
        except (OSError, ValueError):  # not there, or a name no file can have
            continue
        if is_regular:
            return candidate
        other = other or candidate
    return other


def _include_names(defaults: Node) -> list[str]:
    """Names in order, with `_self_`, last if absent."""
    names = []
    if not isinstance(defaults.value, list):
        message = f"expected list, got {type_name(defaults)} {shown(plain(defaults))}"
        raise refuse("C003", "defaults", defaults.file, defaults.line, message)
    for index, item in enumerate(defaults.value):
        if not isinstance(item.value, str):
            message = f"expected str, got {type_name(item)} {shown(plain(item))}"
            raise refuse("C003", f"defaults.{index}", item.file, item.line, message)
        if item.value == "_self_" and "_self_" in names:
            raise refuse("C014", f"defaults.{index}", item.file, item.line, "cannot include '_self_': given twice")
        names.append(item.value)
    return names if "_self_" in names else [*names, "_self_"]


def _parse_file(path: Path) -> Node:
    file = str(path)
    if "\0" in file:
        raise refuse("C008", "(file)", file, 1, "not readable as YAML: no such file")
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
        # To open a pipe would wait for its writer.
        with open(path if is_regular else os.devnull, "rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)  # one more, so that `decode` sees what is too long
    except OSError as error:
        raise refuse("C008", "(file)", file, 1, f"not readable as YAML: {error.strerror}") from None
    if not is_regular:
        raise refuse("C008", "(file)", file, 1, "not readable as YAML: not a file")
    root = parse(decode(raw, file), file)
    if not isinstance(root.value, dict):
        raise refuse("C008", "(file)", file, root.line, f"not readable as YAML: {_not_a_map(root)}")
    return root


def _not_a_map(root: Node) -> str:
    return "it is empty" if root.value is None else f"the top is a {type_name(root)}, not a map"


def merge(base: Node, over: Node) -> Node:
    """Maps merge by key; everything else is replaced by the later value."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    children = dict(base.value)
    for key, node in over.value.items():
        children[key] = merge(children[key], node) if key in children else node
    return Node(children, over.file, over.line)


def _parsed(overrides: Sequence[str]) -> tuple[tuple[tuple[str, ...], Node], ...]:
    """`a.b.c=VALUE` to path and value. Raises ConfigError with every override that cannot be read."""
    errors: list[Diagnostic] = []
    parsed = []
    for text in overrides:
        place = f"<override {shown_override(text)}>"
        key, separator, value = text.partition("=")
        message = "expected KEY=VALUE"
        if separator and not value.strip():
            message += "; use KEY=null to clear"
        if key == "defaults":
            message = "expected KEY=VALUE; defaults are read from files only"
        if not OVERRIDE.match(text) or not value.strip() or "" in key.split(".") or key == "defaults":
            errors.append(Diagnostic(id="C015", key=key or "(file)", file=place, line=0, message=message))
            continue
        try:
            parsed.append((tuple(key.split(".")), parse(value, place, in_override=True)))
        except ConfigError as error:
            errors += error.diagnostics
    if errors:
        raise ConfigError(tuple(errors))
    return tuple(parsed)
