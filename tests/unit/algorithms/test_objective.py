"""The loss as a sum of parts, each over its own tokens and rows, against a loop over Python floats."""

import math

import pytest
import torch

from roll_async.algorithms.aggregation import AGGREGATION_MODES
from roll_async.algorithms.correction import CorrectionOptions, RejectionRule, correct, correction_metrics
from roll_async.algorithms.logprobs import TokenLogprobs
from roll_async.algorithms.objective import LossSettings, count_parts, policy_loss, step_metrics
from roll_async.config.options.policy_loss_options import (
    DecoupledPpoOptions,
    GspoOptions,
    Kimi15Options,
    PpoOptions,
    VanillaOptions,
)

LENGTH = 10


def settings_of(mode="token-mean", **values):
    return LossSettings(
        pg_variant="vanilla", pg_options=VanillaOptions(), loss_agg_mode=mode, normalizer_length=LENGTH, **values
    )


def mixed(make_batch, seed, distilled=True):
    """(fields, mask of all parts): the rows of a random batch dealt out to the three parts in turn."""
    batch = make_batch(seed, rows=7)
    part = torch.arange(7) % 3
    fields = {
        "behaviour_logprobs": batch.behaviour, "proximal_logprobs": batch.proximal, "advantages": batch.advantages,
        "scores": batch.scores, "version_lag": batch.lag, "ref_logprobs": batch.proximal,
        "policy_mask": batch.mask & (part == 0)[:, None], "cross_entropy_mask": batch.mask & (part == 1)[:, None],
    }  # fmt: skip
    if distilled:
        fields["reference_kl_mask"] = batch.mask & (part == 2)[:, None]
    return fields, batch.mask, batch.logprobs


def evaluate(fields, mask, logprobs, settings, splits=None):
    """(loss, gradient, metric sums) of one or several micro-batches, with the counts of all rows."""
    leaf = logprobs.clone().requires_grad_()
    rows = range(len(mask))
    denominators = count_parts(fields, mask, rows, settings.normalizer_length)
    total, sums = 0.0, {}
    for part in splits or [list(rows)]:
        current = TokenLogprobs(logprobs=torch.where(mask[part], leaf[part], 0), entropy=None)
        own = {name: x[part] for name, x in fields.items()}
        loss, metrics = policy_loss(own, mask[part], current, settings, denominators)
        loss.backward()
        total += float(loss.detach())
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    return total, leaf.grad, sums


def slow(fields, mask, logprobs, settings):
    """(loss, gradient by token) of the same sum of parts."""
    total, slopes = 0.0, torch.zeros(mask.shape, dtype=torch.float64)
    for name, weight in (("policy", 1.0), ("cross_entropy", settings.cross_entropy_coef),
                         ("reference_kl", settings.kl_coef)):  # fmt: skip
        own = fields.get(f"{name}_mask", fields["policy_mask"])
        tokens = [[t for t in range(own.shape[1]) if own[b, t]] for b in range(len(own))]
        count, rows = sum(map(len, tokens)), sum(map(bool, tokens))
        for b, valid in enumerate(tokens):
            for t in valid:
                x, a, ref = (float(y[b, t]) for y in (logprobs, fields["advantages"], fields["ref_logprobs"]))
                gap = max(-20.0, min(20.0, ref - x))
                value, slope = {
                    "policy": (-a * x, -a),
                    "cross_entropy": (-x, -1.0),
                    "reference_kl": (math.exp(gap) - 1 - gap, 1 - math.exp(gap)),
                }[name]
                share = {
                    "token-mean": 1 / count, "token-sum": 1.0, "seq-mean-token-sum": 1 / rows,
                    "seq-mean-token-mean": 1 / rows / len(valid), "seq-mean-token-sum-norm": 1 / rows / LENGTH,
                }[settings.loss_agg_mode]  # fmt: skip
                total += weight * share * value
                slopes[b, t] += weight * share * slope
    return total, slopes


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("distilled", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_every_part_is_divided_by_its_own_tokens_and_rows(make_batch, mode, distilled, seed):
    fields, mask, logprobs = mixed(make_batch, seed, distilled)
    settings = settings_of(mode, kl_coef=0.3, cross_entropy_coef=0.7)
    loss, gradient, _ = evaluate(fields, mask, logprobs, settings)
    wanted, slopes = slow(fields, mask, logprobs, settings)
    assert loss == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(gradient, slopes, rtol=1e-9, atol=1e-12)


def test_the_split_into_micro_batches_changes_nothing(make_batch):
    fields, mask, logprobs = mixed(make_batch, 1)
    settings = settings_of(kl_coef=0.3)
    whole = evaluate(fields, mask, logprobs, settings)
    parts = evaluate(fields, mask, logprobs, settings, splits=[[0, 4], [1, 2, 6], [3], [5]])
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-14)
    for key, value in whole[2].items():
        if not key.endswith(("_max", "_min")):
            assert parts[2][key] == pytest.approx(value, rel=1e-9), key


