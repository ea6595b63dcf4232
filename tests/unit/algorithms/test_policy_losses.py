"""Every policy loss against a loop over Python floats, and the rules that hold for all of them."""

import dataclasses
import math

import pytest
import torch

from roll_async.algorithms.aggregation import aggregate, count_denominators
from roll_async.algorithms.policy_losses import POLICY_LOSSES, ZERO_GRADIENT_WITHOUT_ADVANTAGE, PolicyLossInputs
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS

CASES = [
    ("vanilla", {}),
    ("vanilla", {"ratio_base": "proximal"}),
    ("gpg", {}),
    *[("ppo", {"ratio_level": level}) for level in ("token", "sequence", "segment")],
    *[("ppo", {"ratio_level": level, "ratio_base": "behaviour"}) for level in ("token", "sequence", "segment")],
    ("ppo", {"clip_low": 0.05, "clip_high": 0.4, "dual_clip": 1.1}),
    ("ppo", {"dual_clip": None}),
    ("decoupled_ppo", {}),
    ("decoupled_ppo", {"ratio_level": "segment", "weight_low": 0.9, "weight_high": 1.1, "dual_clip": 1.2}),
    ("decoupled_ppo", {"ratio_level": "sequence", "dual_clip": None}),
    *[("tis", {"ratio_level": level}) for level in ("token", "sequence", "segment", "sequence_product")],
    ("tis", {"ratio_base": "proximal", "tis_lower_bound": 0.8, "tis_upper_bound": 1.3}),
    *[("cispo", {"ratio_level": level}) for level in ("token", "sequence", "segment", "sequence_product")],
    ("cispo", {"cispo_epsilon_low": 2.0, "cispo_epsilon_high": 0.3, "cispo_use_unified_mask": True}),
    ("cispo", {"cispo_use_unified_mask": True}),
    *[("topr", {"ratio_level": level}) for level in ("token", "sequence", "segment", "sequence_product")],
    ("topr", {"topr_positive_weight": 0.7, "topr_negative_weight": 0.3, "ratio_base": "proximal"}),
    ("kimi15", {"kimi15_tau": 0.5}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("gmpo", {"clip_low": 0.2, "clip_high": 0.1}),
    ("gmpo", {"ratio_base": "behaviour"}),
    ("sapo", {"tau_positive": 1.3, "tau_negative": 0.8}),
    ("clip_cov", {}),
    ("kl_cov", {"kl_coefficient": 0.3}),
    ("m2po", {}),
    ("dppo_tv", {"divergence_low": 0.05, "divergence_high": 0.02}),
    ("dppo_tv", {"ratio_base": "proximal", "ratio_cap": 1.1}),
    ("dppo_kl", {"divergence_low": 0.01, "divergence_high": 0.005}),
    ("dppo_kl", {}),
    ("kpop", {"divergence": 0.008}),
    ("kpop", {"ratio_base": "proximal", "ratio_cap": 0.9}),
    ("vespo", {}),
    ("vespo", {"k_positive": 0.5, "lambda_positive": 0.0, "k_negative": 1.0, "lambda_negative": 4.0}),
]  # fmt: skip
IDS = [f"{name}-{'-'.join(str(v) for v in options.values())}" for name, options in CASES]


def limit(x: float) -> float:
    return min(20.0, max(-20.0, x))


def clip(x: float, low: float, high: float) -> float:
    return min(high, max(low, x))


class SlowLoss:
    """The table of the specification, one token at a time. `frozen` stands for every stop-gradient."""

    def __init__(self, name, options, batch):
        self.name, self.o, self.batch = name, options, batch
        self.mask = batch.mask.tolist()
        self.prox, self.beh = batch.proximal.tolist(), batch.behaviour.tolist()
        self.adv, self.seg, self.sel = batch.advantages.tolist(), batch.segments.tolist(), batch.selection.tolist()
        self.base = self.prox if options.ratio_base == "proximal" else self.beh
        default = {"gspo": "sequence", "vespo": "sequence_product"}.get(name, "token")
        self.level = getattr(options, "ratio_level", default)

    def valid(self, b):
        return [t for t, m in enumerate(self.mask[b]) if m]

    def tokens(self):
        return [(b, t) for b in range(len(self.mask)) for t in self.valid(b)]

    def members(self, b, t):
        if self.level == "token":
            return [t]
        if self.level == "segment":
            return [s for s in self.valid(b) if self.seg[b][s] == self.seg[b][t]]
        return self.valid(b)

    def ratio(self, lp, frozen, b, t):
        terms = [frozen[b][s] - self.base[b][s] for s in self.members(b, t)]
        centre = math.fsum(terms)
        if self.level != "sequence_product":
            centre /= len(terms)
        return math.exp(limit(centre + lp[b][t] - frozen[b][t]))

    def surrogate(self, r, a, dual_clip):
        o = self.o
        loss = -min(r * a, clip(r, 1 - o.clip_low, 1 + o.clip_high) * a)
        return min(loss, -dual_clip * a) if dual_clip is not None and a < 0 else loss

    def token(self, lp, frozen, b, t):
        o, a, x = self.o, self.adv[b][t], lp[b][t]
        delta = x - self.base[b][t]
        r, fixed = self.ratio(lp, frozen, b, t), self.ratio(frozen, frozen, b, t)
        match self.name:
            case "vanilla" | "gpg":
                return -a * x
            case "ppo":
                return self.surrogate(r, a, o.dual_clip)
            case "decoupled_ppo":
                w = clip(math.exp(limit(self.prox[b][t] - self.beh[b][t])), o.weight_low, o.weight_high)
                return w * self.surrogate(r, a, o.dual_clip)
            case "tis":
                return -clip(fixed, o.tis_lower_bound, o.tis_upper_bound) * a * x
            case "cispo":
                low, high = max(0.0, 1 - o.cispo_epsilon_low), 1 + o.cispo_epsilon_high
                if o.cispo_use_unified_mask and ((a > 0 and fixed > high) or (a < 0 and fixed < low)):
                    return 0.0
                return -clip(fixed, low, high) * a * x
            case "topr":
                if float(self.batch.scores[b]) > 0:
                    return -o.topr_positive_weight * a * x
                return -o.topr_negative_weight * clip(fixed, 0, 1) * a * x
            case "kimi15":
                return -a * x + o.kimi15_tau / 2 * delta**2
            case "gspo":
                return self.surrogate(r, a, None)
            case "gmpo":
                held = []
                for s in self.valid(b):
                    d = lp[b][s] - self.base[b][s]
                    held.append(min(d, o.clip_high) if self.adv[b][s] >= 0 else max(d, -o.clip_low))
                return -a * math.exp(limit(math.fsum(held) / len(held)))
            case "sapo":
                tau = o.tau_positive if a > 0 else o.tau_negative
                return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
            case "clip_cov":
                return 0.0 if self.sel[b][t] else self.surrogate(r, a, None)
            case "kl_cov":
                return -a * r + (o.kl_coefficient * abs(delta) if self.sel[b][t] else 0.0)
            case "m2po":
                return -a * r if self.sel[b][t] else 0.0
            case "dppo_tv" | "dppo_kl" | "kpop":
                return 0.0 if any(self.outside(frozen, b, t)) else -min(fixed, o.ratio_cap) * a * x
            case "vespo":
                return -self.kernel(fixed, a) * a * x

    def kernel(self, w, a):
        o = self.o
        k, decay = (o.k_positive, o.lambda_positive) if a >= 0 else (o.k_negative, o.lambda_negative)
        return w**k * math.exp(decay * (1 - w))

    def outside(self, lp, b, t):
        """(masked on the way up, on the way down)."""
        o, a = self.o, self.adv[b][t]
        p, q = (math.exp(min(0.0, x)) for x in (lp[b][t], self.base[b][t]))
        others = math.log(max(1 - q, 1e-8)) - math.log(max(1 - p, 1e-8))
        kl = q * -limit(lp[b][t] - self.base[b][t]) + (1 - q) * others
        if self.name == "kpop":
            up, gap = lp[b][t] > self.base[b][t], limit(lp[b][t] - self.base[b][t])
            apart = max(kl, p * gap - (1 - p) * others) > o.divergence
            return apart and up, apart and not up
        moved = abs(p - q) if self.name == "dppo_tv" else kl
        return a > 0 and p > q and moved > o.divergence_high, a <= 0 and p < q and moved > o.divergence_low

    def flags(self, lp, b, t):
        """Metrics beyond the common ones; sums over tokens."""
        o, a, d, r = self.o, self.adv[b][t], lp[b][t] - self.base[b][t], self.ratio(lp, lp, b, t)
        w = math.exp(limit(self.prox[b][t] - self.beh[b][t]))
        positive = float(self.batch.scores[b]) > 0
        result = {}
        if self.name in ("ppo", "decoupled_ppo", "gspo", "clip_cov"):
            result["clip_high"], result["clip_low"] = a > 0 and r > 1 + o.clip_high, a < 0 and r < 1 - o.clip_low
        if self.name in ("ppo", "decoupled_ppo"):
            result["dual_clip"] = o.dual_clip is not None and a < 0 and r > o.dual_clip
        if self.name == "decoupled_ppo":
            result["behaviour_weight"] = clip(w, o.weight_low, o.weight_high)
            result["behaviour_weight_clipped"] = not o.weight_low <= w <= o.weight_high
        if self.name == "tis":
            result["clip_high"], result["clip_low"] = r > o.tis_upper_bound, r < o.tis_lower_bound
        if self.name == "cispo":
            low, high = max(0.0, 1 - o.cispo_epsilon_low), 1 + o.cispo_epsilon_high
            result["clip_high"], result["clip_low"] = r > high, r < low
            if o.cispo_use_unified_mask:
                result["unified_masked"] = (a > 0 and r > high) or (a < 0 and r < low)
        if self.name == "topr":
            result["positive_tokens"], result["clip_high"] = positive, not positive and r > 1
        if self.name == "kimi15":
            result["regulariser"] = o.kimi15_tau / 2 * d**2
        if self.name == "gmpo":
            result["clip_high"], result["clip_low"] = a >= 0 and d > o.clip_high, a < 0 and d < -o.clip_low
        if self.name in ("clip_cov", "kl_cov"):
            result["selected"] = self.sel[b][t]
        if self.name == "m2po":
            result["kept"] = self.sel[b][t]
        if self.name in ("dppo_tv", "dppo_kl", "kpop"):
            result["clip_high"], result["clip_low"] = self.outside(lp, b, t)
        if self.name == "vespo":
            result["vespo_weight"] = self.kernel(r, a)
        return result


def evaluate(name, options, batch):
    """(loss, metrics, gradient of a fixed random weighting, the weighting)."""
    leaf = batch.logprobs.clone().requires_grad_()
    loss, metrics = POLICY_LOSSES[name](batch.inputs(leaf), options=options)
    weighting = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).view_as(loss)
    (loss * weighting).sum().backward()
    return loss.detach(), metrics, leaf.grad, weighting


