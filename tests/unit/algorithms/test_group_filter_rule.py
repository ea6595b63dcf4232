"""Dynamic sampling: which groups are kept, and that no group is lost between batches."""

import math
import statistics

import pytest
import torch

from roll_async.algorithms.group_filter import filter_groups, take_batch
from roll_async.algorithms.group_variance import group_verdict, population_variance


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("singletons", ["keep", "drop"])
def test_the_filter_matches_a_loop(seed, singletons):
    g = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 9, (20,), generator=g) * 3 - 8
    values = torch.randint(0, 3, (20,), generator=g).float() / 10
    values[torch.rand(20, generator=g) < 0.1] = math.inf
    result = filter_groups(values_B=values, group_index_B=groups, variance_threshold=0.006, singletons=singletons)
    expected = dict.fromkeys(("seen", "kept", "dropped_equal", "dropped_invalid", "dropped_singleton", "singletons"), 0)
    for group in set(groups.tolist()):
        rows = [b for b in range(20) if groups[b] == group]
        members = [float(values[b]) for b in rows]
        if not all(map(math.isfinite, members)):
            fate = "dropped_invalid"
        elif len(members) == 1:
            fate = "kept" if singletons == "keep" else "dropped_singleton"
        else:
            fate = "kept" if statistics.pvariance(members) > 0.006 else "dropped_equal"
        expected["seen"] += 1
        expected["singletons"] += len(members) == 1
        expected[fate] += 1
        assert all(bool(result.keep_B[b]) == (fate == "kept") for b in rows)
    assert result.counters == {f"groups/{k}": v for k, v in expected.items()}


def test_rounding_noise_is_not_signal():
    for dtype in (torch.float32, torch.float64):
        same = torch.full((7,), 0.1, dtype=dtype)
        assert not filter_groups(values_B=same, group_index_B=torch.zeros(7).long()).keep_B.any()
    assert group_verdict([0.1] * 7) == "dropped_equal"
    assert population_variance([1.0, 2.0, 6.0]) == pytest.approx(14 / 3)
    assert math.isnan(population_variance([])) and math.isnan(population_variance([1.0, math.nan]))


def test_bad_settings_are_refused():
    one = {"values_B": torch.ones(1), "group_index_B": torch.zeros(1).long()}
    for threshold in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="variance_threshold"):
            filter_groups(variance_threshold=threshold, **one)
    with pytest.raises(ValueError, match=r"keep \| drop"):
        filter_groups(singletons="ignore", **one)


def test_no_rows_are_no_groups():
    result = filter_groups(values_B=torch.zeros(0), group_index_B=torch.zeros(0).long())
    assert result.keep_B.shape == (0,) and set(result.counters.values()) == {0}


def test_batches_take_carried_groups_first_and_lose_none():
    carried, trained, handed_in = [], [], 0
    for arriving in (2, 0, 5, 1, 7, 3):
        new = list(range(handed_in, handed_in + arriving))
        handed_in += arriving
        batch, carried = take_batch(carried_groups=carried, new_groups=new, num_groups=4)
        assert len(batch) in (0, 4) and (len(batch) == 4 or len(carried) < 4)
        trained += batch
    assert trained + carried == list(range(handed_in))
