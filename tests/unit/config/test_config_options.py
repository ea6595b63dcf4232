"""Names, fields, defaults and ranges repeated in the config are those of `roll_async.algorithms`."""

import dataclasses
import inspect
from typing import get_args

import pytest

from roll_async.config.api import ConfigError, load
from roll_async.config.fields import RANGES
from roll_async.config.loading.spec import spec_of
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.config.schema_options import (
    ADVANTAGE_OPTIONS,
    AGENTIC_ONLY,
    POLICY_LOSS_OPTIONS,
    CorrectionOptions,
    RejectionRule,
    option_values,
)

PROBES = (-1.0, 0.0, 1e-9, 0.5, 1.0, 1.0000001, 2.0, 1e9)


def choices(name: str) -> tuple[str, ...]:
    return get_args(AlgorithmConfig.__annotations__[name])


def test_choices_of_the_schema_are_the_tables():
    assert set(choices("pg_variant")) == set(POLICY_LOSS_OPTIONS)
    assert set(choices("adv_estimator")) == set(ADVANTAGE_OPTIONS)


def test_losses_are_those_of_the_algorithms():
    options = pytest.importorskip("roll_async.algorithms.policy_loss_options")
    assert set(POLICY_LOSS_OPTIONS) == set(options.POLICY_LOSS_OPTIONS)


@pytest.mark.parametrize("name", POLICY_LOSS_OPTIONS)
def test_options_of_a_loss_have_the_same_fields_defaults_and_ranges(name):
    theirs = pytest.importorskip("roll_async.algorithms.policy_loss_options").POLICY_LOSS_OPTIONS[name]
    mine = POLICY_LOSS_OPTIONS[name]
    assert option_values(mine()) == {f.name: getattr(theirs(), f.name) for f in dataclasses.fields(theirs)}
    assert mine.__name__ == theirs.__name__
    for field, spec in spec_of(mine).items():
        if spec.kind == "choice":
            probes: tuple = (*spec.choices, "nonsense")
        elif spec.kind == "bool":
            probes = (True, False)
        else:
            probes = (*PROBES, None) if spec.nullable else PROBES
        for value in probes:
            assert accepts_mine(mine, field, value) == accepts(theirs, {**neighbours(field), field: value}), (
                field,
                value,
            )


def neighbours(field: str) -> dict[str, float]:
    """The other bound of a pair, far enough away that only the field's own range decides."""
    far = {
        "weight_low": ("weight_high", 1e10),
        "tis_lower_bound": ("tis_upper_bound", 1e10),
        "cov_low": ("cov_high", 1e10),
    }
    near = {
        "weight_high": ("weight_low", 0.0),
        "tis_upper_bound": ("tis_lower_bound", 0.0),
        "cov_high": ("cov_low", -1e10),
    }
    pair = {**far, **near}.get(field)
    return {pair[0]: pair[1]} if pair else {}


def accepts(cls, values: dict) -> bool:
    try:
        cls(**values)
    except ValueError:
        return False
    return True


def accepts_mine(cls: type, field: str, value: object) -> bool:
    spec = spec_of(cls)[field]
    if value is None or spec.kind == "bool":
        return True
    if spec.kind == "choice":
        return value in spec.choices
    assert isinstance(value, float)
    return spec.traits.range is None or RANGES[spec.traits.range](value)


@pytest.mark.parametrize("name", ADVANTAGE_OPTIONS)
def test_options_of_an_estimator_are_its_keyword_arguments(name):
    advantages = pytest.importorskip("roll_async.algorithms.advantages").ADVANTAGES
    assert set(advantages) == set(ADVANTAGE_OPTIONS)
    parameters = list(inspect.signature(advantages[name]).parameters.values())[1:]
    assert option_values(ADVANTAGE_OPTIONS[name]()) == {p.name: p.default for p in parameters}


def test_the_correction_has_the_same_fields_and_defaults():
    correction = pytest.importorskip("roll_async.algorithms.correction")
    for mine, theirs, needed in (
        (CorrectionOptions, correction.CorrectionOptions, {}),
        (RejectionRule, correction.RejectionRule, {"statistic": "k1", "aggregation": "token", "high": 2.0}),
    ):
        ours = {f.name: getattr(mine(**needed), f.name) for f in dataclasses.fields(mine)}
        assert ours == {f.name: getattr(theirs(**needed), f.name) for f in dataclasses.fields(theirs)}
        for field, spec in spec_of(mine).items():
            probes = (*spec.choices, "nonsense") if spec.kind == "choice" else PROBES if spec.kind == "float" else ()
            for value in probes:
                alone = {"weight_upper": None} if field == "weight_lower" else {}
                expected = accepts(
                    theirs, {**needed, **({"high": None} if field == "low" else {}), **alone, field: value}
                )
                assert accepts_mine(mine, field, value) == expected, (field, value)


def test_double_correction_is_refused_by_the_same_table():
    check = pytest.importorskip("roll_async.algorithms.correction").check_no_double_correction
    from roll_async.config.loading.build import carries_behaviour_policy

    for name, cls in POLICY_LOSS_OPTIONS.items():
        for base in spec_of(cls)["ratio_base"].choices:
            refused = not accepts(
                lambda **kw: check(**kw), {"loss_name": name, "ratio_base": base, "weight_level": "token"}
            )
            assert carries_behaviour_policy(cls(ratio_base=base)) == refused, (name, base)
            check(loss_name=name, ratio_base=base, weight_level="none")


@pytest.mark.parametrize("name", POLICY_LOSS_OPTIONS)
def test_every_loss_is_accepted_with_its_options(files, name):
    config = load(files.rlvr({"pg_variant": name, "async_generation_ratio": 1}))
    assert config.algorithm.pg_options == POLICY_LOSS_OPTIONS[name]()


@pytest.mark.parametrize("name", ADVANTAGE_OPTIONS)
def test_every_estimator_is_accepted_with_its_options(files, name):
    edits = {"adv_estimator": name, **({"critic": files.CRITIC} if name == "gae" else {})}
    config = load(files.agentic(edits))
    assert config.algorithm.adv_options == ADVANTAGE_OPTIONS[name]()
    if name in AGENTIC_ONLY:
        with pytest.raises(ConfigError, match="C144"):
            load(files.rlvr(edits))


def test_the_reference_is_fresh():
    from pathlib import Path

    from roll_async.config.reference import reference

    path = Path(__file__).resolve().parents[3] / "docs_roll" / "configuration.md"
    assert path.read_text() == reference(), "python -m roll_async.config.reference > docs_roll/configuration.md"
