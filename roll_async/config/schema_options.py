"""Options of losses, advantage estimators and the train-engine correction.

The mathematics is in `roll_async/algorithms/`, which needs torch; names, fields, defaults and ranges are repeated here
so that a config can be checked without it. `tests/unit/config` compares the two.
"""

from dataclasses import dataclass, fields
from typing import Literal

from roll_async.config.fields import bounded, option, required, section

RatioBase = Literal["proximal", "behaviour"]
"""Denominator of the ratio: weights at the start of the optimizer round, or the engine's own log-probs."""
RatioLevel = Literal["token", "sequence", "segment"]
ProductRatioLevel = Literal["token", "sequence", "segment", "sequence_product"]
"""What one ratio covers: a token, the mean over a row or a turn, the product over a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VanillaOptions:
    """Plain policy gradient."""

    ratio_base: RatioBase = "behaviour"
    """Denominator of the ratio in the metrics; the loss has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpgOptions:
    """Plain policy gradient, meant for the gpg advantage."""

    ratio_base: RatioBase = "behaviour"
    """Denominator of the ratio in the metrics; the loss has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoOptions:
    """Clipped surrogate."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    ratio_level: RatioLevel = "token"
    """segment is for agentic configs."""
    clip_low: float = bounded(0.2, "in [0, 1)")
    """Lower clip is 1 - clip_low; 0.2 is PPO's."""
    clip_high: float = bounded(0.2, ">= 0")
    """Upper clip is 1 + clip_high; DAPO uses 0.28."""
    dual_clip: float | None = bounded(3.0, "> 1")
    """Bound of the ratio for negative advantages, null = off; DAPO uses 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledPpoOptions:
    """Clipped surrogate around the proximal policy, weighted by proximal / behaviour."""

    ratio_base: Literal["proximal"] = "proximal"
    """The behaviour policy enters through the weight, never through the ratio."""
    ratio_level: RatioLevel = "token"
    """segment is for agentic configs."""
    clip_low: float = bounded(0.2, "in [0, 1)")
    """Lower clip is 1 - clip_low; 0.2 is PPO's."""
    clip_high: float = bounded(0.2, ">= 0")
    """Upper clip is 1 + clip_high."""
    dual_clip: float | None = bounded(3.0, "> 1")
    """Bound of the ratio for negative advantages, null = off."""
    weight_low: float = bounded(0.0, ">= 0")
    """Lower truncation of the behaviour weight; 0 = none."""
    weight_high: float = bounded(5.0, "> 0")
    """Upper truncation of the behaviour weight; keeps one token from dominating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TisOptions:
    """Truncated importance sampling."""

    ratio_base: RatioBase = "behaviour"
    """The ratio is an importance weight of the sampled data."""
    ratio_level: ProductRatioLevel = "token"
    """segment is for agentic configs."""
    tis_lower_bound: float = bounded(0.0, ">= 0")
    """Lower truncation of the ratio; 0 = none."""
    tis_upper_bound: float = bounded(1.0, "> 0")
    """Upper truncation of the ratio; 1 never amplifies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CispoOptions:
    """Clipped importance weight with the gradient kept."""

    ratio_base: RatioBase = "behaviour"
    """The ratio is an importance weight of the sampled data."""
    ratio_level: ProductRatioLevel = "token"
    """segment is for agentic configs."""
    cispo_epsilon_low: float = bounded(0.1, ">= 0")
    """Lower bound of the weight is max(0, 1 - this); >= 1 = none, as in the paper."""
    cispo_epsilon_high: float = bounded(0.1, ">= 0")
    """Upper bound of the weight is 1 + this."""
    cispo_use_unified_mask: bool = False
    """Drop tokens that already moved past the bound in the advantage's direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToprOptions:
    """Tapered off-policy REINFORCE."""

    ratio_base: RatioBase = "behaviour"
    """The ratio is an importance weight of the sampled data."""
    ratio_level: ProductRatioLevel = "token"
    """The paper uses sequence_product; segment is for agentic configs."""
    topr_positive_weight: float = bounded(1.0, ">= 0")
    """Weight of rows with score > 0."""
    topr_negative_weight: float = bounded(1.0, ">= 0")
    """Weight of the other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kimi15Options:
    """Policy gradient with a squared log-ratio penalty."""

    ratio_base: RatioBase = "proximal"
    """The penalty holds the step near the weights at its start."""
    kimi15_tau: float = bounded(0.1, "> 0")
    """Strength of the penalty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GspoOptions:
    """Clipped surrogate on the sequence ratio."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    clip_low: float = bounded(3e-4, "in [0, 1)")
    """Lower clip is 1 - clip_low; sequence ratios are close to 1."""
    clip_high: float = bounded(4e-4, ">= 0")
    """Upper clip is 1 + clip_high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GmpoOptions:
    """Geometric-mean objective, clipped in log space."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    clip_low: float = bounded(0.4, ">= 0")
    """Lower clip of the log ratio."""
    clip_high: float = bounded(0.4, ">= 0")
    """Upper clip of the log ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SapoOptions:
    """Soft gate instead of a clip."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    tau_positive: float = bounded(1.0, "> 0")
    """Sharpness of the gate for positive advantages."""
    tau_negative: float = bounded(1.05, "> 0")
    """Sharpness for the others; larger, because they are less stable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipCovOptions:
    """Clipped surrogate without the tokens of highest covariance."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    clip_low: float = bounded(0.2, "in [0, 1)")
    """Lower clip is 1 - clip_low."""
    clip_high: float = bounded(0.2, ">= 0")
    """Upper clip is 1 + clip_high."""
    cov_ratio: float = bounded(2e-4, "in (0, 1]")
    """Share of tokens left out."""
    cov_low: float = 1.0
    """Candidates have a covariance above this."""
    cov_high: float = 5.0
    """Candidates have a covariance below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlCovOptions:
    """KL penalty on the tokens of highest covariance."""

    ratio_base: RatioBase = "proximal"
    """Trust region around the weights at the start of the round."""
    cov_ratio: float = bounded(2e-4, "in (0, 1]")
    """Share of tokens penalised."""
    kl_coefficient: float = bounded(1.0, ">= 0")
    """Strength of the penalty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class M2poOptions:
    """Second-moment trust region: tokens are left out until the rest is close enough."""

    ratio_base: RatioBase = "behaviour"
    """The ratio is an importance weight of the sampled data."""
    m2_threshold: float = bounded(0.04, "> 0")
    """Bound of the mean squared log ratio of the kept tokens."""


