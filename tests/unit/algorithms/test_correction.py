"""Train/engine correction against a loop over Python floats, for every level, bound, rule and normalisation."""

import itertools
import math

import pytest
import torch

from roll_async.algorithms.correction import (
    Correction,
    CorrectionOptions,
    RejectionRule,
    check_no_double_correction,
    correct,
    correction_metrics,
    interpolate_proximal,
)

RULES = [
    (),
    (RejectionRule(statistic="k1", aggregation="token", low=0.6, high=1.6),),
    (RejectionRule(statistic="k1", aggregation="sequence_sum", low=0.5),),
    (RejectionRule(statistic="k1", aggregation="sequence_mean", low=0.9, high=1.1),),
    (RejectionRule(statistic="k1", aggregation="sequence_max", high=1.8),),
    (RejectionRule(statistic="k2", aggregation="token", high=0.1),),
    (
        RejectionRule(statistic="k2", aggregation="sequence_mean", high=0.2),
        RejectionRule(statistic="k3", aggregation="token", high=0.3),
    ),
    (RejectionRule(statistic="k3", aggregation="sequence_sum", high=0.5),),
    (RejectionRule(statistic="k3", aggregation="sequence_max", high=0.25),),
]
BOUNDS = [{"weight_upper": None}, {"weight_upper": 1.2, "weight_lower": 0.9}, {"band_low": 0.8, "band_high": 1.3}]
LEVELS = ("none", "token", "segment", "sequence", "geometric")


def limit(x):
    return min(20.0, max(-20.0, x))


def fails(rule, d, row, t):
    """Whether token t is rejected; `row` lists the valid positions."""
    statistic = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[rule.statistic]
    bound = math.log if rule.statistic == "k1" else float
    low = -math.inf if rule.low is None else bound(rule.low)
    high = math.inf if rule.high is None else bound(rule.high)
    values = [statistic(d[s]) for s in row]
    match rule.aggregation:
        case "token":
            return not low <= statistic(d[t]) <= high
        case "sequence_sum":
            return not low <= math.fsum(values) <= high
        case "sequence_mean":
            return not low <= math.fsum(values) / len(values) <= high
        case "sequence_max":
            return any(not low <= v <= high for v in values)


def level_ratio(level, d, row, segments, t):
    if level in ("none", "token"):
        return math.exp(d[t])
    members = [s for s in row if segments[s] == segments[t]] if level == "segment" else row
    total = math.fsum(d[s] for s in members)
    return math.exp(limit(total if level == "sequence" else total / len(members)))


def slow_correct(batch, options):
    """(weights, metrics) by the numbered steps of the specification."""
    mask, segments, lag = batch.mask.tolist(), batch.segments.tolist(), batch.lag.tolist()
    train, rollout = batch.proximal.tolist(), batch.behaviour.tolist()
    weights, tokens = [[0.0] * len(row) for row in mask], []
    for b, row_mask in enumerate(mask):
        row = [t for t, m in enumerate(row_mask) if m]
        d = {t: limit(train[b][t] - rollout[b][t]) for t in row}
        for t in row:
            ratio = level_ratio(options.weight_level, d, row, segments[b], t)
            outside = (options.band_low is not None and ratio < options.band_low) or (
                options.band_high is not None and ratio > options.band_high
            )
            rejected = any(fails(rule, d, row, t) for rule in options.rejections)
            weighted = options.weight_level != "none"
            low = -math.inf if options.weight_lower is None else options.weight_lower
            high = math.inf if options.weight_upper is None else options.weight_upper
            keep = not outside and not rejected
            weights[b][t] = (min(high, max(low, ratio)) if weighted else 1.0) if keep else 0.0
            tokens.append({
                "b": b, "t": t, "d": d[t], "keep": keep, "outside": outside, "rejected": rejected,
                "high": weighted and ratio > high, "low": weighted and ratio < low, "lag": min(8, lag[b][t]),
            })  # fmt: skip
    kept = [x for x in tokens if x["keep"]]
    if kept and options.normalise != "none":
        by_row = [[weights[x["b"]][x["t"]] for x in kept if x["b"] == b] for b in range(len(mask))]
        flat = [w for row in by_row for w in row]
        means = [sum(row) / len(row) for row in by_row if row]
        divisor = sum(flat) / len(flat) if options.normalise == "token" else sum(means) / len(means)
        weights = [[w / divisor for w in row] for row in weights]
    return weights, slow_metrics(tokens, weights)