@pytest.mark.parametrize(("name", "given"), CASES, ids=IDS)
def test_loss_metrics_and_gradient_match_a_loop_over_tokens(name, given, make_batch):
    for seed in range(2):
        options, batch = POLICY_LOSS_OPTIONS[name](**given), make_batch(seed)
        loss, metrics, gradient, weighting = evaluate(name, options, batch)
        slow, frozen = SlowLoss(name, options, batch), batch.logprobs.tolist()
        expected, slope = torch.zeros_like(loss), torch.zeros_like(loss)
        for b, t in slow.tokens():
            expected[b, t] = slow.token(frozen, frozen, b, t)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
        for b, t in slow.tokens():
            readers = slow.valid(b) if name == "gmpo" else [t]
            for sign in (1, -1):
                moved = [list(row) for row in frozen]
                moved[b][t] += sign * 1e-6
                slope[b, t] += (
                    sign * sum(float(weighting[b, s]) * slow.token(moved, frozen, b, s) for s in readers) / 2e-6
                )
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-8)
        check_metrics(metrics, slow, frozen)


def check_metrics(metrics, slow, frozen):
    ratios = [slow.ratio(frozen, frozen, b, t) for b, t in slow.tokens()]
    deltas = [frozen[b][t] - slow.base[b][t] for b, t in slow.tokens()]
    expected = {
        "ratio": sum(ratios), "ratio_max": max(ratios), "ratio_min": min(ratios), "kl_k1": -sum(deltas),
        "kl_k3": sum(math.exp(limit(d)) - 1 - limit(d) for d in deltas),
    }  # fmt: skip
    for b, t in slow.tokens():
        for key, value in slow.flags(frozen, b, t).items():
            expected[key] = expected.get(key, 0.0) + float(value)
    assert {key: float(v) for key, v in metrics.items()} == pytest.approx(
        {f"policy/{key}": v for key, v in expected.items()}, rel=1e-10, abs=1e-12
    )
    assert all(not v.requires_grad and v.ndim == 0 for v in metrics.values())


