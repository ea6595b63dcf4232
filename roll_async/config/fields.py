"""How a field of a config section is declared: default, range, and what the loader must know beyond the type.

    batch_timeout: float = bounded(30.0, "> 0")

The type annotation is the type that code sees after loading. A derived field may be left out or be null in the file;
the loader then fills it from other keys, so the annotation has no `None`.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

RANGES: dict[str, Callable[[float], bool]] = {
    "-1 or >= 1": lambda x: x == -1 or x >= 1,
    "1": lambda x: x == 1,
    ">= 0": lambda x: x >= 0,
    "> 0": lambda x: x > 0,
    ">= 1": lambda x: x >= 1,
    "> 1": lambda x: x > 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
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
    derived: bool = False
    """Null or absent in the file means: filled from other keys."""
    required: bool = False
    roles: tuple[str, ...] = ()
    """Roles the key has an effect on; empty = all."""
    megatron: bool = False
    """The key has an effect on Megatron strategies only."""
    form: str = ""
    """Forms that a type can not express: devices, files (a list or one string), names (keys are free names)."""
    chosen_by: str = ""
    """Name of the sibling whose value picks the class of this section."""


def _declare(default: object, traits: Traits) -> Any:
    return field(default=default, metadata={"traits": traits})


def bounded(default: T, range: str) -> T:
    """A number with a default and a range."""
    return _declare(default, Traits(range=range))


# `Any` below: a field without a default of its own takes the type of its annotation.


def derived(range: str | None = None) -> Any:
    """A value filled in from other keys when the file does not give it."""
    return _declare(None, Traits(range=range, derived=True))


def required(range: str | None = None, form: str = "") -> Any:
    """A value without default."""
    return _declare(MISSING, Traits(range=range, required=True, form=form))


def option(
    default: T, *, roles: tuple[str, ...] = (), megatron: bool = False, form: str = "", range: str | None = None
) -> T:
    """A value with a default and restrictions on where it may stand."""
    return _declare(default, Traits(range=range, roles=roles, megatron=megatron, form=form))


def chosen(by: str) -> Any:
    """A section whose class the sibling `by` picks; starts as that class's defaults."""
    return _declare(MISSING, Traits(chosen_by=by))


def section(factory: Callable[[], T], *, roles: tuple[str, ...] = (), chosen_by: str = "", form: str = "") -> T:
    """A nested section, map or list that starts as `factory()`."""
    traits = Traits(roles=roles, chosen_by=chosen_by, form=form)
    declared: Any = field(default_factory=factory, metadata={"traits": traits})
    return declared
