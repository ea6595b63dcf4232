"""Aggregation: against a loop, and invariant to how a batch is cut into micro-batches, ordered and padded."""

import math

import pytest
import torch

from roll_async.algorithms.aggregation import (
    AGGREGATION_MODES,
    Denominators,
    aggregate,
    count_denominators,
    reduce_metrics,
    sum_denominators,
)
from roll_async.algorithms.correction import CorrectionOptions, correct
from roll_async.algorithms.kl import kl_estimate
from roll_async.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS

FIELDS = ("logprobs", "proximal", "behaviour", "advantages", "segments", "selection", "mask")


def slow_aggregate(loss, mask, mode, tokens, sequences, length, weights):
    total = 0.0
    for b in range(len(loss)):
        valid = [t for t in range(len(loss[b])) if mask[b][t]]
        row = math.fsum(weights[b][t] * loss[b][t] for t in valid if weights[b][t] != 0)
        match mode:
            case "token-mean":
                total += row / tokens
            case "seq-mean-token-sum":
                total += row / sequences
            case "seq-mean-token-mean":
                total += row / len(valid) / sequences if valid else 0
            case "token-sum":
                total += row
            case "seq-mean-token-sum-norm":
                total += row / (sequences * length)
    return total


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_aggregate_matches_a_loop(mode, seed, make_batch):
    batch = make_batch(seed)
    weights = torch.where(batch.selection, batch.behaviour.exp(), 0.0)
    loss = torch.where(batch.selection, batch.logprobs, torch.nan)  # a weight of 0 hides whatever is there
    denominators = Denominators(global_tokens=31, global_sequences=7, normalizer_length=12)
    result = aggregate(loss_BT=loss, mask_BT=batch.mask, mode=mode, denominators=denominators, weights_BT=weights)
    expected = slow_aggregate(loss.tolist(), batch.mask.tolist(), mode, 31, 7, 12, weights.tolist())
    assert float(result) == pytest.approx(expected, rel=1e-12)


def objective(batch, rows, denominators, mode, name):
    """Policy loss with correction plus a KL term for some rows of a batch: (value, gradient of those rows, metrics)."""
    part = {f: getattr(batch, f)[rows] for f in FIELDS}
    leaf = part["logprobs"].clone().requires_grad_()
    weights = correct(
        train_logprobs_BT=part["proximal"], rollout_logprobs_BT=part["behaviour"], mask_BT=part["mask"],
        options=CorrectionOptions(weight_level="segment", band_low=0.7), segment_ids_BT=part["segments"],
    ).weights  # fmt: skip
    inputs = PolicyLossInputs(
        logprobs=leaf, proximal_logprobs=part["proximal"], behaviour_logprobs=part["behaviour"],
        advantages=part["advantages"], mask=part["mask"], scores=batch.scores[rows],
        segment_ids=part["segments"], selection=part["selection"],
    )  # fmt: skip
    loss, metrics = POLICY_LOSSES[name](inputs, options=POLICY_LOSS_OPTIONS[name]())
    kl = kl_estimate(logprobs_BT=leaf, ref_logprobs_BT=part["behaviour"], mask_BT=part["mask"], estimator="k3+")
    shared = {"mask_BT": part["mask"], "mode": mode, "denominators": denominators}
    total = aggregate(loss_BT=loss, weights_BT=weights, **shared) + 0.1 * aggregate(loss_BT=kl, **shared)
    total.backward()
    return total.detach(), leaf.grad, metrics


def check_split(batch, name, mode, order, cuts):
    """Rows in any order, cut anywhere: the sums of values and gradients equal the one-shot result."""
    everything = torch.arange(batch.rows)
    whole = count_denominators(mask_BT=batch.mask, normalizer_length=9)
    value, gradient, metrics = objective(batch, everything, whole, mode, name)
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, batch.rows], strict=True) if a < b]
    counts = [count_denominators(mask_BT=batch.mask[rows], normalizer_length=9) for rows in parts]
    denominators = sum_denominators(parts=counts)
    assert denominators == whole
    results = [objective(batch, rows, denominators, mode, name) for rows in parts]
    torch.testing.assert_close(torch.stack([v for v, _, _ in results]).sum(), value, rtol=1e-10, atol=1e-13)
    together = torch.zeros_like(gradient)
    for rows, (_, part, _) in zip(parts, results, strict=True):
        together[rows] = part
    torch.testing.assert_close(together, gradient, rtol=1e-10, atol=1e-14)
    merged = reduce_metrics(parts=[m for _, _, m in results], denominators=denominators)
    assert merged == pytest.approx(reduce_metrics(parts=[metrics], denominators=whole), rel=1e-10, abs=1e-13)