@pytest.mark.parametrize(("name", "given"), CASES, ids=IDS)
def test_what_is_masked_reaches_neither_value_nor_gradient(name, given, make_batch):
    options, batch = POLICY_LOSS_OPTIONS[name](**given), make_batch(5)
    loss, metrics, gradient, _ = evaluate(name, options, batch)
    for tensor in (loss, gradient):
        assert torch.equal(tensor[~batch.mask], torch.zeros_like(tensor[~batch.mask]))
        assert torch.isfinite(tensor).all()
    other = make_batch(5)
    for field in ("logprobs", "proximal", "behaviour", "advantages"):
        setattr(other, field, torch.where(other.mask, getattr(other, field), 3.0))
    clean_loss, clean_metrics, clean_gradient, _ = evaluate(name, options, other)
    assert torch.equal(loss, clean_loss) and torch.equal(gradient, clean_gradient)
    assert all(torch.equal(metrics[key], clean_metrics[key]) for key in metrics)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (2, 0)], ids=["all-masked", "no-rows", "no-tokens"])
def test_nothing_valid_gives_zero_that_back_propagates(name, shape):
    def full(value):
        return torch.full(shape, value)

    leaf = full(torch.nan).requires_grad_()
    inputs = PolicyLossInputs(
        logprobs=leaf, proximal_logprobs=full(torch.nan), behaviour_logprobs=full(torch.inf),
        advantages=full(torch.nan),
        mask=torch.zeros(shape, dtype=torch.bool), scores=torch.full(shape[:1], torch.nan),
        segment_ids=torch.zeros(shape, dtype=torch.long), selection=torch.ones(shape, dtype=torch.bool),
    )  # fmt: skip
    loss, metrics = POLICY_LOSSES[name](inputs, options=POLICY_LOSS_OPTIONS[name]())
    total = aggregate(
        loss_BT=loss, mask_BT=inputs.mask, denominators=count_denominators(mask_BT=inputs.mask, normalizer_length=8)
    )
    total.backward()
    assert float(total.detach()) == 0.0 and torch.equal(leaf.grad, torch.zeros(shape))
    assert float(metrics["policy/ratio_max"]) == -math.inf and float(metrics["policy/ratio_min"]) == math.inf
    assert all(float(v) == 0 for key, v in metrics.items() if not key.endswith(("_max", "_min")))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_logprobs_carry_a_gradient(name, make_batch):
    batch = make_batch(3)
    leaves = {
        f: getattr(batch, f).clone().requires_grad_()
        for f in ("logprobs", "proximal", "behaviour", "advantages", "scores")
    }
    for field, leaf in leaves.items():
        setattr(batch, field, leaf)
    loss, _ = POLICY_LOSSES[name](batch.inputs(), options=POLICY_LOSS_OPTIONS[name]())
    loss.sum().backward()
    assert leaves["logprobs"].grad is not None
    assert all(leaf.grad is None for field, leaf in leaves.items() if field != "logprobs")