def slow_metrics(tokens, weights):
    n, used = len(tokens), [weights[x["b"]][x["t"]] for x in tokens]
    rows = {b: [x for x in tokens if x["b"] == b] for b in {x["b"] for x in tokens}}
    rho, squares = [math.exp(x["d"]) for x in tokens], sum(w * w for w in used)
    metrics = {
        "num_tokens": n,
        "kl": -sum(x["d"] for x in tokens) / n,
        "k3": sum(math.exp(x["d"]) - 1 - x["d"] for x in tokens) / n,
        "chi2_token": sum(r * r for r in rho) / n - 1,
        "chi2_sequence": sum(math.exp(limit(2 * sum(x["d"] for x in row))) for row in rows.values()) / len(rows) - 1,
        "ess": sum(used) ** 2 / (n * squares) if squares else 0.0,
        "rho_mean": sum(rho) / n, "rho_max": max(rho), "rho_min": min(rho), "weight_mean": sum(used) / n,
        "clipped_high_fraction": sum(x["high"] for x in tokens) / n,
        "clipped_low_fraction": sum(x["low"] for x in tokens) / n,
        "band_masked_fraction": sum(x["outside"] for x in tokens) / n,
        "rejected_fraction": sum(x["rejected"] for x in tokens) / n,
        "kept_fraction": sum(x["keep"] for x in tokens) / n,
        "kept_sequence_fraction": sum(any(x["keep"] for x in row) for row in rows.values()) / len(rows),
        "all_rejected": float(not any(x["keep"] for x in tokens)),
    }  # fmt: skip
    for k in {x["lag"] for x in tokens}:
        bucket = [abs(x["d"]) for x in tokens if x["lag"] == k]
        metrics[f"lag_{k}/abs_log_rho"], metrics[f"lag_{k}/token_fraction"] = sum(bucket) / len(bucket), len(bucket) / n
    return {f"correction/{k}": v for k, v in metrics.items()}


def run(batch, options):
    return correct(
        train_logprobs_BT=batch.proximal, rollout_logprobs_BT=batch.behaviour, mask_BT=batch.mask, options=options,
        segment_ids_BT=batch.segments, version_lag_BT=batch.lag,
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("normalise", ["none", "token", "sequence"])
def test_weights_and_metrics_match_a_loop(level, normalise, make_batch):
    for (i, rules), bounds in itertools.product(enumerate(RULES), BOUNDS):
        batch = make_batch(i)
        options = CorrectionOptions(weight_level=level, rejections=rules, normalise=normalise, **bounds)
        result = run(batch, options)
        weights, metrics = slow_correct(batch, options)
        torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-11, atol=0)
        assert torch.equal(result.keep, result.weights > 0)
        assert correction_metrics(sums=result.sums) == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_the_rules_above_reject_some_and_keep_some(make_batch):
    for i, rules in enumerate(RULES[1:], 1):
        fractions = [
            correction_metrics(sums=run(make_batch(s), CorrectionOptions(rejections=rules)).sums) for s in range(4)
        ]
        rejected = [m["correction/rejected_fraction"] for m in fractions]
        assert 0 < sum(rejected) < len(rejected), f"rule {i} decides nothing"


