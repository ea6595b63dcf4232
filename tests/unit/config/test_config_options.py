"""Options of losses, estimators and the correction exist once: the config's classes are what `algorithms/` takes."""

import dataclasses

import pytest

from roll_async.config.api import ConfigError, load
from roll_async.config.fields import RANGES
from roll_async.config.loading.spec import spec_of
from roll_async.config.options.advantage_options import ADVANTAGE_OPTIONS, AGENTIC_ONLY
from roll_async.config.options.correction_options import CorrectionOptions, RejectionRule, carries_behaviour_policy
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS

PROBES = (-1.0, 0.0, 1e-9, 0.5, 1.0, 1.0000001, 2.0, 1e9)
ALL_OPTIONS = sorted(
    {*POLICY_LOSS_OPTIONS.values(), *ADVANTAGE_OPTIONS.values(), CorrectionOptions}, key=lambda cls: cls.__name__
)


def accepts(cls, values: dict) -> bool:
    try:
        cls(**values)
    except ValueError:
        return False
    return True


def test_every_loss_and_estimator_has_its_options():
    from roll_async.algorithms.advantages import ADVANTAGES
    from roll_async.algorithms.policy_losses import POLICY_LOSSES

    assert set(POLICY_LOSS_OPTIONS) == set(POLICY_LOSSES)
    assert set(ADVANTAGE_OPTIONS) == set(ADVANTAGES)


def test_the_algorithms_take_the_classes_of_the_config():
    from roll_async.algorithms import correction

    assert correction.CorrectionOptions is CorrectionOptions and correction.RejectionRule is RejectionRule


@pytest.mark.parametrize("cls", ALL_OPTIONS)
def test_an_options_object_checks_what_the_loader_checks(cls):
    for field, spec in spec_of(cls).items():
        if spec.kind == "choice":
            expected = {**dict.fromkeys(spec.choices, True), "nonsense": False}
        elif spec.traits.range is not None:
            expected = {value: RANGES[spec.traits.range](value) for value in PROBES}
        else:
            continue
        alone = {f.name: _far(f, up=False) for f in dataclasses.fields(cls) if _bounds(f) == field}
        if sibling := spec.traits.at_most or spec.traits.less_than:
            alone[sibling] = 1e10
        for value, fine in expected.items():
            assert accepts(cls, {**alone, field: value}) == fine, (field, value)


def _bounds(f: dataclasses.Field) -> str:
    traits = f.metadata.get("traits")
    return (traits.at_most or traits.less_than) if traits is not None else ""


def _far(f: dataclasses.Field, up: bool) -> float | None:
    return None if f.default is None else 0.0 if f.metadata["traits"].range else -1e10


@pytest.mark.parametrize(
    ("pg_variant", "base", "carries"),
    [
        ("vanilla", "behaviour", False), ("gpg", "behaviour", False), ("kimi15", "behaviour", False),
        ("decoupled_ppo", "proximal", True), ("ppo", "proximal", False), ("ppo", "behaviour", True),
        ("tis", "behaviour", True), ("m2po", "behaviour", True), ("gspo", "proximal", False),
    ],
)  # fmt: skip
def test_double_correction_is_refused_by_one_table(pg_variant, base, carries):
    from roll_async.algorithms.correction import check_no_double_correction

    given = {"loss_name": pg_variant, "ratio_base": base}
    assert carries_behaviour_policy(pg_variant, base) is carries
    assert accepts(lambda **kw: check_no_double_correction(**kw), {**given, "weight_level": "token"}) is not carries
    check_no_double_correction(**given, weight_level="none")


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

    from tools.config_reference import reference

    path = Path(__file__).resolve().parents[3] / "docs_roll" / "configuration.md"
    assert path.read_text() == reference(), "python -m tools.config_reference > docs_roll/configuration.md"
