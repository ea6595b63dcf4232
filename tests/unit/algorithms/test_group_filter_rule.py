"""Dynamic sampling: which groups are kept."""

import math
import random
import statistics

import pytest

from roll_async.algorithms.group_variance import group_verdict, population_variance


@pytest.mark.parametrize("singletons", ["keep", "drop"])
def test_the_verdict_matches_a_loop(singletons):
    draw = random.Random(1)
    for _ in range(200):
        values = draw.choices((0.0, 0.1, 0.2, math.inf), weights=(10, 10, 10, 1), k=draw.randrange(1, 5))
        if not all(map(math.isfinite, values)):
            expected = "dropped_invalid"
        elif len(values) == 1:
            expected = "keep" if singletons == "keep" else "dropped_singleton"
        else:
            expected = "keep" if statistics.pvariance(values) > 0.006 else "dropped_equal"
        assert group_verdict(values, variance_threshold=0.006, singletons=singletons) == expected


def test_rounding_noise_is_not_signal():
    assert group_verdict([0.1] * 7) == "dropped_equal"
    assert population_variance([1.0, 2.0, 6.0]) == pytest.approx(14 / 3)
    assert math.isnan(population_variance([])) and math.isnan(population_variance([1.0, math.nan]))
    assert group_verdict([1e200, 1.0]) == group_verdict([-1.7e308, 1.7e308]) == "dropped_invalid", (
        "no square has a float"
    )
    assert group_verdict([math.nan, 1.0]) == "dropped_invalid" and group_verdict([0.0, 1.0]) == "keep"


def test_bad_settings_are_refused():
    for threshold in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="variance_threshold"):
            group_verdict([1.0], variance_threshold=threshold)
    with pytest.raises(ValueError, match=r"keep \| drop"):
        group_verdict([1.0], singletons="ignore")
