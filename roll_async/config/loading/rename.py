"""Other names become canonical in each source by itself; then the sources are merged in order.

So the later source wins under every spelling. Only one source that gives a key twice, under two names and
with two values, is an error (C016).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roll_async.config.loading.names import (
    ALGORITHM_FIELDS,
    ALIAS_VALUES,
    LOSS_PREFIXES,
    PG_OPTIONS,
    SGLANG_ALIASES,
    alias_table,
)
from roll_async.config.loading.references import AliasConflict, find_resolved
from roll_async.config.loading.resources import BLOCK_KEYS, BLOCKS
from roll_async.config.loading.spec import CHOSEN_CLASSES, CHOSEN_DEFAULTS, spec_of
from roll_async.config.schema import ROLES
from roll_async.config.yaml.compose import Sources, merge
from roll_async.config.yaml.diagnostics import Diagnostic
from roll_async.config.yaml.node import Node, diagnostic, drop, find, put

_STRATEGY = ("actor_infer", "strategy_args", "strategy_name")
_CHOICES = (
    (("algorithm", "pg_variant"), ("algorithm", "pg_options")),
    (("algorithm", "adv_estimator"), ("algorithm", "adv_options")),
    *(((role, "strategy_args", "strategy_name"), (role, "strategy_args", "strategy_config")) for role in ROLES),
)
"""A key that picks a class, and the section of that class."""


@dataclass(slots=True)
class Composed:
    """One tree of canonical names."""

    root: Node
    errors: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)
    doubts: list[AliasConflict] = field(default_factory=list)
    moved: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Written path to canonical paths: references may name either."""


def compose(sources: Sources, kind: str) -> Composed:
    """All sources of a run of this kind; errors of renaming are in the result."""
    strategy = find_resolved(sources.as_written(), _STRATEGY)
    is_sglang = strategy is not None and strategy.value == "sglang"
    renamed: dict[int, Composed] = {}
    result = Composed(Node({}, sources.files[-1].file, sources.files[-1].line))
    for file in sources.files:
        # A file that is included twice is the same object: its findings are told once.
        if id(file) not in renamed:
            renamed[id(file)] = rename(file, kind, is_sglang)
            _collect(result, renamed[id(file)])
        over = renamed[id(file)].root
        result.root = merge(_make_room(result.root, over), over)
    for path, value in sources.overrides:
        one = rename(put(Node({}, value.file, value.line), path, value), kind, is_sglang)
        _collect(result, one)
        result.root = _make_room(result.root, one.root)
        for target in (path, *_places(path, one.moved)):
            if (node := find(one.root, target)) is not None:
                result.root = put(result.root, target, node)
    return result


