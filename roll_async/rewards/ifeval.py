"""Instruction following: which of the stated constraints a response keeps."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass

from roll_async.rewards.answers import after_thinking
from roll_async.rewards.constraints import CONSTRAINTS, compare
from roll_async.rewards.ifeval_readings import READINGS
from roll_async.rewards.language import known_language
from roll_async.rewards.verdict import Verdict

_FORMS = {"int": "a whole number", "str": "a text", "Sequence[str]": "a list of texts"}
"""By the annotations of constraints."""


@dataclass(frozen=True, slots=True)
class _Constraint:
    kind: str
    arguments: Mapping[str, object]


class InstructionFollowing:
    """Score = share of the constraints that hold for what follows the thinking; `acc` = 1 iff all hold, as IFEval reads
    them.

    The reference is JSON in one of three forms; IFEval's own columns in `extra` are read when it has none:

        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        [{"instruction_id": ["keywords:frequency"], "kwargs": [{"keyword": "sea", "frequency": 2}]}]
        {"kind": "length_constraints:number_words", "num_words": 50, "relation": "less than"}    (or a list of these)

    Raises ValueError for a kind or an argument that is not known.
    """

    readings = READINGS

    def __call__(self, text: str, ground_truth: str, extra: Mapping[str, str]) -> Verdict:
        constraints = parse_constraints(ground_truth, extra)
        answer = after_thinking(text).strip()
        # An empty response would keep every constraint that forbids something.
        kept = [bool(answer) and self.readings[c.kind](answer, **c.arguments) for c in constraints]
        broken = [c.kind for c, ok in zip(constraints, kept, strict=True) if not ok]
        return Verdict(
            score=sum(kept) / len(kept),
            acc=float(all(kept)),
            format=float(bool(answer)),
            reason="" if not broken else f"not kept: {', '.join(broken)}",
            metrics={"constraints": float(len(kept))},
        )


class StrictInstructionFollowing(InstructionFollowing):
    """The same with each constraint read as it is written: whole words, bullets with a space, real sections."""

    readings = CONSTRAINTS


def parse_constraints(ground_truth: str, extra: Mapping[str, str]) -> list[_Constraint]:
    """The constraints of a row. Raises ValueError naming what is not known."""
    found = _json(ground_truth) if ground_truth.strip()[:1] in ("[", "{") else None
    if found is None and "instruction_id_list" in extra:
        found = {"instruction_id_list": _json(extra["instruction_id_list"]), "kwargs": _json(extra.get("kwargs", "[]"))}
    if found is None:
        raise ValueError(f"the reference {ground_truth[:80]!r} holds no constraints")
    constraints = [c for item in (found if isinstance(found, list) else [found]) for c in _of(item)]
    if not constraints:
        raise ValueError("the reference holds no constraints")
    return constraints


def _of(item: object) -> list[_Constraint]:
    if not isinstance(item, dict):
        raise ValueError(f"a constraint must be an object, got {type(item).__name__}")
    if "kind" in item:
        return [_checked(item["kind"], {k: v for k, v in item.items() if k != "kind"})]
    kinds = item.get("instruction_id_list", item.get("instruction_id"))
    if not isinstance(kinds, list):
        raise ValueError(f"a constraint needs 'kind' or 'instruction_id_list'; it has {', '.join(map(str, item))}")
    arguments = item.get("kwargs") or [{}] * len(kinds)
    if not isinstance(arguments, list):
        raise ValueError(f"kwargs must be a list, got {type(arguments).__name__}")
    if len(arguments) != len(kinds):
        raise ValueError(f"{len(kinds)} constraints and {len(arguments)} kwargs")
    return [_checked(kind, values or {}) for kind, values in zip(kinds, arguments, strict=True)]


def _checked(kind: object, values: object) -> _Constraint:
    if not isinstance(kind, str) or kind not in CONSTRAINTS:
        raise ValueError(f"constraint {kind!r} is not one of {' | '.join(CONSTRAINTS)}")
    if not isinstance(values, Mapping):
        raise ValueError(f"the kwargs of {kind!r} must be an object, got {type(values).__name__}")
    parameters = list(inspect.signature(CONSTRAINTS[kind]).parameters.values())[1:]
    # Data sets in columns carry the arguments of all kinds in every row, null where they do not apply.
    given = {k: v for k, v in values.items() if v is not None}
    needed = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    if not needed <= given.keys():
        raise ValueError(f"constraint {kind!r} needs {', '.join(sorted(needed - given.keys()))}")
    return _Constraint(kind, {p.name: _argument(kind, p, given[p.name]) for p in parameters if p.name in given})


def _argument(kind: str, parameter: inspect.Parameter, value: object) -> object:
    """Raises ValueError for another type than the parameter's, an unknown relation or language."""
    name, annotation = parameter.name, parameter.annotation
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # of a column with nulls
    items = value if annotation == "Sequence[str]" else [value]
    wanted = int if annotation == "int" else str
    if not isinstance(items, list | tuple) or not all(type(item) is wanted for item in items):
        raise ValueError(f"constraint {kind!r}: {name} must be {_FORMS[annotation]}, got {value!r:.60}")
    if name.endswith("relation"):
        compare(0, str(value), 0)
    if name == "language":
        known_language(str(value))
    return value


def _json(text: str) -> object:
    """JSON, or the Python literal some data sets hold instead. It is the data set's text, not the model's."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r} is neither JSON nor a Python literal") from error
