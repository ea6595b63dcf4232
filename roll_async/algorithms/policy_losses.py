"""Policy losses: per token, not aggregated. Shape letters: B rows, T token positions.

delta_t = logprob_t - base_t. The ratio of a token, segment or row keeps each token's own slope: its value is the
exponential of the mean (or sum) of delta over the set, its gradient that of the token's own log-prob (GSPO-token, arXiv
2507.18071).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from roll_async.algorithms.masked import check_mask, check_shape, clean, dense_segments, working_dtype
from roll_async.config.options.policy_loss_options import (
    CispoOptions,
    ClipCovOptions,
    DecoupledPpoOptions,
    DppoKlOptions,
    DppoTvOptions,
    GmpoOptions,
    GpgOptions,
    GspoOptions,
    Kimi15Options,
    KlCovOptions,
    KpopOptions,
    M2poOptions,
    OwnLossOptions,
    PpoOptions,
    SapoOptions,
    TisOptions,
    ToprOptions,
    VanillaOptions,
    VespoOptions,
)
from roll_async.config.options.user_options import own_function

LOG_RATIO_LIMIT = 20.0
Metrics = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossInputs:
    """One micro-batch. Only `logprobs` carries a gradient."""

    logprobs: Tensor  # [B,T] log pi_theta(token), requires grad
    proximal_logprobs: Tensor  # [B,T] weights at the start of this optimizer round
    behaviour_logprobs: Tensor  # [B,T] reported by the engine that sampled the token
    advantages: Tensor  # [B,T]
    mask: Tensor  # [B,T] bool, True = sampled by the policy and trained
    scores: Tensor  # [B] raw outcome score (topr); may be NaN in rows without a valid token
    ref_logprobs: Tensor | None = None  # [B,T] frozen reference policy
    segment_ids: Tensor | None = None  # [B,T] int64 turn number; ignored where masked
    selection: Tensor | None = None  # [B,T] bool from token_selection.py

    def __post_init__(self) -> None:
        check_mask(self.mask)
        shape = self.mask.shape
        for name in (
            "logprobs",
            "proximal_logprobs",
            "behaviour_logprobs",
            "advantages",
            "ref_logprobs",
            "segment_ids",
            "selection",
        ):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)} like mask")
        if self.scores.shape != shape[:1]:
            raise ValueError(f"scores has shape {tuple(self.scores.shape)}; expected {tuple(shape[:1])}")
        if self.selection is not None and self.selection.dtype != torch.bool:
            raise ValueError(f"selection has dtype {self.selection.dtype}; expected torch.bool")


@dataclass(frozen=True, slots=True)
class _Terms:
    """Inputs that all losses share; [B,T], 0 where masked."""

    logprobs: Tensor
    delta: Tensor  # with the gradient of logprobs
    advantages: Tensor
    mask: Tensor


def clamp_log_ratio(x: Tensor) -> Tensor:
    """The safety clamp before every exp; gradient 0 outside, as torch.clamp."""
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _terms(inputs: PolicyLossInputs, ratio_base: str) -> _Terms:
    dtype = working_dtype(
        inputs.logprobs,
        inputs.proximal_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.scores,
        inputs.ref_logprobs,
    )
    base = inputs.proximal_logprobs if ratio_base == "proximal" else inputs.behaviour_logprobs
    logprobs = clean(inputs.logprobs, inputs.mask, dtype)
    delta = logprobs - clean(base.detach(), inputs.mask, dtype)
    return _Terms(logprobs, delta, clean(inputs.advantages.detach(), inputs.mask, dtype), inputs.mask)


def segment_sums(x_BT: Tensor, segment_ids_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """([B,T] sum of x over the token's segment, [B,T] number of its tokens); 0 where masked, as `x_BT` is."""
    ids = dense_segments(segment_ids_BT=segment_ids_BT, mask_BT=mask_BT)
    # float64: a device sums in any order, and the result must not depend on it.
    x, valid = x_BT.double(), mask_BT.double()
    sums = torch.zeros_like(x).scatter_add(1, ids, x * valid).gather(1, ids)
    counts = torch.zeros_like(x).scatter_add(1, ids, valid).gather(1, ids)
    return torch.where(mask_BT, sums, 0).to(x_BT.dtype), torch.where(mask_BT, counts, 0).to(x_BT.dtype)


def _ratio(terms: _Terms, level: str, segment_ids: Tensor | None) -> Tensor:
    """[B,T] r_t of algorithms.md section 4: the set's ratio in value, the token's own slope in gradient."""
    fixed = terms.delta.detach()
    if level == "token":
        return torch.exp(clamp_log_ratio(terms.delta))
    if level == "segment":
        if segment_ids is None:
            raise ValueError("ratio_level segment needs segment_ids")
        sums, counts = segment_sums(fixed, segment_ids, terms.mask)
        centre = sums / counts.clamp(min=1)
    else:
        row_sum = fixed.sum(-1, keepdim=True)
        if level == "sequence":
            row_sum = row_sum / terms.mask.sum(-1, keepdim=True).clamp(min=1).to(fixed.dtype)
        centre = row_sum.expand_as(fixed)
    # 0 in value: only its gradient, that of the token's own log-prob, counts.
    own_slope = terms.logprobs - terms.logprobs.detach()
    return torch.where(terms.mask, torch.exp(clamp_log_ratio(centre + own_slope)), 1.0)


def _finish(loss: Tensor, terms: _Terms, ratio: Tensor, extra: Metrics) -> tuple[Tensor, Metrics]:
    """Masked loss and the metrics every loss reports; sums over valid tokens, extremes by key."""
    mask, delta, ratio = terms.mask, terms.delta.detach(), ratio.detach()
    # `delta` is 0 where masked: `_terms` has cleaned both sides.
    limited = clamp_log_ratio(delta)
    metrics = {
        "policy/ratio": torch.where(mask, ratio, 0).sum(),
        "policy/ratio_max": torch.where(mask, ratio, -torch.inf).amax()
        if mask.numel()  # amax and amin refuse a tensor without elements
        else ratio.new_tensor(-torch.inf),
        "policy/ratio_min": torch.where(mask, ratio, torch.inf).amin() if mask.numel() else ratio.new_tensor(torch.inf),
        "policy/kl_k1": -delta.sum(),
        "policy/kl_k3": torch.where(mask, torch.exp(limited) - 1 - limited, 0).sum(),
    }
    counts = {key: torch.where(mask, value.detach().to(delta.dtype), 0).sum() for key, value in extra.items()}
    # `loss` may be a constant when nothing is valid; the sum keeps it attached to the graph.
    return torch.where(mask, loss, 0) + 0 * terms.logprobs, {**metrics, **counts}


def _token_ratio(terms: _Terms) -> Tensor:
    return torch.exp(clamp_log_ratio(terms.delta.detach()))


def _clipped(terms: _Terms, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r) A), and metrics of the tokens whose gradient the clip removes."""
    a = terms.advantages
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return loss, {"policy/clip_high": (a > 0) & (ratio > 1 + high), "policy/clip_low": (a < 0) & (ratio < 1 - low)}


def _dual_clipped(terms: _Terms, ratio: Tensor, options: PpoOptions | DecoupledPpoOptions) -> tuple[Tensor, Metrics]:
    loss, metrics = _clipped(terms, ratio, options.clip_low, options.clip_high)
    a, bound = terms.advantages, options.dual_clip
    if bound is None:
        # The same metrics with and without the option.
        return loss, {**metrics, "policy/dual_clip": torch.zeros_like(a)}
    # For A < 0 the surrogate keeps r A, which grows with r without bound; this caps it.
    loss = torch.where(a < 0, torch.minimum(loss, -bound * a), loss)
    return loss, {**metrics, "policy/dual_clip": (a < 0) & (ratio > bound)}


def _need_selection(inputs: PolicyLossInputs, name: str) -> Tensor:
    if inputs.selection is None:
        raise ValueError(f"{name} needs a selection (token_selection.select_{name})")
    return inputs.selection & inputs.mask


def vanilla(inputs: PolicyLossInputs, *, options: VanillaOptions | GpgOptions) -> tuple[Tensor, Metrics]:
    """-A log pi. GPG's loss, too: what makes it GPG is its advantage."""
    terms = _terms(inputs, options.ratio_base)
    return _finish(-terms.advantages * terms.logprobs, terms, _token_ratio(terms), {})


