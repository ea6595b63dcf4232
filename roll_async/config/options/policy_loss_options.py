"""Options of the policy losses, one class each: what `pg_options` holds for each `pg_variant`.

The losses themselves are in `algorithms/policy_losses.py`, which takes these objects as they are. Ratio clips are
distances from 1. Formulas: docs_roll/algorithms/policy_losses.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from roll_async.config.fields import Options, bounded, section

RatioBase = Literal["proximal", "behaviour"]
"""Denominator of the ratio: weights at the start of the optimizer round, or the engine's own log-probs."""
RatioLevel = Literal["token", "sequence", "segment"]
ProductRatioLevel = Literal["token", "sequence", "segment", "sequence_product"]
"""What one ratio covers: a token, the mean over a row or a turn, the product over a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossOptions(Options):
    """What every loss has."""

    ratio_base: RatioBase = "proximal"
    """Denominator of the ratio: a trust region around the weights at the start of the round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyOptions(PolicyLossOptions):
    """Losses whose ratio is an importance weight of the sampled data, or whose trust region is around its policy."""

    ratio_base: RatioBase = "behaviour"
    """Denominator of the ratio: the policy that sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedOptions(OffPolicyOptions):
    """Losses that weigh every token by its ratio."""

    ratio_level: ProductRatioLevel = "token"
    """segment is for agentic configs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VanillaOptions(OffPolicyOptions):
    """REINFORCE; the base only feeds the metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpgOptions(OffPolicyOptions):
    """GPG (arXiv 2504.02546); use with the gpg advantage; the ratio only feeds the metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoOptions(PolicyLossOptions):
    """PPO (arXiv 1707.06347) with DAPO's separate clips (arXiv 2503.14476) and dual clip (arXiv 1912.09729)."""

    ratio_level: RatioLevel = "token"
    """segment is for agentic configs."""
    clip_low: float = bounded(0.2, "in [0, 1)")
    """Lower clip is 1 - clip_low; 0.2 is PPO's."""
    clip_high: float = bounded(0.2, ">= 0")
    """Upper clip is 1 + clip_high; DAPO uses 0.28."""
    dual_clip: float | None = bounded(3.0, "> 1")
    """Bound of the ratio for negative advantages, null = off; DAPO uses 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledPpoOptions(PpoOptions):
    """Decoupled PPO (arXiv 2110.00641, arXiv 2505.24298): PPO around the proximal policy times proximal / behaviour."""

    ratio_base: Literal["proximal"] = "proximal"
    """The behaviour policy enters through the weight, never through the ratio."""
    weight_low: float = bounded(0.0, ">= 0", at_most="weight_high")
    """Lower truncation of the behaviour weight; 0 = none."""
    weight_high: float = bounded(5.0, "> 0")
    """Upper truncation of the behaviour weight; keeps one token from dominating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TisOptions(WeightedOptions):
    """Truncated importance sampling (IMPALA arXiv 1802.01561, TOPR's baseline)."""

    tis_lower_bound: float = bounded(0.0, ">= 0", at_most="tis_upper_bound")
    """Lower truncation of the ratio; 0 = none."""
    tis_upper_bound: float = bounded(1.0, "> 0")
    """Upper truncation of the ratio; 1 never amplifies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CispoOptions(WeightedOptions):
    """CISPO (MiniMax-M1, arXiv 2506.13585)."""

    cispo_epsilon_low: float = bounded(1.0, ">= 0")
    """Lower bound of the weight is max(0, 1 - this); >= 1 = none, as in the paper: a floor pushes unlikely tokens of
    failed answers down for ever."""
    cispo_epsilon_high: float = bounded(0.1, ">= 0")
    """Upper bound of the weight is 1 + this."""
    cispo_use_unified_mask: bool = False
    """Drop tokens that already moved past the bound in the advantage's direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToprOptions(WeightedOptions):
    """TOPR (arXiv 2503.14286); the paper uses ratio_level sequence_product."""

    ratio_level: ProductRatioLevel = "token"
    """The paper uses sequence_product; segment is for agentic configs."""
    topr_positive_weight: float = bounded(1.0, ">= 0")
    """Weight of rows with score > 0."""
    topr_negative_weight: float = bounded(1.0, ">= 0")
    """Weight of the other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kimi15Options(PolicyLossOptions):
    """Kimi k1.5 (arXiv 2501.12599), per-token form of its squared log ratio."""

    ratio_base: RatioBase = "proximal"
    """The penalty holds the step near the weights at its start: with one optimizer step per batch it is zero, behaviour
    holds it near the weights that sampled."""
    kimi15_tau: float = bounded(0.1, "> 0")
    """Strength of the penalty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GspoOptions(PolicyLossOptions):
    """GSPO (arXiv 2507.18071): sequence ratio, seq-mean-token-mean in the paper."""

    clip_low: float = bounded(3e-4, "in [0, 1)")
    """Lower clip is 1 - clip_low; sequence ratios are close to 1."""
    clip_high: float = bounded(4e-4, ">= 0")
    """Upper clip is 1 + clip_high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GmpoOptions(PolicyLossOptions):
    """GMPO (arXiv 2507.20673): geometric mean of ratios; clips in log space."""

    clip_low: float = bounded(0.4, ">= 0")
    """Lower clip of the log ratio."""
    clip_high: float = bounded(0.4, ">= 0")
    """Upper clip of the log ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SapoOptions(PolicyLossOptions):
    """SAPO (arXiv 2511.20347): a sigmoid gate instead of a clip."""

    tau_positive: float = bounded(1.0, "> 0")
    """Sharpness of the gate for positive advantages."""
    tau_negative: float = bounded(1.05, "> 0")
    """Sharpness for the others; larger, because they are less stable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipCovOptions(PolicyLossOptions):
    """Clip-Cov (arXiv 2505.22617)."""

    clip_low: float = bounded(0.2, "in [0, 1)")
    """Lower clip is 1 - clip_low."""
    clip_high: float = bounded(0.2, ">= 0")
    """Upper clip is 1 + clip_high."""
    cov_ratio: float = bounded(2e-4, "in (0, 1]")
    """Share of tokens left out."""
    cov_low: float = bounded(1.0, less_than="cov_high")
    """Candidates have a covariance above this."""
    cov_high: float = 5.0
    """Candidates have a covariance below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlCovOptions(PolicyLossOptions):
    """KL-Cov (arXiv 2505.22617)."""

    cov_ratio: float = bounded(2e-4, "in (0, 1]")
    """Share of tokens penalised."""
    kl_coefficient: float = bounded(1.0, ">= 0")
    """Strength of the penalty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class M2poOptions(OffPolicyOptions):
    """M2PO (arXiv 2510.01161): keeps tokens while the mean squared log ratio stays small."""

    m2_threshold: float = bounded(0.04, "> 0")
    """Bound of the mean squared log ratio of the kept tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DppoTvOptions(OffPolicyOptions):
    """DPPO (arXiv 2602.04879), binary total variation: tokens whose probability moved too far in the direction of their
    advantage leave the loss.
    """

    divergence_low: float = bounded(0.2, "> 0")
    """Bound for tokens that become less likely; the paper's 0.2 (0.15 for a mixture of experts)."""
    divergence_high: float = bounded(0.2, "> 0")
    """Bound for tokens that become more likely."""
    ratio_cap: float = bounded(20.0, "> 0")
    """Truncation of the importance weight; the paper asks for a large one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DppoKlOptions(DppoTvOptions):
    """DPPO (arXiv 2602.04879), binary KL divergence."""

    divergence_low: float = bounded(0.05, "> 0")
    """Bound for tokens that become less likely; the paper's 0.05."""
    divergence_high: float = bounded(0.05, "> 0")
    """Bound for tokens that become more likely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KpopOptions(OffPolicyOptions):
    """KPop (Guo et al., Ant Group 2026, ringtech.notion.site/kpop): a binary-KL mask for both signs of the
    advantage; tokens on which the two policies disagree leave the loss.
    """

    divergence: float = bounded(0.1, "> 0")
    """Bound of the binary KL divergence in either direction; 0.1 is the authors'."""
    ratio_cap: float = bounded(20.0, "> 0")
    """Truncation of the importance weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VespoOptions(OffPolicyOptions):
    """VESPO (arXiv 2602.10693): a smooth kernel W^k exp(lambda (1 - W)) of the whole row's importance weight W."""

    k_positive: float = bounded(2.0, ">= 0")
    """Power for advantages >= 0: holds down rows that became unlikely."""
    lambda_positive: float = bounded(3.0, ">= 0")
    """Decay for advantages >= 0: holds down rows that became likely."""
    k_negative: float = bounded(3.0, ">= 0")
    """Power for negative advantages."""
    lambda_negative: float = bounded(2.0, ">= 0")
    """Decay for negative advantages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLossOptions(PolicyLossOptions):
    """A loss of your own by dotted path: beside ratio_base, what the dataclass of its `options` has."""

    given: Mapping[str, object] = section(dict)
    """As written in the file, beside ratio_base: no key of this name."""


POLICY_LOSS_OPTIONS: dict[str, type[PolicyLossOptions]] = {
    "vanilla": VanillaOptions,
    "gpg": GpgOptions,
    "ppo": PpoOptions,
    "decoupled_ppo": DecoupledPpoOptions,
    "tis": TisOptions,
    "cispo": CispoOptions,
    "topr": ToprOptions,
    "kimi15": Kimi15Options,
    "gspo": GspoOptions,
    "gmpo": GmpoOptions,
    "sapo": SapoOptions,
    "clip_cov": ClipCovOptions,
    "kl_cov": KlCovOptions,
    "m2po": M2poOptions,
    "dppo_tv": DppoTvOptions,
    "dppo_kl": DppoKlOptions,
    "kpop": KpopOptions,
    "vespo": VespoOptions,
}


def loss_options_class(pg_variant: str) -> type[PolicyLossOptions]:
    """The class of `pg_options`; of a dotted path that of a user's own loss."""
    return POLICY_LOSS_OPTIONS.get(pg_variant, OwnLossOptions)


SELECTS_TOKENS = ("clip_cov", "kl_cov", "m2po")
"""Losses that choose tokens by the log-probs of the whole batch."""