def add_up(parts: list[Correction]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.sums.items():
            pick = max if key.endswith("_max") else min if key.endswith("_min") else lambda a, b: a + b
            total[key] = pick(total[key], float(value)) if key in total else float(value)
    return total


@pytest.mark.parametrize("level", LEVELS)
def test_sums_of_micro_batches_give_the_metrics_of_the_batch(level, make_batch):
    batch, options = make_batch(3, rows=6), CorrectionOptions(weight_level=level, rejections=RULES[6], band_low=0.7)
    whole, parts = run(batch, options), []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = make_batch(3, rows=6)
        for field in ("proximal", "behaviour", "mask", "segments", "lag"):
            setattr(part, field, getattr(batch, field)[rows])
        parts.append(run(part, options))
    assert torch.equal(torch.cat([p.weights for p in parts]), whole.weights)
    assert correction_metrics(sums=add_up(parts)) == pytest.approx(correction_metrics(sums=whole.sums), rel=1e-12)


def test_nothing_valid_gives_zero_metrics():
    empty = torch.full((2, 3), torch.nan)
    result = correct(
        train_logprobs_BT=empty, rollout_logprobs_BT=empty, mask_BT=torch.zeros(2, 3).bool(),
        options=CorrectionOptions(weight_level="sequence", normalise="token", rejections=RULES[3]),
        version_lag_BT=torch.zeros(2, 3).long(),
    )  # fmt: skip
    assert torch.equal(result.weights, torch.zeros(2, 3)) and not result.keep.any()
    assert set(correction_metrics(sums=result.sums).values()) == {0.0}


def test_sequence_ratio_is_clamped_again(make_batch):
    mask = torch.ones(1, 4).bool()
    train, rollout = torch.full((1, 4), -1.0).double(), torch.full((1, 4), -10.0).double()
    options = CorrectionOptions(weight_level="sequence", weight_upper=None)
    result = correct(train_logprobs_BT=train, rollout_logprobs_BT=rollout, mask_BT=mask, options=options)
    assert float(result.weights.max()) == pytest.approx(math.exp(20))


def test_corrections_carry_no_gradient(make_batch):
    batch = make_batch(1)
    batch.proximal, batch.behaviour = batch.proximal.requires_grad_(), batch.behaviour.requires_grad_()
    result = run(batch, CorrectionOptions(normalise="token"))
    assert not result.weights.requires_grad and not any(v.requires_grad for v in result.sums.values())


@pytest.mark.parametrize("seed", range(3))
def test_interpolated_proximal_matches_a_loop(seed, make_batch):
    batch = make_batch(seed)
    lag = torch.where(batch.mask, batch.lag, -3)
    result = interpolate_proximal(
        logprobs_BT=batch.logprobs.requires_grad_(), behaviour_logprobs_BT=batch.behaviour, version_lag_BT=lag,
        mask_BT=batch.mask,
    )  # fmt: skip
    assert not result.requires_grad
    for b, t in itertools.product(range(batch.rows), range(batch.length)):
        v = int(batch.lag[b, t])
        alpha = 0.0 if v == 0 else 1 / v
        valid = bool(batch.mask[b, t])
        current, behaviour = float(batch.logprobs[b, t].detach()), float(batch.behaviour[b, t])
        assert float(result[b, t]) == pytest.approx(alpha * behaviour + (1 - alpha) * current if valid else 0.0)


def test_a_token_from_the_future_is_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="negative lag"):
        interpolate_proximal(logprobs_BT=one, behaviour_logprobs_BT=one, version_lag_BT=-one.long(), mask_BT=one.bool())


