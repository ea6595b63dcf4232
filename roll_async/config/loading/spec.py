"""The dataclasses of the schema as the checker sees them: per field its kind of value, item, choices and traits."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Literal

from roll_async.config.fields import Traits
from roll_async.config.options.advantage_options import ADVANTAGE_OPTIONS, OwnAdvantageOptions
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS, OwnLossOptions
from roll_async.config.schema_worker import STRATEGIES

CHOSEN_CLASSES: dict[str, dict[str, type]] = {
    "strategy_name": STRATEGIES,
    "pg_variant": POLICY_LOSS_OPTIONS,
    "adv_estimator": ADVANTAGE_OPTIONS,
}
"""Field that picks a class, to its classes by value."""
OWN_CLASSES: dict[str, type] = {"pg_variant": OwnLossOptions, "adv_estimator": OwnAdvantageOptions}
"""Field that may name a user's own code, to the class of its options."""
CHOSEN_DEFAULTS = {"pg_variant": "ppo", "adv_estimator": "grpo"}
"""Its value where none is written."""

_PLAIN_TRAITS = Traits()


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One key."""

    name: str
    kind: str
    """int, float, str, bool, choice, list, map, section, chosen, any."""
    item: "FieldSpec | None" = None
    """Of a list or map."""
    section: type | None = None
    other: type | None = None
    """Another section that may stand there; it is where its first key is written, or no key of `section`."""
    choices: tuple[str | int, ...] = ()
    nullable: bool
    required: bool
    default: object
    """MISSING for sections and derived values."""
    traits: Traits


@cache
def spec_of(cls: type) -> dict[str, FieldSpec]:
    """Fields of a section by name, in the order of declaration."""
    return {f.name: _field(f) for f in fields(cls)}


def _field(f: Field) -> FieldSpec:
    traits = f.metadata.get("traits", _PLAIN_TRAITS)
    required = f.default is MISSING and f.default_factory is MISSING and not traits.chosen_by
    default = MISSING if traits.derived else f.default
    return _spec(f.name, f.type, traits, required, default)


def _spec(name: str, annotation: object, traits: Traits, required: bool, default: object) -> FieldSpec:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    options = typing.get_args(annotation) if is_union else (annotation,)
    inner = [a for a in options if a is not types.NoneType]
    nullable = len(inner) < len(options) or traits.derived
    kind, item, section, choices = "chosen", None, None, ()
    if not traits.chosen_by:
        kind, item, section, choices = _kind(name, inner[0], traits)
    return FieldSpec(
        name=name, kind=kind, item=item, section=section, choices=choices, nullable=nullable, required=required,
        default=default, traits=traits, other=typing.cast(type, inner[1]) if section and len(inner) > 1 else None,
    )  # fmt: skip


def _kind(name: str, annotation: object, traits: Traits) -> tuple[str, FieldSpec | None, type | None, tuple]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if traits.form in ("devices", "files"):
        return traits.form, None, None, ()
    if traits.choices:
        return "choice", None, None, traits.choices
    if origin is Literal:
        return "choice", None, None, args
    below = Traits(range=traits.range)
    if origin is tuple:
        return "list", _spec(name, args[0], below, True, MISSING), None, ()
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if args[1] is object:
            return "any", None, None, ()
        return "map", _spec(name, args[1], below, True, MISSING), None, ()
    if is_dataclass(annotation):
        return "section", None, typing.cast(type, annotation), ()
    assert annotation in (int, float, str, bool), f"{name}: {annotation}"
    return typing.cast(type, annotation).__name__, None, None, ()
