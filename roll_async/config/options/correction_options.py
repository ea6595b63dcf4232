"""Options of the train-engine correction; the weights and rejections themselves are in `algorithms/correction.py`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from roll_async.config.fields import Options, bounded, option, required, section

RATIO_IS_METRIC_ONLY = ("vanilla", "gpg", "kimi15")
"""Losses whose ratio does not weigh the gradient: a correction for the behaviour policy never doubles theirs."""


def carries_behaviour_policy(pg_variant: str, ratio_base: str) -> bool:
    """Whether the loss itself already corrects for the policy that sampled the data."""
    return pg_variant == "decoupled_ppo" or (ratio_base == "behaviour" and pg_variant not in RATIO_IS_METRIC_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectionRule(Options):
    """One test that rejects tokens or rows; rules are ANDed."""

    statistic: Literal["k1", "k2", "k3"] = required()
    """k1 bounds the ratio itself; k2 and k3 are distances and have only `high`."""
    aggregation: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = required()
    """What is compared: a token, or a row's sum, mean or every token."""
    low: float | None = bounded(None, "> 0", at_most="high")
    """Lower bound, on the ratio train / rollout."""
    high: float | None = bounded(None, "> 0")
    """Upper bound."""

    @classmethod
    def further_contradictions(cls, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """k2 and k3 have no lower bound; a rule needs at least one."""
        if values["low"] is not None and values["statistic"] != "k1":
            yield "low", f"null with statistic {values['statistic']}"
        elif values["low"] is None and values["high"] is None:
            yield "high", "set: a rule needs a bound"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionOptions(Options):
    """Weights and rejections for the difference between the trainer's and the engine's log-probs."""

    weight_level: Literal["none", "token", "segment", "sequence", "geometric"] = "token"
    """What one weight covers; none where token would correct twice (filled while loading)."""
    weight_upper: float | None = bounded(2.0, "> 0")
    """Upper truncation of the weight, null = none; 2 is the TIS preset."""
    weight_lower: float | None = bounded(None, ">= 0", at_most="weight_upper")
    """Lower truncation of the weight, null = none."""
    band_low: float | None = bounded(None, ">= 0", at_most="band_high")
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
