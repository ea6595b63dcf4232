"""The worked examples of the documentation: input E, its losses, aggregates, selections, corrections and KL values."""

# ruff: noqa: E501 - the table is easier to compare in one line per loss

import math

import pytest
import torch

from roll_async.algorithms.aggregation import Denominators, aggregate
from roll_async.algorithms.correction import (
    CorrectionOptions,
    RejectionRule,
    correct,
    correction_metrics,
    interpolate_proximal,
)
from roll_async.algorithms.critic import value_loss
from roll_async.algorithms.kl import full_kl, kl_estimate, kl_in_reward, update_kl_coefficient
from roll_async.algorithms.masked import segment_ids_from_mask, whiten
from roll_async.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from roll_async.algorithms.token_selection import select_clip_cov, select_kl_cov, select_m2po
from roll_async.config.options.policy_loss_options import (
    POLICY_LOSS_OPTIONS,
    ClipCovOptions,
    KlCovOptions,
    M2poOptions,
    PpoOptions,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
DENOMINATORS = Denominators(global_tokens=5, global_sequences=2, normalizer_length=8)


def rows(text, fill=math.nan):
    """[2,4] float64 from '1 2 3; 4 5': valid positions only. One number in a row stands for all its valid tokens."""
    result = torch.full(MASK.shape, fill, dtype=torch.float64)
    for b, row in enumerate(text.split(";")):
        numbers = torch.tensor([float(x) for x in row.split()], dtype=torch.float64)
        result[b, MASK[b]] = numbers.expand(int(MASK[b].sum())) if len(numbers) == 1 else numbers
    return result


LOGPROBS, PROXIMAL, BEHAVIOUR = (
    rows("-0.7 -1.2 -0.3; -2 -0.9"),
    rows("-0.9 -1 -0.35; -1.5 -1"),
    rows("-1.1 -1.05 -0.3; -1.7 -0.8"),
)
ADVANTAGES, SEGMENTS, SELECTION = rows("1.5; -0.8"), rows("0 0 1; 0 0", 9).long(), rows("1 0 1; 0 1", 1).bool()


def inputs(logprobs=LOGPROBS):
    return PolicyLossInputs(
        logprobs=logprobs, proximal_logprobs=PROXIMAL, behaviour_logprobs=BEHAVIOUR, advantages=ADVANTAGES, mask=MASK,
        scores=torch.tensor([1.0, 0.0]), segment_ids=SEGMENTS, selection=SELECTION,
    )  # fmt: skip


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1.01e-6, check_dtype=False)


LOSSES = """
vanilla |  | 1.050000 1.800000 0.450000; -1.600000 -0.720000 | 0.196000 | -0.300000 -0.300000 -0.300000; 0.160000 0.160000
ppo |  | -1.800000 -1.228096 -1.576907; 0.640000 0.884137 | -0.616173 | 0 -0.245619 -0.315381; 0 0.176827
ppo | clip_high=0.28 | -1.832104 -1.228096 -1.576907; 0.640000 0.884137 | -0.622594 | -0.366421 -0.245619 -0.315381; 0 0.176827
ppo | ratio_level=sequence | -1.525209; 0.654985 | -0.653132 | -0.305042; 0.130997
ppo | ratio_level=segment | -1.500000 -1.500000 -1.576907; 0.654985 | -0.653387 | -0.300000 -0.300000 -0.315381; 0.130997
ppo | ratio_base=behaviour | -1.800000 -1.291062 -1.500000; 0.640000 0.723870 | -0.645438 | 0 -0.258212 -0.300000; 0 0.144774
decoupled_ppo | weight_high=1.1 | -1.980000 -1.291062 -1.500000; 0.704000 0.723870 | -0.668638 | 0 -0.258212 -0.300000; 0 0.144774
tis |  | 1.050000 1.549274 0.450000; -1.185309 -0.651483 | 0.242496 | -0.300000 -0.258212 -0.300000; 0.118531 0.144774
tis | ratio_level=sequence_product tis_upper_bound=2.0 | 1.348227 2.311246 0.577811; -1.072512 -0.482630 | 0.536428 | -0.385208; 0.107251
cispo | cispo_epsilon_low=0.1 | 1.155000 1.620000 0.450000; -1.440000 -0.651483 | 0.226703 | -0.330000 -0.270000 -0.300000; 0.144000 0.144774
cispo | cispo_epsilon_low=0.1 cispo_use_unified_mask=True | 0 1.620000 0.450000; 0 -0.651483 | 0.283703 | 0 -0.270000 -0.300000; 0 0.144774
topr | topr_negative_weight=0.5 | 1.050000 1.800000 0.450000; -0.592655 -0.325741 | 0.476321 | -0.300000; 0.059265 0.072387
kimi15 |  | 1.052000 1.802000 0.450125; -1.587500 -0.719500 | 0.199425 | -0.296000 -0.304000 -0.299000; 0.150000 0.162000
gspo |  | -1.500600; 0.799760 | -0.580456 | 0; 0
gspo | clip_low=0.2 clip_high=0.2 | -1.525209; 0.654985 | -0.653132 | -0.305042; 0.130997
gmpo | clip_low=0.3 clip_high=0.1 | -1.475207; 0.723870 | -0.595576 | 0 -0.295041 -0.295041; 0 0.144774
sapo |  | -3.330754 -2.728838 -3.076890; 1.213436 1.607861 | -1.263037 | -0.361967 -0.243613 -0.315174; 0.093019 0.176289
clip_cov |  | 0 -1.228096 0; 0.640000 0 | -0.117619 | 0 -0.245619 0; 0 0
kl_cov |  | -1.632104 -1.228096 -1.526907; 0.485225 0.984137 | -0.583549 | -0.166421 -0.245619 -0.115381; 0.097045 0.376827
m2po |  | -2.237737 0 -1.500000; 0 0.723870 | -0.602773 | -0.447547 0 -0.300000; 0 0.144774
"""
TYPES = {
    "True": True,
    "sequence": "sequence",
    "segment": "segment",
    "behaviour": "behaviour",
    "sequence_product": "sequence_product",
}


