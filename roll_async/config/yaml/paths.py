"""All keys of a kind of config, to suggest the nearest one to an unknown key."""

import re
from collections.abc import Iterator

from roll_async.config.loading.spec import CHOSEN_CLASSES, FieldSpec, spec_of
from roll_async.config.schema import ROLES
from roll_async.config.schema_worker import STRATEGY_ROLES
from roll_async.config.yaml.suggest import closest

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
"""Free names: domains, environment tags, environment variables."""
METRIC_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./@-]*")
"""A name with the slashes of metrics."""


class PathIndex:
    """Built when the first suggestion is asked for."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._by_name: dict[str, str] = {}

    def close(self, name: str) -> str | None:
        """Path of the key with this name or a near one, in the whole tree."""
        near = closest(name, self._names())
        return self._by_name[near] if near else None

    def _names(self) -> list[str]:
        if not self._by_name:
            for path in keys(self._cls):
                # The first wins: of equal names the key nearest to the top.
                self._by_name.setdefault(path.rpartition(".")[2], path)
        return list(self._by_name)


def keys(cls: type, path: str = "", role: str = "") -> Iterator[str]:
    """Dotted paths of all keys of a section, keys above before keys below."""
    spec = spec_of(cls)
    yield from (f"{path}{name}" for name, field in spec.items() if not field.traits.roles or role in field.traits.roles)
    for name, field in spec.items():
        here = name if not path and name in ROLES else role
        if field.traits.roles and here not in field.traits.roles:
            continue
        for section in _sections(field, here):
            yield from keys(section, f"{path}{name}.", here)


def _sections(field: FieldSpec, role: str) -> Iterator[type]:
    if field.section is not None:
        yield field.section
    elif field.kind == "chosen":
        for name, cls in CHOSEN_CLASSES[field.traits.chosen_by].items():
            if field.traits.chosen_by != "strategy_name" or role in STRATEGY_ROLES[name]:
                yield cls
