"""Options of the policy losses. Ratio clips are distances from 1. Formulas: docs_roll/algorithms/policy_losses.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


def check(options: object, name: str, ok: bool, constraint: str) -> None:
    """Raise ValueError with class, field, value and range unless `ok`."""
    if not ok:
        raise ValueError(f"{type(options).__name__}.{name} = {getattr(options, name)!r}; must be {constraint}")


def check_finite(options: object) -> None:
    """No NaN or infinity in any number."""
    for field in fields(options):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        if isinstance(value, float):
            check(options, field.name, math.isfinite(value), "a finite number")


def check_choice(options: object, name: str, choices: tuple[str, ...]) -> None:
    """The field holds one of the choices."""
    check(options, name, getattr(options, name) in choices, f"one of {' | '.join(choices)}")


BASES = ("proximal", "behaviour")
TRUST_LEVELS = ("token", "sequence", "segment")
WEIGHT_LEVELS = (*TRUST_LEVELS, "sequence_product")


def _check_clips(options: object, *, log_space: bool = False) -> None:
    low, high = options.clip_low, options.clip_high  # type: ignore[attr-defined]
    check(options, "clip_low", low >= 0 and (log_space or low < 1), ">= 0" if log_space else "in [0, 1)")
    check(options, "clip_high", high >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class VanillaOptions:
    """REINFORCE; the base only feeds the metrics."""

    ratio_base: str = "behaviour"

    def __post_init__(self) -> None:
        check_choice(self, "ratio_base", BASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpgOptions:
    """GPG (arXiv 2504.02546); use with the gpg advantage."""

    ratio_base: str = "behaviour"

    def __post_init__(self) -> None:
        check_choice(self, "ratio_base", BASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoOptions:
    """PPO (arXiv 1707.06347) with DAPO's separate clips (arXiv 2503.14476) and dual clip (arXiv 1912.09729)."""

    ratio_base: str = "proximal"
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check_choice(self, "ratio_level", TRUST_LEVELS)
        _check_clips(self)
        check(self, "dual_clip", self.dual_clip is None or self.dual_clip > 1, "null or > 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledPpoOptions:
    """Decoupled PPO (arXiv 2110.00641, arXiv 2505.24298): PPO around the proximal policy times proximal / behaviour."""

    ratio_base: str = "proximal"
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    weight_low: float = 0.0
    weight_high: float = 5.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", ("proximal",))
        check_choice(self, "ratio_level", TRUST_LEVELS)
        _check_clips(self)
        check(self, "dual_clip", self.dual_clip is None or self.dual_clip > 1, "null or > 1")
        check(self, "weight_low", 0 <= self.weight_low <= self.weight_high, ">= 0 and <= weight_high")
        check(self, "weight_high", self.weight_high > 0, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TisOptions:
    """Truncated importance sampling (IMPALA arXiv 1802.01561, TOPR's baseline)."""

    ratio_base: str = "behaviour"
    ratio_level: str = "token"
    tis_lower_bound: float = 0.0
    tis_upper_bound: float = 1.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check_choice(self, "ratio_level", WEIGHT_LEVELS)
        check(self, "tis_lower_bound", 0 <= self.tis_lower_bound <= self.tis_upper_bound, ">= 0 and <= tis_upper_bound")
        check(self, "tis_upper_bound", self.tis_upper_bound > 0, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class CispoOptions:
    """CISPO (MiniMax-M1, arXiv 2506.13585); the paper has no lower bound (cispo_epsilon_low >= 1)."""

    ratio_base: str = "behaviour"
    ratio_level: str = "token"
    cispo_epsilon_low: float = 0.1
    cispo_epsilon_high: float = 0.1
    cispo_use_unified_mask: bool = False

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check_choice(self, "ratio_level", WEIGHT_LEVELS)
        check(self, "cispo_epsilon_low", self.cispo_epsilon_low >= 0, ">= 0")
        check(self, "cispo_epsilon_high", self.cispo_epsilon_high >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToprOptions:
    """TOPR (arXiv 2503.14286); the paper uses ratio_level sequence_product."""

    ratio_base: str = "behaviour"
    ratio_level: str = "token"
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check_choice(self, "ratio_level", WEIGHT_LEVELS)
        check(self, "topr_positive_weight", self.topr_positive_weight >= 0, ">= 0")
        check(self, "topr_negative_weight", self.topr_negative_weight >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kimi15Options:
    """Kimi k1.5 (arXiv 2501.12599), per-token form of its squared log ratio."""

    ratio_base: str = "proximal"
    kimi15_tau: float = 0.1

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check(self, "kimi15_tau", self.kimi15_tau > 0, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class GspoOptions:
    """GSPO (arXiv 2507.18071): sequence ratio, seq-mean-token-mean in the paper."""

    ratio_base: str = "proximal"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        _check_clips(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GmpoOptions:
    """GMPO (arXiv 2507.20673): geometric mean of ratios; clips in log space."""

    ratio_base: str = "proximal"
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        _check_clips(self, log_space=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SapoOptions:
    """SAPO (arXiv 2511.20347): a sigmoid gate instead of a clip."""

    ratio_base: str = "proximal"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check(self, "tau_positive", self.tau_positive > 0, "> 0")
        check(self, "tau_negative", self.tau_negative > 0, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipCovOptions:
    """Clip-Cov (arXiv 2505.22617)."""

    ratio_base: str = "proximal"
    clip_low: float = 0.2
    clip_high: float = 0.2
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        _check_clips(self)
        check(self, "cov_ratio", 0 < self.cov_ratio <= 1, "in (0, 1]")
        check(self, "cov_low", self.cov_low < self.cov_high, "< cov_high")


@dataclass(frozen=True, kw_only=True, slots=True)
class KlCovOptions:
    """KL-Cov (arXiv 2505.22617)."""

    ratio_base: str = "proximal"
    cov_ratio: float = 2e-4
    kl_coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check(self, "cov_ratio", 0 < self.cov_ratio <= 1, "in (0, 1]")
        check(self, "kl_coefficient", self.kl_coefficient >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class M2poOptions:
    """M2PO (arXiv 2510.01161): keeps tokens while the mean squared log ratio stays small."""

    ratio_base: str = "behaviour"
    m2_threshold: float = 0.04

    def __post_init__(self) -> None:
        check_finite(self)
        check_choice(self, "ratio_base", BASES)
        check(self, "m2_threshold", self.m2_threshold > 0, "> 0")


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