PolicyLossOptions = (
    VanillaOptions | GpgOptions | PpoOptions | DecoupledPpoOptions | TisOptions | CispoOptions | ToprOptions
    | Kimi15Options | GspoOptions | GmpoOptions | SapoOptions | ClipCovOptions | KlCovOptions | M2poOptions
)  # fmt: skip

POLICY_LOSS_OPTIONS: dict[str, type] = {
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
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAdvantageOptions:
    """For estimators without options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantageOptions:
    """grpo, grpo_passk."""

    normalise_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpgAdvantageOptions:
    """gpg."""

    normalise_std: bool = False
    """Divide by the group's standard deviation; the paper does not."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LitePpoAdvantageOptions:
    """lite_ppo."""

    epsilon: float = bounded(1e-6, "> 0")
    """Added to the batch's standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscountAdvantageOptions:
    """reinforce, reinforce_plus_plus, agentic_reinforce."""

    gamma: float = bounded(1.0, "in [0, 1]")
    """Discount per token, or per turn of an agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaeAdvantageOptions:
    """gae."""

    gamma: float = bounded(1.0, "in [0, 1]")
    """Discount per token."""
    lam: float = bounded(0.95, "in [0, 1]")
    """Trade of bias (0) against variance (1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReinforceAdvantageOptions:
    """step_reinforce."""

    step_reward_gamma: float = bounded(0.95, "in [0, 1]")
    """Discount per step."""
    mean: Literal["none", "batch", "group"] = "batch"
    """Rows whose mean is subtracted."""
    std: Literal["none", "batch", "group"] = "batch"
    """Rows whose standard deviation divides."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GigpoAdvantageOptions:
    """gigpo."""

    step_reward_gamma: float = bounded(0.95, "in [0, 1]")
    """Discount per step."""
    episode_reward_weight: float = bounded(1.0, ">= 0")
    """Weight of the advantage of the whole trajectory."""
    step_reward_weight: float = bounded(1.0, ">= 0")
    """Weight of the advantage among steps from the same state."""
    normalise_std: bool = True
    """Divide by the standard deviation."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviation."""


AdvantageOptions = (
    NoAdvantageOptions | GroupAdvantageOptions | GpgAdvantageOptions | LitePpoAdvantageOptions 
    | DiscountAdvantageOptions | GaeAdvantageOptions | StepReinforceAdvantageOptions | GigpoAdvantageOptions
)  # fmt: skip

ADVANTAGE_OPTIONS: dict[str, type] = {
    "grpo": GroupAdvantageOptions,
    "dr_grpo": NoAdvantageOptions,
    "rloo": NoAdvantageOptions,
    "opo": NoAdvantageOptions,
    "gpg": GpgAdvantageOptions,
    "grpo_passk": GroupAdvantageOptions,
    "lite_ppo": LitePpoAdvantageOptions,
    "reinforce": DiscountAdvantageOptions,
    "reinforce_plus_plus": DiscountAdvantageOptions,
    "reinforce_plus_plus_baseline": NoAdvantageOptions,
    "remax": NoAdvantageOptions,
    "gae": GaeAdvantageOptions,
    "agentic_reinforce": DiscountAdvantageOptions,
    "step_reinforce": StepReinforceAdvantageOptions,
    "gigpo": GigpoAdvantageOptions,
}

GROUP_RELATIVE = frozenset(
    {"grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "lite_ppo", "reinforce_plus_plus_baseline", "gigpo"}
)
"""Estimators that compare the members of a group: one sample per prompt gives no signal."""
AGENTIC_ONLY = frozenset({"gigpo", "step_reinforce", "agentic_reinforce"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectionRule:
    """One test that rejects tokens or rows; rules are ANDed."""

    statistic: Literal["k1", "k2", "k3"] = required()
    """k1 bounds the ratio itself; k2 and k3 are distances and have only `high`."""
    aggregation: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = required()
    """What is compared: a token, or a row's sum, mean or every token."""
    low: float | None = bounded(None, "> 0")
    """Lower bound, on the ratio train / rollout."""
    high: float | None = bounded(None, "> 0")
    """Upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionOptions:
    """Weights and rejections for the difference between the trainer's and the engine's log-probs."""

    weight_level: Literal["none", "token", "segment", "sequence", "geometric"] = "token"
    """What one weight covers; none where token would correct twice (filled while loading)."""
    weight_upper: float | None = bounded(2.0, "> 0")
    """Upper truncation of the weight, null = none; 2 is the TIS preset."""
    weight_lower: float | None = bounded(None, ">= 0")
    """Lower truncation of the weight, null = none."""
    band_low: float | None = bounded(None, ">= 0")
    """Tokens with a ratio below leave the loss, null = open; IcePop uses 0.5."""
    band_high: float | None = bounded(None, "> 0")
    """Tokens with a ratio above leave the loss, null = open; IcePop uses 5."""
    rejections: tuple[RejectionRule, ...] = section(tuple)
    """Tests that reject tokens or rows."""
    normalise: Literal["none", "token", "sequence"] = option("none")
    """Divide the weights by their mean over tokens or rows of the batch."""

    @property
    def is_on(self) -> bool:
        """Whether any weight can differ from 1."""
        return (
            self.weight_level != "none"
            or self.band_low is not None
            or self.band_high is not None
            or bool(self.rejections)
        )


def option_values(
    options: PolicyLossOptions | AdvantageOptions | CorrectionOptions | RejectionRule,
) -> dict[str, object]:
    """Field names to values: the keyword arguments of the class or function of the same name in `algorithms/`."""
    return {f.name: getattr(options, f.name) for f in fields(options)}