@pytest.mark.parametrize(("name", "given"), CASES, ids=IDS)
def test_without_advantage_the_gradient_is_exactly_zero_for_the_losses_that_promise_it(name, given, make_batch):
    batch = make_batch(7)
    batch.advantages = torch.zeros_like(batch.advantages)
    batch.logprobs = batch.logprobs.clone().requires_grad_()
    loss, _ = POLICY_LOSSES[name](batch.inputs(), options=POLICY_LOSS_OPTIONS[name](**given))
    loss.sum().backward()
    zero_gradient = not bool(batch.logprobs.grad.any())
    assert zero_gradient == (name in ZERO_GRADIENT_WITHOUT_ADVANTAGE)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_half_precision_inputs_are_computed_in_float32(name, make_batch):
    batch = make_batch(4)
    for field in ("logprobs", "proximal", "behaviour", "advantages", "scores"):
        setattr(batch, field, getattr(batch, field).bfloat16())
    loss, metrics = POLICY_LOSSES[name](batch.inputs(), options=POLICY_LOSS_OPTIONS[name]())
    for field in ("logprobs", "proximal", "behaviour", "advantages", "scores"):
        setattr(batch, field, getattr(batch, field).float())
    expected, _ = POLICY_LOSSES[name](batch.inputs(), options=POLICY_LOSS_OPTIONS[name]())
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    assert all(v.dtype == torch.float32 for v in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_log_ratio_of_hundreds_stays_finite(name, make_batch):
    batch = make_batch(6)
    batch.logprobs = torch.where(batch.mask, batch.logprobs - 500, batch.logprobs)
    batch.behaviour = torch.where(batch.mask, batch.behaviour - 1000, batch.behaviour)
    loss, metrics, gradient, _ = evaluate(name, POLICY_LOSS_OPTIONS[name](), batch)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert float(metrics["policy/ratio_max"]) <= math.exp(20) * (1 + 1e-12)
    assert float(metrics["policy/ratio_min"]) >= math.exp(-20) * (1 - 1e-12)


def test_the_slope_is_zero_where_the_log_ratio_is_clamped():
    def slope(logprob):
        leaf, one = (
            torch.tensor([[logprob]], dtype=torch.float64, requires_grad=True),
            torch.ones(1, 1, dtype=torch.float64),
        )
        inputs = PolicyLossInputs(
            logprobs=leaf, proximal_logprobs=0 * one, behaviour_logprobs=0 * one, advantages=-one,
            mask=one.bool(), scores=one[0], selection=one.bool(),
        )  # fmt: skip
        POLICY_LOSSES["m2po"](inputs, options=POLICY_LOSS_OPTIONS["m2po"]())[0].sum().backward()
        return float(leaf.grad)

    assert slope(19.0) == pytest.approx(math.exp(19.0)) and slope(21.0) == 0.0


def test_the_regulariser_of_kimi15_is_not_clamped():
    leaf, one = torch.tensor([[-50.0]], dtype=torch.float64, requires_grad=True), torch.ones(1, 1, dtype=torch.float64)
    inputs = PolicyLossInputs(
        logprobs=leaf, proximal_logprobs=-10 * one, behaviour_logprobs=one, advantages=0 * one,
        mask=one.bool(), scores=one[0],
    )  # fmt: skip
    loss, metrics = POLICY_LOSSES["kimi15"](inputs, options=POLICY_LOSS_OPTIONS["kimi15"](kimi15_tau=0.5))
    loss.sum().backward()
    assert float(loss.detach()) == float(metrics["policy/regulariser"]) == 0.25 * 40**2
    assert float(leaf.grad) == -20.0


def test_missing_segments_and_selections_are_refused(make_batch):
    inputs = make_batch(1).inputs()
    for name in ("ppo", "decoupled_ppo", "tis", "cispo", "topr"):
        with pytest.raises(ValueError, match="segment_ids"):
            bare = dataclasses.replace(inputs, segment_ids=None)
            POLICY_LOSSES[name](bare, options=POLICY_LOSS_OPTIONS[name](ratio_level="segment"))
    for name in ("clip_cov", "kl_cov", "m2po"):
        with pytest.raises(ValueError, match="selection"):
            POLICY_LOSSES[name](dataclasses.replace(inputs, selection=None), options=POLICY_LOSS_OPTIONS[name]())


def test_wrong_shapes_and_mask_types_are_refused(make_batch):
    inputs = make_batch(1).inputs()
    for field in ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages", "segment_ids", "selection"):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(inputs, **{field: getattr(inputs, field)[:, :-1]})
    with pytest.raises(ValueError, match="scores"):
        dataclasses.replace(inputs, scores=inputs.scores[:-1])
    with pytest.raises(ValueError, match="bool"):
        dataclasses.replace(inputs, mask=inputs.mask.long())


BAD_OPTIONS = [
    ("vanilla", "ratio_base", ["old", ""]),
    ("gpg", "ratio_base", ["reference"]),
    ("ppo", "ratio_level", ["sequence_product", "row"]),
    ("ppo", "clip_low", [-0.1, 1.0, math.nan]),
    ("ppo", "clip_high", [-0.1, math.inf, math.nan]),
    ("ppo", "dual_clip", [1.0, 0.5, math.nan, math.inf]),
    ("decoupled_ppo", "ratio_base", ["behaviour"]),
    ("decoupled_ppo", "weight_low", [-0.1, 5.5, math.nan]),
    ("decoupled_ppo", "weight_high", [0.0, -1.0, math.inf]),
    ("tis", "tis_upper_bound", [0.0, -1.0, math.inf]),
    ("tis", "tis_lower_bound", [-0.1, 1.5]),
    ("cispo", "cispo_epsilon_low", [-0.1, math.nan]),
    ("cispo", "cispo_epsilon_high", [-0.1, math.inf]),
    ("topr", "topr_positive_weight", [-0.1]),
    ("topr", "topr_negative_weight", [-0.1, math.nan]),
    ("kimi15", "kimi15_tau", [0.0, -1.0]),
    ("gspo", "clip_low", [1.0]),
    ("gmpo", "clip_low", [-0.1]),
    ("gmpo", "clip_high", [-0.1, math.inf]),
    ("sapo", "tau_positive", [0.0]),
    ("sapo", "tau_negative", [0.0, math.nan]),
    ("clip_cov", "cov_ratio", [0.0, 1.1]),
    ("clip_cov", "cov_low", [5.0, 6.0, math.nan]),
    ("kl_cov", "kl_coefficient", [-0.1, math.inf]),
    ("kl_cov", "cov_ratio", [0.0, 2.0]),
    ("m2po", "m2_threshold", [0.0, -1.0, math.nan]),
]


@pytest.mark.parametrize(("name", "field", "value"), [(n, f, v) for n, f, values in BAD_OPTIONS for v in values])
def test_out_of_range_options_name_the_field(name, field, value):
    with pytest.raises(ValueError, match=field):
        POLICY_LOSS_OPTIONS[name](**{field: value})


def test_every_loss_has_options_and_every_boundary_is_allowed():
    assert list(POLICY_LOSSES) == list(POLICY_LOSS_OPTIONS)
    POLICY_LOSS_OPTIONS["ppo"](clip_low=0.0, clip_high=0.0, dual_clip=None)
    POLICY_LOSS_OPTIONS["gmpo"](clip_low=2.5)
    POLICY_LOSS_OPTIONS["tis"](tis_lower_bound=1.0, tis_upper_bound=1.0)
    POLICY_LOSS_OPTIONS["decoupled_ppo"](weight_low=0.0, weight_high=0.5)
    POLICY_LOSS_OPTIONS["kl_cov"](cov_ratio=1.0, kl_coefficient=0.0)
