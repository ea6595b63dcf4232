"""How a field of a config section is declared: default, range, and what the loader must know beyond the type.

    batch_timeout: float = bounded(30.0, "> 0")

The type annotation is the type that code sees after loading. A derived field may be left out or be null in the file;
the loader then fills it from other keys, so the annotation has no `None`.
"""

import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RANGES: dict[str, Callable[[float], bool]] = {
    "-1 or >= 1": lambda x: x == -1 or x >= 1,
    "0 or in [0.0001, 10000]": lambda x: x == 0 or 1e-4 <= x <= 1e4,
    "1": lambda x: x == 1,
    ">= 0": lambda x: x >= 0,
    "> 0": lambda x: x > 0,
    ">= 1": lambda x: x >= 1,
    "> 1": lambda x: x > 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 0.5)": lambda x: 0 <= x < 0.5,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "in [1, 65535]": lambda x: 1 <= x <= 65535,
}
"""Constraint text, as errors print it, to its test. Values are already known to be finite numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the loader must know about a field beyond its type; kept in the field's metadata under `traits`."""

    range: str | None = None
    """Key of `RANGES`; for a list, of each item."""
    choices: tuple[str, ...] = ()
    """Allowed values of a str field, where a table and not the type defines them."""
    derived: bool = False
    """Null or absent in the file means: filled from other keys."""
    required: bool = False
    roles: tuple[str, ...] = ()
    """Roles the key has an effect on; empty = all."""
    megatron: bool = False
    """The key has an effect on Megatron strategies only."""
    form: str = ""
    """Forms that a type can not express: devices, files (a list or one string), one or more (a list or one item), names
    (keys are free names), own code (a choice, or the dotted path of a user's function).
    """
    chosen_by: str = ""
    """Name of the sibling whose value picks the class of this section."""
    at_most: str = ""
    """Name of the sibling that this value must not exceed."""
    less_than: str = ""
    """Name of the sibling that this value must stay below."""


def _declare(default: object, traits: Traits) -> Any:
    return field(default=default, metadata={"traits": traits})


def bounded(default: T, range: str | None = None, *, at_most: str = "", less_than: str = "") -> T:
    """A number with a default and a range; `at_most` and `less_than` name a sibling that bounds it."""
    return _declare(default, Traits(range=range, at_most=at_most, less_than=less_than))


# `Any` below: a field without a default takes the type of its annotation.


def derived(range: str | None = None) -> Any:
    """A value filled in from other keys when the file does not give it."""
    return _declare(None, Traits(range=range, derived=True))


def required(range: str | None = None, form: str = "") -> Any:
    """A value without default."""
    return _declare(MISSING, Traits(range=range, required=True, form=form))


def option(
    default: T,
    *,
    roles: tuple[str, ...] = (),
    megatron: bool = False,
    form: str = "",
    range: str | None = None,
    choices: tuple[str, ...] = (),
) -> T:
    """A field with a default, and restrictions on its values and on the roles that may have it."""
    return _declare(default, Traits(range=range, roles=roles, megatron=megatron, form=form, choices=choices))


def chosen(by: str) -> Any:
    """A section whose class the sibling `by` picks; starts as that class's defaults."""
    return _declare(MISSING, Traits(chosen_by=by))


def section(factory: Callable[[], T], *, roles: tuple[str, ...] = (), chosen_by: str = "", form: str = "") -> T:
    """A nested section, map or list that starts as `factory()`."""
    traits = Traits(roles=roles, chosen_by=chosen_by, form=form)
    declared: Any = field(default_factory=factory, metadata={"traits": traits})
    return declared


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """A section that other folders also build directly: it checks itself, with the ranges that the loader checks.

    Raises ValueError with class, field, value and range.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value, traits = getattr(self, f.name), f.metadata.get("traits", Traits())
            choices, is_nullable = _choices(f.type)
            if isinstance(value, float) and not math.isfinite(value):
                self.refuse(f.name, "a finite number")
            if choices and value not in choices:
                self.refuse(f.name, f"one of {' | '.join(map(str, choices))}")
            if traits.range is not None and not (is_nullable if value is None else RANGES[traits.range](value)):
                self.refuse(f.name, f"{'null or ' if is_nullable else ''}{traits.range}")
        for name, constraint in contradictions(type(self), {f.name: getattr(self, f.name) for f in fields(self)}):
            self.refuse(name, constraint)

    def refuse(self, name: str, constraint: str) -> None:
        """Raise ValueError for a field."""
        raise ValueError(f"{type(self).__name__}.{name} = {getattr(self, name)!r}; must be {constraint}")

    @classmethod
    def further_contradictions(cls, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """(field, constraint) of a class's own rules between its fields."""
        yield from ()


def contradictions(cls: type[Options], values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(field, constraint) of fields that are fine alone and contradict a sibling. `values`: every field."""
    for f in fields(cls):
        traits, low = f.metadata.get("traits", Traits()), values[f.name]
        high = values.get(traits.at_most or traits.less_than)
        if not isinstance(low, int | float) or not isinstance(high, int | float):
            continue
        if traits.at_most and low > high:
            yield f.name, f"<= {traits.at_most} {high!r}"
        elif traits.less_than and low >= high:
            yield f.name, f"< {traits.less_than} {high!r}"
    yield from cls.further_contradictions(values)


def _choices(annotation: object) -> tuple[tuple[object, ...], bool]:
    """(values of a Literal, whether None is allowed)."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    literal = next((part for part in parts if typing.get_origin(part) is Literal), None)
    return typing.get_args(literal) if literal is not None else (), types.NoneType in parts
