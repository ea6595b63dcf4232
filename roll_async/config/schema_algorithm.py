"""algorithm: what is learned from a batch. The mathematics is in `roll_async/algorithms/`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from roll_async.config.fields import bounded, derived, option, section
from roll_async.config.options.advantage_options import (
    ADVANTAGE_OPTIONS,
    AdvantageOptions,
    GroupAdvantageOptions,
    OwnAdvantageOptions,
)
from roll_async.config.options.correction_options import CorrectionOptions
from roll_async.config.options.policy_loss_options import (
    POLICY_LOSS_OPTIONS,
    OwnLossOptions,
    PolicyLossOptions,
    PpoOptions,
)

Normalise = Literal["none", "batch", "group", "running"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterGroupsConfig:
    """Drop groups that carry no signal (dynamic sampling)."""

    enable: bool = False
    """Off: every group is trained."""
    metric: str = "score"
    """Number whose spread counts: score, acc, seq_reward, seq_final_reward, or any number the reward reports."""
    max_num_gen_batches: int = 100
    """Generation batches for one training batch; more, and the run ends: the data is to blame. <= 0 = no limit."""
    gen_batch_size: int = derived(">= 1")
    """Groups in flight per batch; default: groups_per_batch."""
    singletons: Literal["keep", "drop"] = "keep"
    """Groups of one; drop would never fill a batch with one sample per prompt."""
    variance_threshold: float = bounded(1e-8, ">= 0")
    """A group is kept if the variance of its metric is above this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongBufferConfig:
    """Soft penalty for responses close to response_length."""

    enable: bool = False
    """Off: length does not change the score."""
    len: int = bounded(0, ">= 0")
    """Tokens before response_length over which the penalty grows."""
    penalty_factor: float = bounded(1.0, ">= 0")
    """Penalty at response_length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Estimator, loss, corrections and shaping."""

    adv_estimator: str = option("grpo", choices=tuple(ADVANTAGE_OPTIONS), form="own code")
    """Advantage, or the dotted path of a function of yours; gigpo, step_reinforce and agentic_reinforce are for agentic
    configs."""
    adv_options: AdvantageOptions = section(GroupAdvantageOptions, chosen_by="adv_estimator")
    """Options of that estimator."""
    pg_variant: str = option("ppo", choices=tuple(POLICY_LOSS_OPTIONS), form="own code")
    """Policy loss, or the dotted path of a function of yours."""
    pg_options: PolicyLossOptions = section(PpoOptions, chosen_by="pg_variant")
    """Options of that loss."""
    ppo_epochs: int = bounded(1, ">= 1")
    """Passes over a batch."""
    proximal_logprobs: Literal["auto", "recompute", "reuse", "interpolate", "behaviour"] = "auto"
    """Log-probs of the weights before the step: a forward pass of their own (recompute); the step's own forward pass,
    the same numbers where it takes one optimizer step (reuse; auto where possible, else recompute); an interpolation by
    staleness; the engine's."""
    correction: CorrectionOptions = section(CorrectionOptions)
    """Weights and rejections for the difference between trainer and engine."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
    ] = "token-mean"
    """How per-token losses become one number; the last divides by response_length (agentic: sequence_length)."""
    norm_mean_type: Normalise = "none"
    """Rows whose mean is subtracted from the reward before the estimator."""
    norm_std_type: Normalise = "none"
    """Rows whose standard deviation divides the reward."""
    reward_shift: float = 0.0
    """Reward becomes (reward + shift) * scale."""
    reward_scale: float = 1.0
    """See reward_shift."""
    reward_clip: float | None = bounded(None, "> 0")
    """Symmetric clip of the reward; null = off."""
    advantage_clip: float | None = bounded(None, "> 0")
    """Symmetric clip of the advantage; null = off."""
    whiten_advantages: bool = False
    """Mean 0 and deviation 1 over the valid tokens of the batch."""
    entropy_loss_coef: float = bounded(0.0, ">= 0")
    """Weight of the entropy bonus; 0 = off."""
    kl_loss_coef: float = bounded(0.0, ">= 0")
    """Weight of the KL to `reference` in the loss; 0 = off. Of distilled rows alone where there are any
    (`rewards.NAME.type: distilled`), else of all sampled ones."""
    cross_entropy_coef: float = bounded(1.0, "> 0")
    """Weight of the cross-entropy of supervised rows (`rewards.NAME.type: supervised`)."""
    token_kl_coef: float = bounded(0.0, ">= 0")
    """Weight of the KL to `reference` in the token reward; 0 = off."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = "k3"
    """Estimate of the KL; `+` takes the gradient of k2."""
    target_kl: float | None = bounded(None, "> 0")
    """Adapts token_kl_coef towards this KL; null = fixed."""
    kl_horizon: int = bounded(10000, ">= 1")
    """Samples over which token_kl_coef adapts."""
    distill_coef: float = bounded(0.0, ">= 0")
    """Weight of the KL to `teacher` or `teachers` subtracted from the advantage; 0 = off."""
    value_clip: float | None = bounded(None, "> 0")
    """Clip of the critic's step; null = off."""
    critic_warmup: int = bounded(0, ">= 0")
    """Training steps in which only the critic trains."""
    max_len_mask: bool = option(False)
    """Responses that ended because their tokens ran out leave the loss."""
    difficulty_low: float | None = None
    """Groups with a mean score at or below this leave the loss; null = off."""
    difficulty_high: float | None = None
    """Groups with a mean score at or above this leave the loss; null = off."""
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling."""
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)
    """Overlong reward shaping."""

    def own_code(self) -> Iterator[tuple[str, str, str, Mapping[str, object]]]:
        """(key, dotted path, key of its options, options) of a loss and an estimator of the user's own."""
        if isinstance(self.pg_options, OwnLossOptions):
            yield "algorithm.pg_variant", self.pg_variant, "algorithm.pg_options", self.pg_options.given
        if isinstance(self.adv_options, OwnAdvantageOptions):
            yield "algorithm.adv_estimator", self.adv_estimator, "algorithm.adv_options", self.adv_options.given