def ppo(inputs: PolicyLossInputs, *, options: PpoOptions) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, with separate clips and dual clip."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, options.ratio_level, inputs.segment_ids)
    loss, metrics = _dual_clipped(terms, ratio, options)
    return _finish(loss, terms, ratio, metrics)


def decoupled_ppo(inputs: PolicyLossInputs, *, options: DecoupledPpoOptions) -> tuple[Tensor, Metrics]:
    """PPO around the proximal policy times the clipped weight proximal / behaviour."""
    terms = _terms(inputs, "proximal")
    ratio = _ratio(terms, options.ratio_level, inputs.segment_ids)
    loss, metrics = _dual_clipped(terms, ratio, options)
    dtype = loss.dtype
    proximal = clean(inputs.proximal_logprobs.detach(), inputs.mask, dtype)
    behaviour = clean(inputs.behaviour_logprobs.detach(), inputs.mask, dtype)
    raw = torch.exp(clamp_log_ratio(proximal - behaviour))
    weight = raw.clamp(options.weight_low, options.weight_high)
    metrics |= {"policy/behaviour_weight": weight, "policy/behaviour_weight_clipped": weight != raw}
    return _finish(weight * loss, terms, ratio, metrics)


def tis(inputs: PolicyLossInputs, *, options: TisOptions) -> tuple[Tensor, Metrics]:
    """REINFORCE with a truncated importance weight."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, options.ratio_level, inputs.segment_ids).detach()
    low, high = options.tis_lower_bound, options.tis_upper_bound
    loss = -ratio.clamp(low, high) * terms.advantages * terms.logprobs
    return _finish(loss, terms, ratio, {"policy/clip_high": ratio > high, "policy/clip_low": ratio < low})


def cispo(inputs: PolicyLossInputs, *, options: CispoOptions) -> tuple[Tensor, Metrics]:
    """REINFORCE with a clipped importance weight; every token keeps a gradient unless the unified mask takes it out."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, options.ratio_level, inputs.segment_ids).detach()
    # A ratio is never negative: an epsilon_low of 1 or more sets no lower bound.
    low, high = max(0.0, 1 - options.cispo_epsilon_low), 1 + options.cispo_epsilon_high
    a = terms.advantages
    loss = -ratio.clamp(low, high) * a * terms.logprobs
    metrics: Metrics = {"policy/clip_high": ratio > high, "policy/clip_low": ratio < low}
    if options.cispo_use_unified_mask:
        dropped = ((a > 0) & (ratio > high)) | ((a < 0) & (ratio < low))
        loss = torch.where(dropped, 0, loss)
        metrics["policy/unified_masked"] = dropped
    return _finish(loss, terms, ratio, metrics)


