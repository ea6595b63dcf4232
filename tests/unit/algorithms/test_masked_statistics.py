"""Masked mean, whitening, segment numbers and the value loss; masks are boolean everywhere."""

import importlib
import inspect
import math
import pkgutil
import statistics

import pytest
import torch

from roll_async import algorithms
from roll_async.algorithms.critic import value_loss
from roll_async.algorithms.masked import dense_segments, masked_mean, segment_ids_from_mask, whiten


@pytest.mark.parametrize("seed", range(4))
def test_mean_and_whitening_match_a_loop(seed, make_batch):
    batch = make_batch(seed)
    valid = batch.logprobs[batch.mask].tolist()
    leaf = batch.logprobs.clone().requires_grad_()
    mean = masked_mean(values_BT=leaf, mask_BT=batch.mask)
    mean.backward()
    assert float(mean.detach()) == pytest.approx(statistics.mean(valid))
    torch.testing.assert_close(leaf.grad, batch.mask.double() / len(valid))
    white = whiten(values_BT=leaf, mask_BT=batch.mask)
    scale = math.sqrt(statistics.variance(valid) + 1e-8)
    assert white[batch.mask].tolist() == pytest.approx([(x - statistics.mean(valid)) / scale for x in valid])
    assert not white.requires_grad and torch.equal(white[~batch.mask], torch.zeros(int((~batch.mask).sum())).double())


def functions_of_masks():
    """Public, and not those that hand the mask on or take only its runs."""
    others = ("kl_in_reward", "dense_segments", "segment_sums", "valid_positions_first")
    for module in pkgutil.iter_modules(algorithms.__path__):
        for name, function in vars(importlib.import_module(f"{algorithms.__name__}.{module.name}")).items():
            is_own = inspect.isfunction(function) and function.__module__.endswith(f".{module.name}")
            if (
                is_own
                and not name.startswith("_")
                and name not in others
                and "mask_BT" in inspect.signature(function).parameters
            ):
                yield function


@pytest.mark.parametrize("function", functions_of_masks(), ids=lambda function: function.__name__)
def test_a_mask_of_numbers_is_refused_before_anything_is_computed(function):
    required = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    with pytest.raises(ValueError, match="mask has dtype torch.int64; expected torch.bool"):
        function(**{**dict.fromkeys(required), "mask_BT": torch.ones(2, 3, dtype=torch.int64)})


def test_too_few_values_to_whiten_or_average():
    nan, nothing = torch.full((2, 2), torch.nan).requires_grad_(), torch.zeros(2, 2).bool()
    mean = masked_mean(values_BT=nan, mask_BT=nothing)
    mean.backward()
    assert float(mean.detach()) == 0 and torch.equal(nan.grad, torch.zeros(2, 2))
    single = torch.tensor([[True, False]])
    assert torch.equal(whiten(values_BT=torch.tensor([[5.0, torch.nan]]), mask_BT=single), torch.zeros(1, 2))
    assert torch.equal(whiten(values_BT=nan.detach(), mask_BT=nothing), torch.zeros(2, 2))
    for function in (masked_mean, whiten):
        with pytest.raises(ValueError, match="bool"):
            function(values_BT=torch.ones(1, 1), mask_BT=torch.ones(1, 1))


@pytest.mark.parametrize("seed", range(6))
def test_segments_match_a_loop(seed):
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(seed)) < 0.5
    ids = segment_ids_from_mask(mask_BT=mask)
    for row, numbers in zip(mask.tolist(), ids.tolist(), strict=True):
        run, before = -1, False
        for valid, number in zip(row, numbers, strict=True):
            run += valid and not before
            assert number == (run if valid else -1)
            before = valid


def test_segments_of_any_numbering_become_dense():
    ids = torch.tensor([[700, -5, 700, 10**15, 3], [9, 9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 1, 0]]).bool()
    assert dense_segments(segment_ids_BT=ids, mask_BT=mask).tolist() == [[1, 0, 1, 2, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("clip", [None, 0.2, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_matches_a_loop(clip, seed, make_batch):
    batch = make_batch(seed)
    leaf = batch.logprobs.clone().requires_grad_()
    loss, metrics = value_loss(
        values_BT=leaf, old_values_BT=batch.proximal, returns_BT=batch.advantages, mask_BT=batch.mask, clip=clip
    )
    loss.sum().backward()
    total, strictly_clipped = 0.0, 0
    for b, t in batch.mask.nonzero().tolist():
        old, target = float(batch.proximal[b, t]), float(batch.advantages[b, t])

        def error(v, old=old, target=target):
            plain = (v - target) ** 2
            if clip is None:
                return plain / 2, False
            held = v if abs(v - old) <= clip else old + math.copysign(clip, v - old)
            return max(plain, (held - target) ** 2) / 2, (held - target) ** 2 > plain

        v = float(leaf[b, t].detach())
        expected, larger = error(v)
        assert float(loss[b, t].detach()) == pytest.approx(expected, rel=1e-11)
        slope = (error(v + 1e-6)[0] - error(v - 1e-6)[0]) / 2e-6
        assert float(leaf.grad[b, t]) == pytest.approx(slope, rel=1e-5, abs=1e-7)
        total, strictly_clipped = total + v, strictly_clipped + larger
    assert float(metrics["value/mean"]) == pytest.approx(total)
    assert float(metrics["value/clipped"]) == strictly_clipped
    assert torch.equal(loss[~batch.mask], torch.zeros_like(loss[~batch.mask])) and torch.isfinite(leaf.grad).all()


def test_inside_the_clip_nothing_counts_as_clipped():
    old = torch.rand(1, 1000)
    values = old + 0.01 * torch.rand(1, 1000)  # old + (v - old) differs from v by a rounding error
    _, metrics = value_loss(
        values_BT=values, old_values_BT=old, returns_BT=old + 1, mask_BT=torch.ones(1, 1000).bool(), clip=0.2
    )
    assert float(metrics["value/clipped"]) == 0
    for clip in (-0.1, math.nan):
        with pytest.raises(ValueError, match="clip"):
            value_loss(values_BT=old, old_values_BT=old, returns_BT=old, mask_BT=old.bool(), clip=clip)