def options_of(text):
    pairs = (pair.split("=") for pair in text.split())
    return {key: TYPES[value] if value in TYPES else float(value) for key, value in pairs}


@pytest.mark.parametrize("line", LOSSES.strip().splitlines(), ids=lambda line: "-".join(line.split("|")[:2]))
def test_losses_on_input_e(line):
    name, given, per_token, mean, gradient = (part.strip() for part in line.split("|"))
    leaf = LOGPROBS.clone().requires_grad_()
    loss, _ = POLICY_LOSSES[name](inputs(leaf), options=POLICY_LOSS_OPTIONS[name](**options_of(given)))
    total = aggregate(loss_BT=loss, mask_BT=MASK, denominators=DENOMINATORS)
    total.backward()
    close(loss.detach(), rows(per_token, 0))
    close(total.detach(), torch.tensor(float(mean)))
    close(leaf.grad, rows(gradient, 0))


def test_ppo_metrics_on_input_e():
    _, metrics = POLICY_LOSSES["ppo"](inputs(), options=PpoOptions())
    expected = {"ratio_max": 1.221403, "ratio_min": 0.606531, "ratio": 4.803106, "kl_k1": 0.35, "kl_k3": 0.153106}
    expected |= {"clip_high": 1, "clip_low": 1, "dual_clip": 0}
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {f"policy/{k}": v for k, v in expected.items()}, abs=1e-6
    )


@pytest.mark.parametrize(("bound", "value", "slope"), [(3.0, 3.0, 0.0), (10.0, 6.049647, 6.049647)])
def test_dual_clip(bound, value, slope):
    leaf, one = torch.tensor([[-0.1]], dtype=torch.float64, requires_grad=True), torch.ones(1, 1, dtype=torch.float64)
    single = PolicyLossInputs(
        logprobs=leaf,
        proximal_logprobs=-1.9 * one,
        behaviour_logprobs=-one,
        advantages=-one,
        mask=one.bool(),
        scores=one[0],
    )
    loss, _ = POLICY_LOSSES["ppo"](single, options=PpoOptions(dual_clip=bound))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(value, abs=1e-6) and float(leaf.grad) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "plain", "weighted"),
    [
        ("token-mean", 3.0, 2.1),
        ("seq-mean-token-sum", 7.5, 5.25),
        ("seq-mean-token-mean", 3.25, 2.291667),
        ("seq-mean-token-sum-norm", 0.9375, 0.65625),
    ],
)
def test_aggregates(mode, plain, weighted):
    arguments = {"loss_BT": rows("1 2 3; 4 5"), "mask_BT": MASK, "mode": mode, "denominators": DENOMINATORS}
    assert float(aggregate(**arguments)) == pytest.approx(plain)
    assert float(aggregate(**arguments, weights_BT=rows("1 0 1; 1 0.5"))) == pytest.approx(weighted, abs=1e-6)


