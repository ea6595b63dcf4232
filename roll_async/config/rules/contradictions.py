"""Options that are fine alone and contradict a sibling: C150, and C005 and C006 where a bound depends on another.

They are taken out of the values before the config is built, because an options object that contradicts itself cannot
exist; every other rule then still runs.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields

from roll_async.config.fields import Options, Traits, contradictions
from roll_async.config.options.advantage_options import advantage_options_class
from roll_async.config.options.correction_options import CorrectionOptions, RejectionRule
from roll_async.config.options.policy_loss_options import loss_options_class
from roll_async.config.rules.shape import number

Finding = tuple[str, str, str]
"""(id, key, message)."""


def without_contradictions(values: dict) -> tuple[dict, list[Finding]]:
    """The checked values of a file without the options that contradict one another, and what was found."""
    algorithm, found = dict(values.get("algorithm") or {}), []
    for section, cls in _sections(algorithm):
        if algorithm.get(section):
            algorithm[section] = _checked(cls, algorithm[section], f"algorithm.{section}", found)
    correction = dict(algorithm.get("correction") or {})
    if correction.get("rejections"):
        kept = []
        for index, rule in enumerate(correction["rejections"]):
            before = len(found)
            _checked(RejectionRule, rule, f"algorithm.correction.rejections.{index}", found)
            if len(found) == before:
                kept.append(rule)
        algorithm["correction"] = {**correction, "rejections": kept}
    return ({**values, "algorithm": algorithm}, found) if found else (values, found)


def _sections(algorithm: Mapping) -> tuple[tuple[str, type[Options]], ...]:
    return (
        ("pg_options", loss_options_class(algorithm.get("pg_variant", "ppo"))),
        ("adv_options", advantage_options_class(algorithm.get("adv_estimator", "grpo"))),
        ("correction", CorrectionOptions),
    )


def _checked(cls: type[Options], given: dict, key: str, found: list[Finding]) -> dict:
    """`given` without the fields that contradict another one; both sides of a pair go."""
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(cls)}
    full, left = {**defaults, **given}, dict(given)
    for name, constraint in contradictions(cls, full):
        traits = next(f.metadata.get("traits", Traits()) for f in fields(cls) if f.name == name)
        found.append(_finding(key, name, constraint, full, traits))
        for side in (name, traits.at_most, traits.less_than):
            left.pop(side, None)
    return left


def _finding(key: str, name: str, constraint: str, values: Mapping, traits: Traits) -> Finding:
    low, high = values[name], values.get(traits.at_most or traits.less_than)
    if low is None:
        return "C006", f"{key}.{name}", "required and not set; a rule needs a bound"
    if high is None or low <= high and not traits.less_than:
        return "C005", f"{key}.{name}", f"{number(low)} must be {constraint}"
    if low == high:
        return "C005", f"{key}.{name}", f"{number(low)} must be < {traits.less_than} {number(high)}"
    return "C150", key, f"{number(low)} exceeds {number(high)}"