def topr(inputs: PolicyLossInputs, *, options: ToprOptions) -> tuple[Tensor, Metrics]:
    """Positive rows as REINFORCE, negative rows with the ratio cut at 1. A score of 0 is negative."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, options.ratio_level, inputs.segment_ids).detach()
    positive = (inputs.scores > 0)[:, None] & terms.mask
    weight = torch.where(positive, options.topr_positive_weight, options.topr_negative_weight * ratio.clamp(0, 1))
    metrics = {"policy/positive_tokens": positive, "policy/clip_high": ~positive & (ratio > 1)}
    return _finish(-weight.to(ratio.dtype) * terms.advantages * terms.logprobs, terms, ratio, metrics)


def kimi15(inputs: PolicyLossInputs, *, options: Kimi15Options) -> tuple[Tensor, Metrics]:
    """REINFORCE plus a squared log ratio to the base."""
    terms = _terms(inputs, options.ratio_base)
    regulariser = options.kimi15_tau / 2 * terms.delta**2
    loss = -terms.advantages * terms.logprobs + regulariser
    return _finish(loss, terms, _token_ratio(terms), {"policy/regulariser": regulariser})


def gspo(inputs: PolicyLossInputs, *, options: GspoOptions) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with the sequence ratio."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, "sequence", None)
    loss, metrics = _clipped(terms, ratio, options.clip_low, options.clip_high)
    return _finish(loss, terms, ratio, metrics)


def gmpo(inputs: PolicyLossInputs, *, options: GmpoOptions) -> tuple[Tensor, Metrics]:
    """Geometric mean over the row of log ratios clipped one-sidedly, differentiated in full."""
    terms = _terms(inputs, options.ratio_base)
    a, delta = terms.advantages, terms.delta
    held = torch.where(a >= 0, delta.clamp(max=options.clip_high), delta.clamp(min=-options.clip_low))
    length = terms.mask.sum(-1, keepdim=True).clamp(min=1).to(delta.dtype)
    mean = torch.where(terms.mask, held, 0).sum(-1, keepdim=True) / length
    s = torch.exp(clamp_log_ratio(mean)).expand_as(delta)
    metrics = {
        "policy/clip_high": (a >= 0) & (delta > options.clip_high),
        "policy/clip_low": (a < 0) & (delta < -options.clip_low),
    }
    return _finish(-a * s, terms, _token_ratio(terms), metrics)


def sapo(inputs: PolicyLossInputs, *, options: SapoOptions) -> tuple[Tensor, Metrics]:
    """A soft gate 4/tau sigmoid(tau (r - 1)) in place of the clip."""
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, "token", None)
    positive = torch.full_like(ratio, options.tau_positive)
    tau = torch.where(terms.advantages > 0, positive, torch.full_like(ratio, options.tau_negative))
    # 4 / tau: at r = 1 the gate has slope 1, that of the plain surrogate, for every tau.
    return _finish(-terms.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), terms, ratio, {})


def clip_cov(inputs: PolicyLossInputs, *, options: ClipCovOptions) -> tuple[Tensor, Metrics]:
    """Clipped surrogate without the selected high-covariance tokens."""
    terms = _terms(inputs, options.ratio_base)
    selection = _need_selection(inputs, "clip_cov")
    ratio = _ratio(terms, "token", None)
    loss, metrics = _clipped(terms, ratio, options.clip_low, options.clip_high)
    return _finish(torch.where(selection, 0, loss), terms, ratio, {**metrics, "policy/selected": selection})


def kl_cov(inputs: PolicyLossInputs, *, options: KlCovOptions) -> tuple[Tensor, Metrics]:
    """Unclipped surrogate with a penalty on the selected high-covariance tokens."""
    terms = _terms(inputs, options.ratio_base)
    selection = _need_selection(inputs, "kl_cov")
    ratio = _ratio(terms, "token", None)
    penalty = torch.where(selection, options.kl_coefficient * terms.delta.abs(), 0)
    return _finish(-terms.advantages * ratio + penalty, terms, ratio, {"policy/selected": selection})


def m2po(inputs: PolicyLossInputs, *, options: M2poOptions) -> tuple[Tensor, Metrics]:
    """Unclipped surrogate on the kept tokens."""
    terms = _terms(inputs, options.ratio_base)
    kept = _need_selection(inputs, "m2po")
    ratio = _ratio(terms, "token", None)
    return _finish(torch.where(kept, -terms.advantages * ratio, 0), terms, ratio, {"policy/kept": kept})


def _probabilities(terms: _Terms) -> tuple[Tensor, Tensor]:
    """[B,T] (probability of the token now, probability under the base), constants."""
    now = terms.logprobs.detach()
    # Rounding can lift a log-prob above 0, and 1 - p must not be negative.
    return torch.exp(now.clamp(max=0)), torch.exp((now - terms.delta.detach()).clamp(max=0))


def binary_kl(terms: _Terms) -> tuple[Tensor, Tensor]:
    """[B,T] KL(base || now) and KL(now || base) of the token against all others: with q in the base and p now, q log(q
    / p) + (1 - q) log((1 - q) / (1 - p)), and p and q exchanged. Arguments of the second logarithm are at least 1e-8.
    """
    p, q = _probabilities(terms)
    token = clamp_log_ratio(terms.delta.detach())
    others = torch.log((1 - p).clamp(min=1e-8)) - torch.log((1 - q).clamp(min=1e-8))
    return -q * token - (1 - q) * others, p * token + (1 - p) * others


def _masked_weighted(
    terms: _Terms, outside: Tensor, ratio_cap: float, upward: Tensor, downward: Tensor
) -> tuple[Tensor, Metrics]:
    """-sg(min(r, cap)) A log pi, 0 for the tokens outside."""
    ratio = _token_ratio(terms)
    loss = torch.where(outside, 0, -ratio.clamp(max=ratio_cap) * terms.advantages * terms.logprobs)
    metrics = {"policy/clip_high": outside & upward, "policy/clip_low": outside & downward}
    return _finish(loss, terms, ratio, metrics)


def _dppo(terms: _Terms, divergence: Tensor, options: DppoTvOptions) -> tuple[Tensor, Metrics]:
    p, q = _probabilities(terms)
    up = (terms.advantages > 0) & (p > q) & (divergence > options.divergence_high)
    down = (terms.advantages <= 0) & (p < q) & (divergence > options.divergence_low)
    return _masked_weighted(terms, up | down, options.ratio_cap, up, down)


def dppo_tv(inputs: PolicyLossInputs, *, options: DppoTvOptions) -> tuple[Tensor, Metrics]:
    """DPPO, total variation (arXiv 2602.04879): -sg(min(r, ratio_cap)) A log pi, and 0 where A > 0 and
    p - q > divergence_high, or A <= 0 and q - p > divergence_low; p and q are the probabilities of the token now and in
    the base.
    """
    terms = _terms(inputs, options.ratio_base)
    p, q = _probabilities(terms)
    return _dppo(terms, (p - q).abs(), options)


def dppo_kl(inputs: PolicyLossInputs, *, options: DppoKlOptions) -> tuple[Tensor, Metrics]:
    """DPPO, binary KL (arXiv 2602.04879): `dppo_tv` with q log(q/p) + (1-q) log((1-q)/(1-p)) for the difference."""
    terms = _terms(inputs, options.ratio_base)
    return _dppo(terms, binary_kl(terms)[0], options)


def kpop(inputs: PolicyLossInputs, *, options: KpopOptions) -> tuple[Tensor, Metrics]:
    """KPop (Guo et al., ringtech.notion.site/kpop): -sg(min(r, ratio_cap)) A log pi, and 0 where the larger of the
    binary KL(q, p) and KL(p, q) exceeds `divergence`, whatever the sign of A: the mask is about disagreement.
    """
    terms = _terms(inputs, options.ratio_base)
    outside = torch.maximum(*binary_kl(terms)) > options.divergence
    upward = terms.delta.detach() > 0
    return _masked_weighted(terms, outside, options.ratio_cap, upward, ~upward)


def vespo(inputs: PolicyLossInputs, *, options: VespoOptions) -> tuple[Tensor, Metrics]:
    """VESPO (arXiv 2602.10693): -sg(W^k exp(lambda (1 - W))) A log pi with W the product of the row's ratios; k and
    lambda by the sign of A.
    """
    terms = _terms(inputs, options.ratio_base)
    ratio = _ratio(terms, "sequence_product", None).detach()
    positive = terms.advantages >= 0
    k = torch.where(positive, options.k_positive, options.k_negative).to(ratio.dtype)
    decay = torch.where(positive, options.lambda_positive, options.lambda_negative).to(ratio.dtype)
    # `_ratio` clamps: the ratio is at least exp(-20), so its logarithm is finite.
    weight = torch.exp(k * torch.log(ratio) + decay * (1 - ratio))
    return _finish(-weight * terms.advantages * terms.logprobs, terms, ratio, {"policy/vespo_weight": weight})


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "vanilla": vanilla,
    "gpg": vanilla,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "tis": tis,
    "cispo": cispo,
    "topr": topr,
    "kimi15": kimi15,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "m2po": m2po,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "kpop": kpop,
    "vespo": vespo,
}

ZERO_GRADIENT_WITHOUT_ADVANTAGE = frozenset(POLICY_LOSSES) - {"kimi15", "kl_cov"}
"""Variants whose gradient is exactly zero where the advantage is zero; the others add a
penalty of their own."""


def policy_loss_function(name: str) -> Callable[..., tuple[Tensor, Metrics]]:
    """A loss by its name, or a user's own by dotted path. Raises ValueError where there is none."""
    return POLICY_LOSSES[name] if name in POLICY_LOSSES else _own_loss(name)