def check_padding(batch, name, mode, width):
    """More padding columns, full of NaN, change nothing; masked columns inside the row neither."""
    whole = count_denominators(mask_BT=batch.mask, normalizer_length=9)
    rows = torch.arange(batch.rows)
    value, gradient, _ = objective(batch, rows, whole, mode, name)
    for field in FIELDS:
        x = getattr(batch, field)
        fill = torch.nan if x.is_floating_point() else 0
        setattr(batch, field, torch.nn.functional.pad(x, (width, width), value=fill))
    padded_value, padded_gradient, _ = objective(batch, rows, whole, mode, name)
    torch.testing.assert_close(padded_value, value, rtol=1e-12, atol=1e-14)
    inner = padded_gradient[:, width : padded_gradient.shape[1] - width]
    torch.testing.assert_close(inner, gradient, rtol=1e-12, atol=1e-15)
    assert int((padded_gradient != 0).sum()) == int((inner != 0).sum())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_any_split_and_order_gives_the_same_step(name, seed, make_batch):
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for mode in AGGREGATION_MODES:
        check_split(make_batch(seed, rows=5), name, mode, order, [1, 3])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_padding_width_changes_nothing(name, make_batch):
    for mode in AGGREGATION_MODES:
        check_padding(make_batch(8), name, mode, 3)


@pytest.mark.slow
def test_invariance_on_drawn_shapes(make_batch):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def search(data):
        rows, length = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
        seed, name = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from(list(POLICY_LOSSES)))
        mode = data.draw(st.sampled_from(AGGREGATION_MODES))
        order = torch.tensor(data.draw(st.permutations(range(rows))))
        cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
        hypothesis.assume(bool(make_batch(seed, rows, length).mask.any()))
        check_split(make_batch(seed, rows, length), name, mode, order, cuts)
        check_padding(make_batch(seed, rows, length), name, mode, data.draw(st.integers(0, 4)))

    search()


def test_a_denominator_of_zero_gives_zero_with_zero_gradient():
    loss = torch.full((2, 3), torch.inf).requires_grad_()
    for mode in AGGREGATION_MODES:
        loss.grad = None
        zero = Denominators(global_tokens=0, global_sequences=0, normalizer_length=4)
        total = aggregate(loss_BT=loss, mask_BT=torch.ones(2, 3).bool(), mode=mode, denominators=zero)
        total.backward()
        assert float(total.detach()) == 0 and torch.equal(loss.grad, torch.zeros(2, 3))


def test_weights_are_constants(make_batch):
    batch = make_batch(2)
    weights = torch.ones_like(batch.logprobs).requires_grad_()
    leaf = batch.logprobs.clone().requires_grad_()
    whole = count_denominators(mask_BT=batch.mask, normalizer_length=9)
    aggregate(loss_BT=leaf, mask_BT=batch.mask, denominators=whole, weights_BT=weights).backward()
    assert weights.grad is None
    torch.testing.assert_close(leaf.grad, batch.mask.double() / whole.global_tokens)


def test_the_counts_of_a_batch():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    counted = count_denominators(mask_BT=mask, normalizer_length=5)
    assert counted == Denominators(global_tokens=3, global_sequences=2, normalizer_length=5)
    doubled = sum_denominators(parts=[counted, counted])
    assert doubled == Denominators(global_tokens=6, global_sequences=4, normalizer_length=5)


def test_bad_denominators_modes_and_masks_are_refused():
    one = Denominators(global_tokens=1, global_sequences=1, normalizer_length=1)
    with pytest.raises(ValueError, match="normalizer_length"):
        sum_denominators(parts=[one, Denominators(global_tokens=1, global_sequences=1, normalizer_length=2)])
    with pytest.raises(ValueError, match="normalizer_length"):
        sum_denominators(parts=[])
    with pytest.raises(ValueError, match="normalizer_length"):
        Denominators(global_tokens=1, global_sequences=1, normalizer_length=0)
    with pytest.raises(ValueError, match=r"token-mean \| seq-mean"):
        aggregate(loss_BT=torch.ones(1, 1), mask_BT=torch.ones(1, 1).bool(), mode="mean", denominators=one)
    with pytest.raises(ValueError, match="bool"):
        aggregate(loss_BT=torch.ones(1, 1), mask_BT=torch.ones(1, 1), denominators=one)
    with pytest.raises(ValueError, match="bool"):
        count_denominators(mask_BT=torch.ones(1, 1).long(), normalizer_length=1)


def test_metrics_merge_by_key():
    parts = [
        {
            "a": torch.tensor(2.0),
            "r_max": torch.tensor(3.0),
            "r_min": torch.tensor(1.0),
            "s_max": torch.tensor(-math.inf),
        },
        {"a": torch.tensor(4.0), "r_max": torch.tensor(5.0), "r_min": torch.tensor(math.inf), "b": torch.tensor(1.0)},
    ]
    four = Denominators(global_tokens=4, global_sequences=1, normalizer_length=1)
    assert reduce_metrics(parts=parts, denominators=four) == {"a": 1.5, "b": 0.25, "r_max": 5.0, "r_min": 1.0}
    none = Denominators(global_tokens=0, global_sequences=0, normalizer_length=1)
    assert reduce_metrics(parts=parts, denominators=none)["a"] == 0.0
    assert reduce_metrics(parts=[], denominators=four) == {}
