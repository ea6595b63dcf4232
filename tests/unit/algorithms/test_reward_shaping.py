"""Reward normalisation, moments, penalties and keep masks against loops."""

import itertools
import math
import statistics

import pytest
import torch

from roll_async.algorithms.rewards import (
    RunningMoments,
    difficulty_keep,
    max_length_keep,
    normalise_rewards,
    overlong_penalty,
    shift_scale_rewards,
    staleness_keep,
)

TYPES = ("none", "batch", "group", "running")


def make(seed, rows=11):
    g = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 4, (rows,), generator=g) * 17 - 20
    counted = torch.rand(rows, generator=g) < 0.8
    scores = torch.randint(0, 3, (rows,), generator=g).double() / 3
    return torch.where(counted, scores, torch.nan), groups, counted


@pytest.mark.parametrize(("mean", "std"), itertools.product(TYPES, TYPES))
def test_normalised_rewards_match_a_loop(mean, std):
    for seed in range(5):
        scores, groups, counted = make(seed)
        moments = RunningMoments().merged(scores_B=torch.arange(5.0)).merged(scores_B=scores, row_mask_B=counted)
        result = normalise_rewards(
            scores_B=scores, group_index_B=groups, mean=mean, std=std, running=moments, row_mask_B=counted
        )
        rows = [b for b in range(len(scores)) if counted[b]]
        for b in range(len(scores)):
            if b not in rows:
                assert float(result[b]) == 0
                continue
            group = [float(scores[c]) for c in rows if groups[c] == groups[b]]
            pools = {"batch": [float(scores[c]) for c in rows], "group": group, "none": None, "running": None}
            x = float(scores[b])
            if mean == "running":
                x -= moments.mean
            elif mean != "none":
                x = 0.0 if len(set(pools[mean])) == 1 else x - statistics.mean(pools[mean])
            if std == "running":
                x /= moments.std + 1e-6
            elif std != "none" and len(set(pools[std])) > 1:
                x /= statistics.stdev(pools[std]) + 1e-6
            assert float(result[b]) == pytest.approx(x, rel=1e-11, abs=1e-14)


def test_equal_rewards_are_exactly_zero_and_never_divided():
    scores, groups = torch.full((7,), 0.1), torch.zeros(7).long()
    for mean, std in (("group", "group"), ("batch", "batch"), ("group", "batch")):
        assert torch.equal(normalise_rewards(scores_B=scores, group_index_B=groups, mean=mean, std=std), torch.zeros(7))
    kept = normalise_rewards(scores_B=scores, group_index_B=groups, mean="none", std="batch")
    assert torch.equal(kept, scores)


def test_running_needs_moments_and_choices_are_named():
    scores, groups, _ = make(0)
    with pytest.raises(ValueError, match="running"):
        normalise_rewards(scores_B=scores, group_index_B=groups, mean="running", std="none")
    with pytest.raises(ValueError, match=r"none \| batch"):
        normalise_rewards(scores_B=scores, group_index_B=groups, mean="prompt", std="none")


@pytest.mark.parametrize("seed", range(5))
def test_moments_of_parts_equal_the_moments_of_the_whole(seed):
    g = torch.Generator().manual_seed(seed)
    parts = [
        1e4 + torch.randn(int(n), generator=g, dtype=torch.float64) for n in torch.randint(0, 7, (5,), generator=g)
    ]
    moments = RunningMoments()
    for part in parts:
        dirty = torch.cat([part, torch.tensor([math.nan], dtype=torch.float64)])
        moments = moments.merged(scores_B=dirty, row_mask_B=torch.isfinite(dirty))
    values = torch.cat(parts).tolist()
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(statistics.mean(values), rel=1e-14)
    assert moments.std == pytest.approx(statistics.stdev(values), rel=1e-9)


def test_moments_without_spread_have_no_std():
    assert RunningMoments().std is None
    assert RunningMoments().merged(scores_B=torch.ones(1)).std is None
    assert RunningMoments().merged(scores_B=torch.ones(5)).std is None
    one = RunningMoments().merged(scores_B=torch.ones(3))
    assert one.merged(scores_B=torch.zeros(0)) == one


def test_shift_and_scale():
    scores = torch.tensor([-2.0, 0.5, 9.0], dtype=torch.bfloat16)
    assert shift_scale_rewards(scores_B=scores, shift=-0.5, scale=2.0).tolist() == [-5.0, 0.0, 17.0]


@pytest.mark.parametrize("clamp", [True, False])
def test_overlong_penalty_matches_a_loop(clamp):
    lengths = torch.arange(0, 40, dtype=torch.float64)
    result = overlong_penalty(lengths_B=lengths, max_length=30, buffer_length=8, factor=0.7, clamp=clamp)
    for length, value in zip(lengths.tolist(), result.tolist(), strict=True):
        share = max(0.0, (length - 22) / 8)
        assert value == pytest.approx(-0.7 * (min(1.0, share) if clamp else share))
    for bad in ({"buffer_length": 0}, {"buffer_length": 31}, {"factor": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            overlong_penalty(lengths_B=lengths, max_length=30, **{"buffer_length": 8, **bad})


def test_rows_at_the_limit_are_dropped():
    assert max_length_keep(lengths_B=torch.tensor([0, 9, 10, 11]), max_length=10).tolist() == [True, True, False, False]


def test_difficulty_bounds_are_strict():
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, math.nan])
    groups, counted = torch.tensor([5, 5, 2, 2, 9, 9, 9]), torch.tensor([1, 1, 1, 1, 1, 1, 0]).bool()
    keep = difficulty_keep(scores_B=scores, group_index_B=groups, row_mask_B=counted)
    assert keep.tolist() == [False, False, False, False, True, True, False]
    high = difficulty_keep(scores_B=scores, group_index_B=groups, low=0.5, high=1.5, row_mask_B=counted)
    assert high.tolist() == [False, False, True, True, False, False, False]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_staleness_keep_matches_a_loop(level, seed, make_batch):
    batch = make_batch(seed)
    lag = torch.where(batch.mask, batch.lag, 99)
    keep = staleness_keep(version_lag_BT=lag, mask_BT=batch.mask, max_lag=7, level=level)
    for b, t in itertools.product(range(batch.rows), range(batch.length)):
        valid = [int(batch.lag[b, s]) for s in range(batch.length) if batch.mask[b, s]]
        worst = int(batch.lag[b, t]) if level == "token" else max(valid, default=0)
        assert bool(keep[b, t]) == (bool(batch.mask[b, t]) and worst <= 7)
    with pytest.raises(ValueError, match=r"token \| sequence"):
        staleness_keep(version_lag_BT=lag, mask_BT=batch.mask, max_lag=7, level="row")
