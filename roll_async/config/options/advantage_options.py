"""Options of the advantage estimators, one class each: what `adv_options` holds for each `adv_estimator`.

The estimators themselves are in `algorithms/advantages.py`, which takes these objects as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from roll_async.config.fields import Options, bounded, section


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageOptions(Options):
    """Base class of the estimators' options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAdvantageOptions(AdvantageOptions):
    """For estimators without options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdvantageOptions(AdvantageOptions):
    """grpo, grpo_passk."""

    normalise_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpgAdvantageOptions(GroupAdvantageOptions):
    """gpg."""

    normalise_std: bool = False
    """Divide by the group's standard deviation; the paper does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GdpoAdvantageOptions(AdvantageOptions):
    """gdpo."""

    rewards: tuple[str, ...] = section(lambda: ("score",))
    """Rewards, each normalised on its own: score (after shift, scale and shaping), or any number the reward reports."""
    weights: tuple[float, ...] = section(tuple)
    """Weights of the rewards, in the same order; empty = 1 each."""
    epsilon: float = bounded(1e-6, "> 0")
    """Added to the standard deviations of group and batch."""

    @classmethod
    def further_contradictions(cls, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """As many weights as rewards."""
        rewards, weights = values["rewards"], values["weights"]
        assert isinstance(rewards, tuple | list) and isinstance(weights, tuple | list)
        if weights and len(weights) != len(rewards):
            yield "weights", f"empty or one for each of the {len(rewards)} rewards"


@dataclass(frozen=True, kw_only=True, slots=True)
class RaeAdvantageOptions(AdvantageOptions):
    """rae."""

    decay: float = bounded(0.95, "in [0, 1)")
    """Of the moving average of a role's scores; the paper's 0.95. A role is a domain and the column `role` of its rows,
    if they have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimalTokenBaselineAdvantageOptions(AdvantageOptions):
    """optimal_token_baseline."""

    zero_tail: bool = False
    """Where only the longest answer of a group still runs: true = its return without a baseline, false = 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LitePpoAdvantageOptions(AdvantageOptions):
    """lite_ppo."""

    epsilon: float = bounded(1e-6, "> 0")
    """Added to the batch's standard deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscountAdvantageOptions(AdvantageOptions):
    """reinforce, reinforce_plus_plus, agentic_reinforce."""

    gamma: float = bounded(1.0, "in [0, 1]")
    """Discount per token, or per turn of an agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaeAdvantageOptions(AdvantageOptions):
    """gae."""

    gamma: float = bounded(1.0, "in [0, 1]")
    """Discount per token."""
    lam: float = bounded(0.95, "in [0, 1]")
    """Trade of bias (0) against variance (1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReinforceAdvantageOptions(AdvantageOptions):
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
class GigpoAdvantageOptions(AdvantageOptions):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAdvantageOptions(AdvantageOptions):
    """An estimator of your own by dotted path: what the dataclass of its `options` has."""

    given: Mapping[str, object] = section(dict)
    """As written in the file: no key of this name."""


ADVANTAGE_OPTIONS: dict[str, type[AdvantageOptions]] = {
    "grpo": GroupAdvantageOptions,
    "dr_grpo": NoAdvantageOptions,
    "rloo": NoAdvantageOptions,
    "opo": NoAdvantageOptions,
    "maxrl": NoAdvantageOptions,
    "gdpo": GdpoAdvantageOptions,
    "rae": RaeAdvantageOptions,
    "optimal_token_baseline": OptimalTokenBaselineAdvantageOptions,
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


def advantage_options_class(adv_estimator: str) -> type[AdvantageOptions]:
    """The class of `adv_options`; of a dotted path that of a user's own estimator."""
    return ADVANTAGE_OPTIONS.get(adv_estimator, OwnAdvantageOptions)


GROUP_RELATIVE = frozenset(
    {
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "maxrl",
        "gdpo",
        "optimal_token_baseline",
        "gpg",
        "grpo_passk",
        "lite_ppo",
        "reinforce_plus_plus_baseline",
        "gigpo",
    }
)
"""Estimators that compare the members of a group: one sample per prompt gives no signal."""
AGENTIC_ONLY = frozenset({"gigpo", "step_reinforce", "agentic_reinforce"})
