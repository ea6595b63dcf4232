"""What the pipeline needs from a group of training ranks, and what travels to it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roll_async.weight_sync.bucket import Bucket, UpdatePlan

if TYPE_CHECKING:
    from torch import Tensor

    from roll_async.algorithms.objective import PreferenceOptions
    from roll_async.schema import ExpertRows, Image


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Rows to score. Shape letters: B rows, T positions."""

    tokens: Tensor  # [B,T] int64, right-padded
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T] bool, where a log-prob is wanted
    experts: ExpertRows | None = None
    """Choice of experts to replay; None = the model's own."""
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] of each row; () = no row has any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRows:
    """One training step for the actor: rows with everything the loss reads. Split into mini-batches in row order."""

    tokens: Tensor  # [B,T] int64, right-padded
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T] bool, trained tokens of all parts of the loss, after staleness and sample masks
    advantages: Tensor  # [B,T] float32
    behaviour_logprobs: Tensor  # [B,T] float32
    proximal_logprobs: (
        Tensor | None
    )  # [B,T] float32; None = each micro-batch makes and corrects its own (algorithm.proximal_logprobs)
    correction_weights: Tensor | None  # [B,T] float32 of algorithms.correction.correct
    scores: Tensor  # [B] float32, raw outcome scores (topr)
    version_lag: Tensor  # [B,T] int64, staleness of each token in steps, 0 where masked
    ref_logprobs: Tensor | None = None  # [B,T]
    segment_ids: Tensor | None = None  # [B,T] int64
    selection: Tensor | None = None  # [B,T] bool
    policy_mask: Tensor | None = None  # [B,T] bool, tokens of the policy part; None = all of `mask`
    cross_entropy_mask: Tensor | None = None  # [B,T] bool, tokens of supervised rows; None = there are none
    reference_kl_mask: Tensor | None = None  # [B,T] bool, tokens of distilled rows; None = those of the policy part
    kept: Tensor | None = None  # [B] bool, rows whose entropies are asked for; None = nobody asks
    experts: ExpertRows | None = None
    """Choice of experts to replay; None = the model's own."""
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] of each row; () = no row has any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRows(TokenRows):
    """One optimizer step on given rows (sft); with a preference their order is chosen, rejected, chosen, ... (dpo)."""

    preference: PreferenceOptions | None = None
    """None: cross-entropy."""
    ref_logprobs: Tensor | None = None  # [B] float32: sums over the masked tokens, of the reference


def mini_batch_ranges(num_rows: int, mini_batch_rows: int) -> list[range]:
    """Rows of each optimizer step, of equal size: trajectories of several rows make a batch that is no multiple of a
    mini-batch.
    """
    parts = max(1, round(num_rows / mini_batch_rows))
    return [range(num_rows * i // parts, num_rows * (i + 1) // parts) for i in range(parts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRows:
    """One training step for the critic."""

    tokens: Tensor  # [B,T] int64
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B,T] bool
    old_values: Tensor  # [B,T] float32
    returns: Tensor  # [B,T] float32
    images: tuple[tuple[Image, ...], ...] = ()
    """[B] of each row; () = no row has any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one training step did. Times in seconds of the event loop."""

    metrics: Mapping[str, float]
    logprobs_s: float
    train_s: float
    collation_s: float
    """Of the step, in which no rank had work: groups to tensors, scores to advantages."""
    roles_s: float = 0.0
    """Of the step, in which the actor's devices had no work and those of reference, teacher or critic had."""
    turn_s: float = 0.0
    """Before the step, in which the engines gave their devices to the ranks; 0 where they share none."""
    num_samples: int
    num_tokens: int
    """Prompt and response tokens of the batch, padding excluded."""
    advantages: tuple[array, ...] = ()
    """Of each row of the batch, in its order: [R] float32 over the response, as the loss got them; what the policy has
    not sampled has no meaning. Empty = none were made."""
    trainer_logprobs: tuple[array, ...] = ()
    """Of each row likewise, by the weights that the step began with; 0 where not sampled. Empty = the driver has none:
    each micro-batch made its own, or the engines' were taken.
    """
    entropies: tuple[array, ...] = ()
    """Of each row likewise, in nats, by the weights that its own optimizer step began with; NaN where not trained, and
    in rows that are not kept. Empty = nobody asks for any."""


STATE_KINDS = ("weights", "optimizer", "gradients")
"""What a rank holds on its device between calls, in the order in which it comes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateMemory:
    """Where the state of a rank lies, in bytes by kind of STATE_KINDS."""

    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    """What was moved away from the device; gradients are counted, but not kept."""
    allocated_bytes: int | None
    """All that the process has allocated on its CUDA device; None on CPU."""


class OffloadingGroup(Protocol):
    """Ranks that share devices with another role and take turns with it."""

    async def offload_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Move kinds of state to host memory and give the device's back; one report per rank, in their order. Until
        `load_states` a call that needs what is away raises RuntimeError.
        """
        ...

    async def load_states(self, kinds: Sequence[str] = STATE_KINDS) -> list[StateMemory]:
        """Bring kinds of state back, bit by bit; gradients as zeros."""
        ...


class ScoringGroup(Protocol):
    """Ranks that score given tokens: reference, teacher, and the actor itself."""

    async def compute_logprobs(self, rows: TokenRows) -> Tensor:
        """[B,T] float32 log-prob of token t given the tokens before it; 0 where not in the mask."""
        ...


class TrainerGroup(ScoringGroup, Protocol):
    """The ranks of `actor_train`. Data-parallel splitting is its own business: callers hand in whole batches."""

    async def compute_squares(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, the sum over the vocabulary of the squared probability at token t; 0 where not in the mask."""
        ...

    async def update_given(self, rows: GivenRows, step: int) -> Mapping[str, float]:
        """One optimizer step on rows that are not sampled."""
        ...

    async def update_policy(self, rows: PolicyRows, step: int) -> tuple[Mapping[str, float], Tensor | None]:
        """All optimizer steps of one training step. Metrics: loss, grad_norm, learning_rate, policy/...,
        num_optimizer_steps. With `rows.kept` also the [B,T] float32 entropies of these rows, see StepReport.
        """
        ...

    def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """First the plan with the engines' layout, then its buckets in order, then the digest, one part per engine rank
        (see `digest.py`). The memory of a bucket may be reused when the iterator is advanced.
        """
        ...

    async def save(self, folder: str, step: int, state: bytes) -> None:
        """Write a checkpoint with the caller's own `state`; atomic: `folder` exists only when it is complete."""

    async def load(self, folder: str) -> bytes:
        """Restore model, optimizer, schedule and RNG; returns the caller's `state`. Raises ValueError naming a bad
        file.
        """
        ...

    async def export_hf(self, folder: str) -> None:
        """Write a transformers-loadable folder (safetensors with index, config, tokenizer)."""


class CriticGroup(Protocol):
    """The ranks of `critic`."""

    async def compute_values(self, rows: TokenRows) -> Tensor:
        """[B,T] float32, the value of the state before token t."""
        ...

    async def update_values(self, rows: ValueRows, step: int) -> Mapping[str, float]: ...
