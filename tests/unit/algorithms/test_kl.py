"""KL estimators, the exact KL and the KL penalty: values against loops, gradients against finite differences."""

import itertools
import math

import pytest
import torch

from roll_async.algorithms.kl import KL_ESTIMATORS, full_kl, kl_estimate, kl_in_reward, update_kl_coefficient


def plain(name, d):
    x = min(20.0, max(-20.0, -d))
    values = {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": min(10.0, max(-10.0, math.exp(x) - x - 1))}
    return values[name]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_estimators_match_a_loop(estimator, scale, make_batch):
    batch, name = make_batch(3), estimator.removesuffix("+")
    leaf = (batch.logprobs * scale).requires_grad_()
    kl = kl_estimate(logprobs_BT=leaf, ref_logprobs_BT=batch.behaviour, mask_BT=batch.mask, estimator=estimator)
    kl.sum().backward()
    for b, t in itertools.product(range(batch.rows), range(batch.length)):
        if not batch.mask[b, t]:
            assert float(kl[b, t].detach()) == 0 and float(leaf.grad[b, t]) == 0
            continue
        d = float(leaf[b, t].detach()) - float(batch.behaviour[b, t])
        slope = d if estimator.endswith("+") else (plain(name, d + 1e-6) - plain(name, d - 1e-6)) / 2e-6
        assert float(kl[b, t].detach()) == pytest.approx(plain(name, d), rel=1e-12)
        assert float(leaf.grad[b, t]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_a_plus_keeps_the_value_bit_for_bit(name):
    logprobs, ref = torch.randn(1, 500) * 9, torch.randn(1, 500)
    arguments = {"logprobs_BT": logprobs, "ref_logprobs_BT": ref, "mask_BT": torch.ones(1, 500).bool()}
    assert torch.equal(kl_estimate(estimator=name, **arguments), kl_estimate(estimator=f"{name}+", **arguments))


def test_plus_estimators_have_the_gradient_of_the_true_kl():
    """E over the policy of d * grad log pi is grad KL: the mean over the vocabulary is the gradient of full_kl."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64)
    one = torch.ones(1, 1).bool()
    full_kl(logits_BTV=logits.view(1, 1, 4), ref_logits_BTV=ref.view(1, 1, 4), mask_BT=one).sum().backward()
    exact, logits.grad = logits.grad.clone(), None
    log_p = torch.log_softmax(logits, -1)[None]
    every = torch.ones(1, 4).bool()
    estimate = kl_estimate(
        logprobs_BT=log_p, ref_logprobs_BT=torch.log_softmax(ref, -1)[None], mask_BT=every, estimator="k3+"
    )
    (estimate * log_p.detach().exp()).sum().backward()
    torch.testing.assert_close(logits.grad, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_full_kl_matches_autograd_through_log_softmax(temperature, chunk, poisoned):
    g = torch.Generator().manual_seed(chunk)
    logits, ref = (torch.randn(3, 5, 9, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 5, generator=g) < 0.6
    wide = mask[..., None].expand_as(logits)
    leaf, reference = poisoned(logits, wide).requires_grad_(), poisoned(ref, wide).requires_grad_()
    kl = full_kl(logits_BTV=leaf, ref_logits_BTV=reference, mask_BT=mask, temperature=temperature, chunk_tokens=chunk)
    slow = logits.clone().requires_grad_()
    log_p, log_q = torch.log_softmax(slow / temperature, -1), torch.log_softmax(ref / temperature, -1)
    expected = torch.where(mask, (log_p.exp() * (log_p - log_q)).sum(-1), 0)
    torch.testing.assert_close(kl, expected, rtol=1e-11, atol=1e-13)
    weighting = torch.arange(15, dtype=torch.float64).view(3, 5)
    (kl * weighting).sum().backward()
    (expected * weighting).sum().backward()
    torch.testing.assert_close(leaf.grad, slow.grad, rtol=1e-10, atol=1e-12)
    assert reference.grad is None


def test_full_kl_of_nothing_is_zero():
    leaf = torch.full((2, 3, 4), torch.nan, requires_grad=True)
    kl = full_kl(logits_BTV=leaf, ref_logits_BTV=leaf.detach(), mask_BT=torch.zeros(2, 3).bool())
    kl.sum().backward()
    assert torch.equal(kl, torch.zeros(2, 3)) and torch.equal(leaf.grad, torch.zeros(2, 3, 4))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_reward_subtracts_the_penalty(estimator, make_batch):
    batch = make_batch(2)
    rewards = batch.advantages.clone().requires_grad_()
    leaf = batch.proximal.clone().requires_grad_()
    shaped = kl_in_reward(
        token_rewards_BT=rewards, logprobs_BT=leaf, ref_logprobs_BT=batch.behaviour, mask_BT=batch.mask,
        coefficient=0.3, estimator=estimator,
    )  # fmt: skip
    assert not shaped.requires_grad
    for b, t in itertools.product(range(batch.rows), range(batch.length)):
        d = float(batch.proximal[b, t]) - float(batch.behaviour[b, t])
        expected = float(batch.advantages[b, t]) - 0.3 * plain(estimator, d) if batch.mask[b, t] else 0.0
        assert float(shaped[b, t]) == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_moves_towards_its_target_and_no_faster_than_a_fifth():
    known = {"coefficient": 2.0, "num_samples": 100, "horizon": 1000}
    assert update_kl_coefficient(observed_kl=5.0, **known) == 2.0
    assert update_kl_coefficient(observed_kl=0.1, target=0.1, **known) == 2.0
    assert update_kl_coefficient(observed_kl=9.0, target=0.1, **known) == pytest.approx(2.04)
    assert update_kl_coefficient(observed_kl=-9.0, target=0.1, **known) == pytest.approx(1.96)
    for observed, target, name in ((math.nan, None, "observed"), (math.inf, 1.0, "observed"), (1.0, 0.0, "target")):
        with pytest.raises(ValueError, match=name):
            update_kl_coefficient(observed_kl=observed, target=target, **known)


def test_bad_choices_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"k1 \| abs"):
        kl_estimate(logprobs_BT=one, ref_logprobs_BT=one, mask_BT=one.bool(), estimator="k4")
    with pytest.raises(ValueError, match="bool"):
        kl_estimate(logprobs_BT=one, ref_logprobs_BT=one, mask_BT=one, estimator="k1")
    for bad in ({"temperature": 0.0}, {"chunk_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            full_kl(logits_BTV=one[None], ref_logits_BTV=one[None], mask_BT=one.bool(), **bad)