@cache
def _own_loss(path: str) -> Callable[..., tuple[Tensor, Metrics]]:
    """`function(inputs, options)` returns (loss [B,T], metrics [B,T] by name). Its tensors are 0 where masked, and what
    it returns there is dropped; its metrics are published as `policy/NAME`, each the mean over the trained tokens.
    """
    function = own_function(path, "algorithm.pg_variant", "algorithm.pg_options", "(loss, metrics)")

    def loss(inputs: PolicyLossInputs, *, options: OwnLossOptions) -> tuple[Tensor, Metrics]:
        terms = _terms(inputs, options.ratio_base)
        dtype = terms.logprobs.dtype

        def zero_where_masked(values: Tensor | None) -> Tensor | None:
            return None if values is None else clean(values.detach(), terms.mask, dtype)

        cleaned = replace(
            inputs,
            logprobs=terms.logprobs,
            proximal_logprobs=zero_where_masked(inputs.proximal_logprobs),
            behaviour_logprobs=zero_where_masked(inputs.behaviour_logprobs),
            ref_logprobs=zero_where_masked(inputs.ref_logprobs),
            advantages=terms.advantages,
        )
        per_token, metrics = function(cleaned, options.given)
        check_shape(per_token, terms.mask, f"algorithm.pg_variant: the loss of {path}")
        for name in metrics:
            if name.endswith(("_max", "_min")):  # `merge_metrics` would take the largest of sums
                raise ValueError(f"algorithm.pg_variant: metric {name} of {path} is a mean; end it in another word")
        return _finish(per_token, terms, _token_ratio(terms), {f"policy/{key}": x for key, x in metrics.items()})

    return loss