def test_whitening_and_segments():
    close(whiten(values_BT=LOGPROBS, mask_BT=MASK), rows("0.501595 -0.282147 1.128588; -1.536133 0.188098", 0))
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 1]]).bool()
    assert segment_ids_from_mask(mask_BT=mask).tolist() == [[0, 0, -1, 1], [-1, 0, -1, 1]]


def test_selections():
    def picked(text):
        return rows(text, 0).bool()

    kl = select_kl_cov(
        logprobs_BT=LOGPROBS, advantages_BT=ADVANTAGES, mask_BT=MASK, options=KlCovOptions(cov_ratio=0.4)
    )
    assert torch.equal(kl, picked("0 0 1; 1 0"))
    for threshold, expected in ((0.04, "0 1 1; 1 1"), (0.02, "0 1 1; 0 1")):
        kept = select_m2po(
            logprobs_BT=LOGPROBS, base_logprobs_BT=BEHAVIOUR, mask_BT=MASK, options=M2poOptions(m2_threshold=threshold)
        )
        assert torch.equal(kept, picked(expected))
    clipped = select_clip_cov(
        logprobs_BT=LOGPROBS, base_logprobs_BT=LOGPROBS, advantages_BT=ADVANTAGES, mask_BT=MASK,
        random_keys_BT=rows("0.9 0.1 0.5; 0.2 0.3"), options=ClipCovOptions(cov_ratio=0.4, cov_low=0.1),
    )  # fmt: skip
    assert torch.equal(clipped, picked("0 0 1; 1 0"))


def rule(statistic, aggregation, low=None, high=None):
    return (RejectionRule(statistic=statistic, aggregation=aggregation, low=low, high=high),)


CORRECTIONS = [
    ({"weight_upper": 1.1}, "1.100000 1.051271 0.951229; 1.100000 0.818731"),
    ({"weight_level": "segment"}, "1.133148 1.133148 0.951229; 1 1"),
    ({"weight_level": "geometric"}, "1.068939; 1"),
    ({"weight_level": "sequence", "weight_upper": 1.2}, "1.2; 1"),
    ({"weight_level": "none", "band_low": 0.9, "band_high": 1.1}, "0 1 1; 0 0"),
    ({"weight_upper": None, "normalise": "token"}, "1.160139 0.998541 0.903517; 1.160139 0.777664"),
    ({"normalise": "sequence"}, "1.166183 1.003743 0.908224; 1.166183 0.781716"),
    ({"weight_level": "none", "rejections": rule("k1", "sequence_sum", 0.9, 1.1)}, "0; 1"),
    ({"weight_level": "none", "rejections": rule("k1", "token", high=1.1)}, "0 1 1; 0 1"),
    ({"weight_level": "none", "rejections": rule("k3", "sequence_max", high=0.02)}, "0; 0"),
]


def corrected(**given):
    lag = rows("0 1 1; 2 9", -5).long()
    return correct(
        train_logprobs_BT=PROXIMAL, rollout_logprobs_BT=BEHAVIOUR, mask_BT=MASK, options=CorrectionOptions(**given),
        segment_ids_BT=SEGMENTS, version_lag_BT=lag,
    )  # fmt: skip


@pytest.mark.parametrize(("given", "weights"), CORRECTIONS, ids=[str(i) for i in range(len(CORRECTIONS))])
def test_corrections_on_input_e(given, weights):
    result = corrected(**given)
    close(result.weights, rows(weights, 0))
    assert torch.equal(result.keep, rows(weights, 0) > 0)


def test_correction_metrics_on_input_e():
    metrics = correction_metrics(sums=corrected(weight_upper=1.1).sums)
    expected = {
        "kl": -0.04, "k3": 0.012807, "chi2_token": 0.132796, "chi2_sequence": 0.245912, "ess": 0.988672,
        "rho_mean": 1.052807, "rho_max": 1.221403, "rho_min": 0.818731, "weight_mean": 1.004246,
        "clipped_high_fraction": 0.4, "clipped_low_fraction": 0, "band_masked_fraction": 0, "rejected_fraction": 0,
        "kept_fraction": 1, "kept_sequence_fraction": 1, "all_rejected": 0, "lag_0/abs_log_rho": 0.2,
        "lag_0/token_fraction": 0.2, "lag_1/abs_log_rho": 0.05, "lag_1/token_fraction": 0.4, "lag_2/abs_log_rho": 0.2,
        "lag_2/token_fraction": 0.2, "lag_8/abs_log_rho": 0.2, "lag_8/token_fraction": 0.2, "num_tokens": 5,
    }  # fmt: skip
    assert metrics == pytest.approx({f"correction/{k}": v for k, v in expected.items()}, abs=1e-6)


