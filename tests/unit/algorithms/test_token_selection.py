"""Batch-wide token selections against a loop over a sorted list."""

import math

import pytest
import torch

from roll_async.algorithms.token_selection import select_clip_cov, select_kl_cov, select_m2po
from roll_async.config.options.policy_loss_options import ClipCovOptions, KlCovOptions, M2poOptions


def positions(batch):
    return [(b, t) for b in range(batch.rows) for t in range(batch.length) if batch.mask[b, t]]


def covariances(batch):
    where = positions(batch)
    a, p = ({x: float(v[x]) for x in where} for v in (batch.advantages, batch.proximal))
    mean_a, mean_p = sum(a.values()) / len(where), sum(p.values()) / len(where)
    return {x: (a[x] - mean_a) * (p[x] - mean_p) for x in where}


def chosen(selection):
    return {tuple(x) for x in selection.nonzero().tolist()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ratio", [1e-4, 0.2, 1.0])
def test_kl_cov_takes_the_largest_covariances(seed, ratio, make_batch):
    batch = make_batch(seed)
    cov = covariances(batch)
    k = max(1, int(ratio * len(cov)))
    expected = set(sorted(cov, key=lambda x: (-cov[x], x))[:k])
    selection = select_kl_cov(
        logprobs_BT=batch.proximal, advantages_BT=batch.advantages, mask_BT=batch.mask,
        options=KlCovOptions(cov_ratio=ratio),
    )  # fmt: skip
    assert chosen(selection) == expected


def test_ties_go_to_the_lower_position():
    flat = torch.full((2, 3), -1.0)
    selection = select_kl_cov(
        logprobs_BT=flat, advantages_BT=flat, mask_BT=torch.tensor([[0, 1, 1], [1, 1, 1]]).bool(),
        options=KlCovOptions(cov_ratio=0.5),
    )  # fmt: skip
    assert chosen(selection) == {(0, 1), (0, 2)}


@pytest.mark.parametrize("seed", range(6))
def test_clip_cov_draws_among_unclipped_tokens_in_the_band(seed, make_batch, poisoned):
    batch = make_batch(seed, rows=6)
    options = ClipCovOptions(cov_low=-0.5, cov_high=0.5, cov_ratio=0.2)
    keys = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    candidates = []
    for x, cov in covariances(batch).items():
        r, a = math.exp(float(batch.proximal[x]) - float(batch.behaviour[x])), float(batch.advantages[x])
        clipped = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
        if -0.5 < cov < 0.5 and not clipped:
            candidates.append(x)
    k = max(1, int(0.2 * len(positions(batch))))
    expected = set(sorted(candidates, key=lambda x: float(keys[x]))[:k])
    selection = select_clip_cov(
        logprobs_BT=batch.proximal, base_logprobs_BT=batch.behaviour, advantages_BT=batch.advantages,
        mask_BT=batch.mask, random_keys_BT=poisoned(keys, batch.mask), options=options,
    )  # fmt: skip
    assert chosen(selection) == expected and 0 < len(expected) <= k


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [1e-9, 0.04, 100.0])
def test_m2po_keeps_the_longest_prefix_within_the_threshold(seed, threshold, make_batch):
    batch = make_batch(seed)
    squares = sorted(((float(batch.proximal[x]) - float(batch.behaviour[x])) ** 2, x) for x in positions(batch))
    expected, total = set(), 0.0
    for n, (square, _) in enumerate(squares, 1):
        total += square
        if total / n <= threshold:
            expected = {x for _, x in squares[:n]}
    selection = select_m2po(
        logprobs_BT=batch.proximal, base_logprobs_BT=batch.behaviour, mask_BT=batch.mask,
        options=M2poOptions(m2_threshold=threshold),
    )  # fmt: skip
    assert chosen(selection) == expected
    assert (len(expected) == 0) if threshold == 1e-9 else len(expected) > 0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_valid_selects_nothing(shape):
    nan, mask = torch.full(shape, torch.nan), torch.zeros(shape).bool()
    cov = {"logprobs_BT": nan, "advantages_BT": nan, "mask_BT": mask}
    assert not select_kl_cov(options=KlCovOptions(), **cov).any()
    assert not select_clip_cov(options=ClipCovOptions(), base_logprobs_BT=nan, random_keys_BT=nan, **cov).any()
    kept = select_m2po(logprobs_BT=nan, base_logprobs_BT=nan, mask_BT=mask, options=M2poOptions())
    assert not kept.any() and kept.shape == shape and kept.dtype == torch.bool