def _places(path: tuple[str, ...], moved: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Where an override at `path` went. One key of a section under another name is that key alone, so that the others
    of the section stay as they are.
    """
    for written, targets in moved.items():
        name = tuple(written.split("."))
        rest = path[len(name) :] if path[: len(name)] == name else ()
        for target in targets:
            yield (*target.split("."), *rest)


def _collect(result: Composed, one: Composed) -> None:
    result.errors += one.errors
    result.warnings += one.warnings
    result.doubts += one.doubts
    result.moved |= one.moved


def rename(root: Node, kind: str, is_sglang: bool) -> Composed:
    """One source under canonical names."""
    result = Composed(root)
    for written, targets in _table(root, kind, is_sglang).items():
        if (node := find(result.root, written.split("."))) is not None:
            _move(result, written, targets, node, warn=True)
    assert isinstance(result.root.value, dict)
    for name in [name for name in result.root.value if name in ALGORITHM_FIELDS]:
        _move(result, name, (f"algorithm.{name}",), result.root.value[name], warn=False)
    return result


def _table(root: Node, kind: str, is_sglang: bool) -> dict[str, tuple[str, ...]]:
    """Names of the source that may have to move, to the canonical ones."""
    table = alias_table(kind)
    own = find(root, _STRATEGY)
    if own.value == "sglang" if own is not None else is_sglang:
        table |= SGLANG_ALIASES
    for place in ("", "actor_train"):
        section = find(root, (place,)) if place else root
        for name in section.value if section is not None and isinstance(section.value, dict) else ():
            if name.startswith(LOSS_PREFIXES):
                table[f"{place}.{name}" if place else name] = (f"{PG_OPTIONS}.{name}",)
    return table


def _move(result: Composed, written: str, targets: tuple[str, ...], node: Node, *, warn: bool) -> None:
    result.root = drop(result.root, written.split("."))
    result.moved[written] = targets
    if isinstance(node.value, bool) and written in ALIAS_VALUES:
        node = Node(ALIAS_VALUES[written][node.value], node.file, node.line)
    for target in targets:
        if warn:
            message = f"'{written}' is another name of '{target}'"
            result.warnings.append(diagnostic("W01", target, node, message))
        _place(result, written, target.split("."), node)


def _place(result: Composed, written: str, target: Sequence[str], node: Node) -> None:
    """Put `node` at its canonical place; maps that are already there are joined key by key."""
    for depth in range(1, len(target)):
        above = find(result.root, target[:depth])
        # KEY=null took the section out; a key below it begins it anew.
        is_cleared = above is not None and above.value is None and above.from_override
        if above is not None and not isinstance(above.value, dict) and not is_cleared:
            return  # the section itself has the wrong type, which the check reports
    present = find(result.root, target)
    if present is None:
        result.root = put(result.root, target, node)
    elif isinstance(present.value, dict) and isinstance(node.value, dict):
        for key, child in node.value.items():
            _place(result, f"{written}.{key}", [*target, key], child)
    else:
        doubt = AliasConflict(".".join(target), present, written, node)
        if any(isinstance(n.value, str) and "${" in n.value for n in (present, node)):
            result.doubts.append(doubt)
        elif not doubt.is_settled():
            result.errors.append(doubt.conflict())


def _make_room(base: Node, over: Node) -> Node:
    """`base` without what `over` makes meaningless: options of a choice that it changes, and devices that it gives in
    another form.
    """
    for chooser, section in _CHOICES:
        base = _without_old_options(base, over, chooser, section)
    for block, role in BLOCKS.items():
        other = find(over, (block,))
        if other is not None and isinstance(other.value, dict) and BLOCK_KEYS & set(other.value):
            base = _without(base, ((role, "device_mapping"), (role, "world_size")))
        if any(find(over, (role, key)) is not None for key in ("device_mapping", "world_size")):
            base = _without(base, ((block, key) for key in sorted(BLOCK_KEYS)))
    return base


def _without(base: Node, paths: "Iterator[tuple[str, ...]] | tuple[tuple[str, ...], ...]") -> Node:
    for path in paths:
        if find(base, path) is not None:
            base = drop(base, path)
    return base


def _without_old_options(base: Node, over: Node, chooser: tuple[str, ...], section: tuple[str, ...]) -> Node:
    """Without the options that belonged to the choice before. What does not belong to that choice stays: it was
    written for the new one.
    """
    chosen, options = find(over, chooser), find(base, section)
    if chosen is None or options is None:
        return base
    classes, default = CHOSEN_CLASSES[chooser[-1]], CHOSEN_DEFAULTS.get(chooser[-1])
    before = find(base, chooser)
    old = default if before is None or before.value is None else before.value
    new = default if chosen.value is None else chosen.value
    if old == new:
        return base
    if not isinstance(options.value, dict):
        return drop(base, section)
    if isinstance(old, str) and old in classes:
        gone = set(spec_of(classes[old]))
    else:
        gone = set(options.value) - set(spec_of(classes[new]) if isinstance(new, str) and new in classes else ())
    return _without(base, ((*section, key) for key in options.value if key in gone))