def test_more_supervised_rows_leave_the_weight_of_the_others_alone(make_batch):
    fields, mask, logprobs = mixed(make_batch, 2)
    settings = settings_of(kl_coef=0.3)
    _, before, _ = evaluate(fields, mask, logprobs, settings)
    supervised = [b for b in range(7) if b % 3 == 1]
    rows = [*range(7), *supervised, *supervised]
    _, after, sums = evaluate({k: x[rows] for k, x in fields.items()}, mask[rows], logprobs[rows], settings)
    others = [b for b in range(7) if b % 3 != 1]
    torch.testing.assert_close(after[others], before[others], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(3 * after[supervised], before[supervised], rtol=1e-12, atol=1e-14)
    assert sums["cross_entropy/loss"] > 0 and sums["reference_kl/loss"] > 0 and "policy/reference_kl" not in sums


def test_without_other_rows_the_loss_is_that_of_the_policy_with_its_kl(make_batch):
    fields, mask, logprobs = mixed(make_batch, 3)
    plain = {k: x for k, x in fields.items() if not k.endswith("_mask")}
    settings = settings_of(kl_coef=0.3)
    wanted, slopes = slow({**plain, "policy_mask": mask, "cross_entropy_mask": torch.zeros_like(mask)}, mask, logprobs,
                          settings)  # fmt: skip
    loss, gradient, sums = evaluate(plain, mask, logprobs, settings)
    assert loss == pytest.approx(wanted, rel=1e-9) and "cross_entropy/loss" not in sums
    torch.testing.assert_close(gradient, slopes, rtol=1e-9, atol=1e-12)
    assert "policy/reference_kl" in sums


def test_the_gradient_is_that_of_finite_differences(make_batch):
    fields, mask, logprobs = mixed(make_batch, 5)
    settings = LossSettings(pg_variant="ppo", pg_options=PpoOptions(), kl_coef=0.3, cross_entropy_coef=2.0)
    denominators = count_parts(fields, mask, range(7), 1)

    def loss(x):
        current = TokenLogprobs(logprobs=torch.where(mask, x, 0), entropy=None)
        return policy_loss(fields, mask, current, settings, denominators)[0]

    assert torch.autograd.gradcheck(loss, (torch.where(mask, logprobs, 0).requires_grad_(),))


CORRECTIONS = (
    CorrectionOptions(weight_level="none"),
    CorrectionOptions(weight_level="token", weight_upper=1.2, band_low=0.7),
    CorrectionOptions(rejections=(RejectionRule(statistic="k1", aggregation="sequence_mean", high=1.1),)),
)


@pytest.mark.parametrize("options", CORRECTIONS, ids=["none", "token", "rejections"])
@pytest.mark.parametrize(
    "loss",
    [PpoOptions(), DecoupledPpoOptions(), GspoOptions(), Kimi15Options()],
    ids=["ppo", "decoupled", "gspo", "kimi"],
)
def test_the_own_forward_is_the_proximal_policy_and_is_corrected_like_it(make_batch, loss, options):
    """Bit for bit what log-probs of the same weights, scored before the step, give: loss, gradient and metrics."""
    fields, mask, logprobs = mixed(make_batch, 4)
    del fields["proximal_logprobs"]
    policy = fields["policy_mask"]
    corrected = correct(
        train_logprobs_BT=logprobs, rollout_logprobs_BT=fields["behaviour_logprobs"], mask_BT=policy, options=options,
        version_lag_BT=fields["version_lag"],
    )  # fmt: skip
    assert options == CORRECTIONS[0] or not torch.equal(corrected.keep, policy), "some tokens are rejected"
    scored = {"proximal_logprobs": torch.where(mask, logprobs, 0), "correction_weights": corrected.weights}
    name = {DecoupledPpoOptions: "decoupled_ppo", GspoOptions: "gspo", Kimi15Options: "kimi15"}.get(type(loss), "ppo")
    settings = LossSettings(pg_variant=name, pg_options=loss, normalizer_length=LENGTH, correction=options)
    expected = evaluate({**fields, **scored}, mask, logprobs, settings)
    found = evaluate(fields, mask, logprobs, settings)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    counts = count_parts(fields, mask, range(len(mask)), LENGTH)
    parts = [{key: torch.as_tensor(value) for key, value in found[2].items()}]
    published = step_metrics(parts, counts)
    wanted = correction_metrics(sums=corrected.sums)
    assert {key: published[key] for key in wanted} == pytest.approx(wanted)
    assert published["policy/ratio_max"] == 1 if name == "ppo" else True


def test_metrics_of_the_correction_are_those_of_all_micro_batches_together(make_batch):
    fields, mask, logprobs = mixed(make_batch, 5)
    del fields["proximal_logprobs"]
    settings = LossSettings(pg_variant="ppo", pg_options=PpoOptions(), correction=CORRECTIONS[1])
    counts = count_parts(fields, mask, range(len(mask)), 1)

    def published(splits):
        parts = []
        for rows in splits:
            current = TokenLogprobs(logprobs=logprobs[rows], entropy=None)
            own = {name: x[rows] for name, x in fields.items()}
            parts.append(policy_loss(own, mask[rows], current, settings, counts)[1])
        return step_metrics(parts, counts)

    whole = published([list(range(7))])
    assert whole["correction/rho_max"] > 1 > whole["correction/kept_fraction"] > 0
    assert published([[0, 1, 2], [3], [4, 5, 6]]) == pytest.approx(whole)
    few = published([[0, 3]])["correction/num_tokens"]
    assert few == int(fields["policy_mask"][[0, 3]].sum()) < whole["correction/num_tokens"], "of the computed rows"