def test_everything_rejected():
    result = corrected(rejections=rule("k3", "token", high=1e-9))
    metrics = correction_metrics(sums=result.sums)
    expected = {"ess": 0, "weight_mean": 0, "kept_fraction": 0, "rejected_fraction": 1, "all_rejected": 1}
    assert {k: metrics[f"correction/{k}"] for k in expected} == expected
    leaf = LOGPROBS.clone().requires_grad_()
    loss, _ = POLICY_LOSSES["ppo"](inputs(leaf), options=PpoOptions())
    total = aggregate(loss_BT=loss, mask_BT=MASK, denominators=DENOMINATORS, weights_BT=result.weights)
    total.backward()
    assert float(total.detach()) == 0 and torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_interpolated_proximal():
    four = torch.ones(1, 4, dtype=torch.float64)
    result = interpolate_proximal(
        logprobs_BT=-0.7 * four, behaviour_logprobs_BT=-1.1 * four, version_lag_BT=torch.tensor([[0, 1, 2, 4]]),
        mask_BT=four.bool(),
    )  # fmt: skip
    close(result, torch.tensor([[-0.7, -1.1, -0.9, -0.8]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("estimator", "logprob", "value", "slope"),
    [
        ("k1", -0.7, 0.3, 1.0),
        ("abs", -0.7, 0.3, 1.0),
        ("k2", -0.7, 0.045, 0.3),
        ("k3", -0.7, 0.040818, 0.259182),
        ("k1+", -0.7, 0.3, 0.3),
        ("k3+", -0.7, 0.040818, 0.3),
        ("k3", -9.0, 10.0, 0.0),
        ("k3+", -9.0, 10.0, -8.0),
    ],
)
def test_kl_estimates(estimator, logprob, value, slope):
    leaf, one = (
        torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True),
        torch.ones(1, 1, dtype=torch.float64),
    )
    kl = kl_estimate(logprobs_BT=leaf, ref_logprobs_BT=-one, mask_BT=one.bool(), estimator=estimator)
    kl.sum().backward()
    assert float(kl.detach()) == pytest.approx(value, abs=1e-6) and float(leaf.grad) == pytest.approx(slope, abs=1e-6)


def test_full_kl():
    leaf = torch.tensor([[[1.0, 0, -1]]], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.tensor([[[0, 0.5, -0.5]]], dtype=torch.float64), torch.ones(1, 1).bool()
    kl = full_kl(logits_BTV=leaf, ref_logits_BTV=ref, mask_BT=mask)
    kl.sum().backward()
    assert float(kl.detach()) == pytest.approx(0.270525, abs=1e-6)
    close(leaf.grad.flatten(), torch.tensor([0.334043, -0.244205, -0.089838], dtype=torch.float64))
    hot = full_kl(logits_BTV=leaf.detach(), ref_logits_BTV=ref, mask_BT=mask, temperature=0.5)
    assert float(hot) == pytest.approx(0.865114, abs=1e-6)


def test_kl_in_reward_and_its_coefficient():
    shaped = kl_in_reward(
        token_rewards_BT=rows("0 0 1; 0 -1"),
        logprobs_BT=PROXIMAL,
        ref_logprobs_BT=BEHAVIOUR,
        mask_BT=MASK,
        coefficient=0.1,
    )
    close(shaped, rows("-0.02 -0.005 1.005; -0.02 -0.98", 0))
    known = {"coefficient": 0.2, "num_samples": 256, "target": 0.1}
    assert update_kl_coefficient(**known, observed_kl=0.3) == pytest.approx(0.201024)
    assert update_kl_coefficient(**known, observed_kl=0.105) == pytest.approx(0.200256)


@pytest.mark.parametrize(("target", "value", "slope"), [(2.0, 0.845, 0.0), (0.2, 0.32, 0.8)])
def test_clipped_value_loss(target, value, slope):
    leaf, one = torch.ones(1, 1, dtype=torch.float64, requires_grad=True), torch.ones(1, 1, dtype=torch.float64)
    loss, _ = value_loss(values_BT=leaf, old_values_BT=0.5 * one, returns_BT=target * one, mask_BT=one.bool(), clip=0.2)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(value) and float(leaf.grad) == pytest.approx(slope)