@pytest.mark.parametrize(
    "bad",
    [
        {"weight_level": "row"}, {"normalise": "batch"}, {"weight_upper": 0.0}, {"weight_upper": math.nan},
        {"weight_lower": -0.1}, {"weight_lower": 3.0}, {"band_low": -1.0}, {"band_high": 0.0},
        {"band_low": 2.0, "band_high": 1.0}, {"band_high": math.inf},
    ],
    ids=str,
)  # fmt: skip
def test_out_of_range_corrections_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CorrectionOptions(**bad)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"statistic": "k4", "aggregation": "token", "high": 1.0}, "statistic"),
        ({"statistic": "k1", "aggregation": "row", "high": 1.0}, "aggregation"),
        ({"statistic": "k1", "aggregation": "token"}, "high"),
        ({"statistic": "k2", "aggregation": "token", "low": 0.1, "high": 1.0}, "low"),
        ({"statistic": "k3", "aggregation": "token", "high": 0.0}, "high"),
        ({"statistic": "k1", "aggregation": "token", "low": 0.0}, "low"),
        ({"statistic": "k1", "aggregation": "token", "low": 2.0, "high": 1.0}, "low"),
        ({"statistic": "k1", "aggregation": "token", "high": math.nan}, "high"),
    ],
)
def test_out_of_range_rules_name_the_field(bad, field):
    with pytest.raises(ValueError, match=field):
        RejectionRule(**bad)


def test_segment_weights_need_segments():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="segment"):
        correct(
            train_logprobs_BT=one, rollout_logprobs_BT=one, mask_BT=one.bool(),
            options=CorrectionOptions(weight_level="segment"),
        )  # fmt: skip


def test_the_behaviour_policy_is_corrected_once():
    weighted = ("ppo", "tis", "cispo", "topr", "gspo", "gmpo", "sapo", "clip_cov", "kl_cov", "m2po")
    for name in weighted:
        with pytest.raises(ValueError, match="twice"):
            check_no_double_correction(loss_name=name, ratio_base="behaviour", weight_level="token")
        check_no_double_correction(loss_name=name, ratio_base="proximal", weight_level="token")
        check_no_double_correction(loss_name=name, ratio_base="behaviour", weight_level="none")
    with pytest.raises(ValueError, match="twice"):
        check_no_double_correction(loss_name="decoupled_ppo", ratio_base="proximal", weight_level="sequence")
    check_no_double_correction(loss_name="decoupled_ppo", ratio_base="proximal", weight_level="none")
    for name in ("vanilla", "gpg", "kimi15"):
        check_no_double_correction(loss_name=name, ratio_base="behaviour", weight_level="token")
    with pytest.raises(ValueError, match="vanilla"):
        check_no_double_correction(loss_name="pppo", ratio_base="behaviour", weight_level="none")


def one_row(d, mask=None, **options):
    """Weights of a row with log ratios `d`."""
    train = torch.tensor([d], dtype=torch.float64)
    valid = torch.ones_like(train).bool() if mask is None else torch.tensor([mask]).bool()
    return correct(
        train_logprobs_BT=train, rollout_logprobs_BT=torch.zeros_like(train), mask_BT=valid,
        options=CorrectionOptions(weight_level="none", **options),
    )  # fmt: skip


def test_bounds_are_inside():
    half, double = math.log(0.5), math.log(2.0)
    for aggregation in ("token", "sequence_max"):
        rule = RejectionRule(statistic="k1", aggregation=aggregation, low=0.5, high=2.0)
        assert one_row([half, double], rejections=(rule,)).keep.all()
    assert one_row([0.0], band_low=1.0, band_high=1.0).keep.all()
    assert one_row([2.0], rejections=(RejectionRule(statistic="k2", aggregation="token", high=2.0),)).keep.all()


def test_masked_tokens_do_not_reject_their_row():
    rule = RejectionRule(statistic="k1", aggregation="sequence_max", low=1.5)
    kept = one_row([0.5, math.nan, 0.6], [True, False, True], rejections=(rule,)).keep
    assert kept.tolist() == [[True, False, True]]


def test_squared_row_ratios_are_clamped_once_more():
    sums = one_row([5.0, 5.0, 5.0]).sums
    assert float(sums["correction/sequence_rho_squared"]) == pytest.approx(math.exp(20.0))
    assert float(one_row([-5.0, -6.0]).sums["correction/sequence_rho_squared"]) == pytest.approx(math.exp(-20.0))
