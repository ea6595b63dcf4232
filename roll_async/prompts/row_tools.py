"""What a row says about tools: which ones its prompt may call, and arguments the model does not choose.

tools         ["search"]                                       only these (a column, or in `extra_info`)
tools_kwargs  {"search": {"index": "wiki"}}                    go to the tool with every call, over the model's own
              {"search": {"create_kwargs": {...}, "execute_kwargs": {...}}}    verl's form: both together
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

_PHASES = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
"""verl's phases of a tool; the first two are arguments of a call here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTools:
    """Of one prompt."""

    names: frozenset[str] | None = None
    """Tools it may call; None = all."""
    arguments: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By tool."""

    def allows(self, name: str) -> bool:
        """Whether this prompt may call the tool."""
        return self.names is None or name in self.names

    def completed(self, name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        """The model's arguments with the row's over them."""
        return {**arguments, **self.arguments.get(name, {})}


def tools_of_row(extra: Mapping[str, str]) -> RowTools:
    """Of a prompt's other columns. Raises ValueError for a form that is not one of the above."""
    # Searched as text first: most rows say nothing of tools, and parsing each takes time.
    info = _json(extra, "extra_info") if "tools" in extra.get("extra_info", "") else {}
    values = info if isinstance(info, dict) else {}
    given = {name: _json(extra, name) if name in extra else values.get(name) for name in ("tools", "tools_kwargs")}
    return parse_tools(given["tools"], given["tools_kwargs"])


def parse_tools(names: object, arguments: object) -> RowTools:
    """Of plain values, each None where the row says nothing."""
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"tools must be a list of names, not {names!r}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or not all(isinstance(v, dict) or v is None for v in arguments.values()):
        raise ValueError("tools_kwargs must be {tool: {argument: value}}")
    return RowTools(
        names=None if names is None else frozenset(names),
        arguments={tool: _flat(kwargs or {}) for tool, kwargs in arguments.items()},
    )


def _flat(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Parquet fills a phase that a row lacks with null."""
    if not kwargs or not kwargs.keys() <= set(_PHASES):
        return dict(kwargs)
    found: dict[str, object] = {}
    for phase in _PHASES[:2]:
        part = kwargs.get(phase) or {}
        if not isinstance(part, dict):
            raise ValueError(f"tools_kwargs: {phase} must be {{argument: value}}, not {part!r}")
        found |= part
    return found


def _json(extra: Mapping[str, str], name: str) -> object:
    try:
        return json.loads(extra[name])
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error.msg}") from error
