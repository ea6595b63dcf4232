"""Types of the queue's interface to rollout and trainer: slots, outcomes, options, counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from roll_async.buffer.fingerprint import SEED, sorted_json
from roll_async.config.schema import PipelineConfig
from roll_async.config.staleness import StalenessPolicy, admission_limit, default_max_versions, staleness_bound
from roll_async.schema import WeightVersion


class GroupState(str, Enum):
    """Where an admitted group is. Every admitted group is in exactly one state."""

    IN_FLIGHT = "in_flight"  # holds a slot, not finished
    BUFFERED = "buffered"  # finished, durable, waits for the trainer
    TRAINING = "training"  # taken by a step that is not recorded yet
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"  # discarded, over the bound or aborted: its prompt is generated again
    FAILED = "failed"  # its prompt is not used again; the reason is stored


class ReleaseReason(str, Enum):
    """Why a slot is given back without a finished group."""

    FILTERED = "filtered"  # no training signal; the prompt is not used again
    FAILED = "failed"  # the prompt is not used again; the reason is stored
    REQUEUED = "requeued"  # aborted; the same prompt is generated again
    UNUSED = "unused"  # the data ended before this prompt: the slot was never used


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Permission to generate one group."""

    group_id: int
    """Admission number, increasing."""
    prompt_index: int
    """Position in the prompt stream."""
    admitted_version: WeightVersion
    """Every engine held at least this version when the slot was given out."""
    attempt: int = 0
    """Number of times that this prompt was admitted before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOptions:
    """The options of the queue. Times in seconds of the loop."""

    groups_per_batch: int
    """G: groups one training step consumes."""
    async_generation_ratio: float = 0.0
    """r: batches generated ahead."""
    trigger_parameter_sync_step: int = 1
    """k: training steps per weight push."""
    max_versions: int | None = None
    """M: no group over it is trained; None = `default_max_versions`."""
    policy: StalenessPolicy = StalenessPolicy.WAIT
    soft_versions: int | None = None
    """Older finished groups count as stale, and no new group starts while one of them waits."""
    max_age_s: float | None = None
    """Finished groups admitted longer ago are discarded when a step would take them, under every policy; None = off."""
    max_queue_size: int | None = None
    """Groups in flight or buffered; None = ceil((1 + r) * W), which the admission rule implies. Over-sampling adds
    `oversample_groups` to it.
    """
    oversample_groups: int = 0
    """Groups in flight in addition to those that the admission rule allows (gen_batch_size - G). The first to finish
    are kept; groups that no step could train in time become surplus (`MessageQueue.early_stop`), the others are left
    for the next steps.
    """
    samples_per_group: int | None = None
    """Trajectories that a finished group must have, or 1 if it is a supervised row; None = not checked."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Settings that finished groups and positions depend on, by name (`fingerprint.py`)."""
    batch_timeout_s: float = 30.0
    stall_timeout_s: float = 1800.0
    max_failed_groups: int = 100

    @classmethod
    def of(cls, config: PipelineConfig) -> QueueOptions:
        """Admission and staleness as in the config."""
        a, groups = config.async_training, config.algorithm.filter_groups
        extra = groups.gen_batch_size - config.groups_per_batch if groups.enable else 0
        return cls(
            groups_per_batch=config.groups_per_batch,
            async_generation_ratio=config.async_generation_ratio,
            trigger_parameter_sync_step=a.trigger_parameter_sync_step,
            max_versions=a.staleness.max_versions,
            policy=StalenessPolicy(a.staleness.policy),
            soft_versions=a.staleness.soft_versions,
            max_age_s=a.staleness.max_age_s,
            max_queue_size=a.max_queue_size,
            oversample_groups=max(0, extra),
            samples_per_group=config.samples_per_group,
            fingerprint={
                "samples per group": str(config.samples_per_group),
                SEED: str(config.seed),
                "template_kwargs": sorted_json(config.template_kwargs),
                "filter_groups": f"{groups.metric} > {groups.variance_threshold:g}" if groups.enable else "off",
            },
            batch_timeout_s=a.batch_timeout,
            stall_timeout_s=config.fault.stall_timeout,
            max_failed_groups=config.fault.max_failed_groups,
        )

    def __post_init__(self) -> None:
        bound = self.staleness_bound
        if self.policy is StalenessPolicy.WAIT and self.bound_versions < bound:
            raise ValueError(
                f"max_versions {self.max_versions} is below the {bound} versions admitted; with policy wait raise it"
            )
        if self.max_queue_size is not None and self.max_queue_size < self.groups_per_batch:
            raise ValueError(
                f"max_queue_size {self.max_queue_size} cannot hold the {self.groups_per_batch} groups of one batch; "
                f"give at least {self.groups_per_batch}"
            )

    @property
    def staleness_bound(self) -> int:
        """ceil((1 + r) * k) - 1."""
        return staleness_bound(ratio=self.async_generation_ratio, sync_every=self.trigger_parameter_sync_step)

    @property
    def bound_versions(self) -> int:
        """M: `max_versions`, or `default_max_versions`. 0 in a synchronous run (r = 0, k = 1), which is on-policy even
        with over-sampling.
        """
        if not self.async_generation_ratio and self.trigger_parameter_sync_step == 1:
            return 0
        if self.max_versions is not None:
            return self.max_versions
        return default_max_versions(
            ratio=self.async_generation_ratio,
            sync_every=self.trigger_parameter_sync_step,
            groups_per_batch=self.groups_per_batch,
            oversample_groups=self.oversample_groups,
        )

    @property
    def queue_limit(self) -> int:
        """`max_queue_size`, or ceil((1 + r) * W)."""
        return self.admission_limit(0) if self.max_queue_size is None else self.max_queue_size

    def admission_limit(self, version: WeightVersion) -> int:
        """ceil((p + 1 + r) * W) for the version the engines hold."""
        return admission_limit(
            version=version,
            ratio=self.async_generation_ratio,
            sync_every=self.trigger_parameter_sync_step,
            groups_per_batch=self.groups_per_batch,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStats:
    """Counts of the run. admitted = trained + filtered + dropped + failed + training + buffered + in_flight, at every
    instant.

    `training` is 0 between `step_trained` and the next `take_batch`.
    """

    admitted: int
    trained: int
    filtered: int
    dropped: int
    failed: int
    training: int
    buffered: int
    in_flight: int
    dropped_stale: int
    """Part of `dropped` that was finished and over the bound, or over max_age_s."""
    dropped_surplus: int
    """Part of `dropped` that had finished after others filled the batch; the rest was aborted."""
    late_results: int
    """Results of groups that had been released already; they are discarded."""
    requeued_prompts: int
    """Prompts waiting to be admitted again."""
    held_version: WeightVersion | None
    memory_bytes: int
    """Token arrays of the groups buffered or in training."""
    stale_waiting: int
    """Buffered groups older than soft_versions."""
    generated_samples: int
    generated_tokens: int
    trained_samples: int
    trained_tokens: int
    mean_generated_length: float = 0.0
    """Mean number of tokens of an answer, aborted ones estimated (`LengthAudit.mean_generated`)."""
    dropped_by_length: Mapping[int, int] = field(default_factory=dict)
    """Finished samples of dropped groups, by response length: key b counts lengths in (b / 2, b]."""
    failures: tuple[str, ...] = ()
    """The last failed prompts with their reasons."""

    @property
    def length_bias(self) -> float:
        """Mean response length of trained samples divided by that of the model's answers; 1 when either is empty."""
        if not self.trained_samples or not self.mean_generated_length:
            return 1.0
        return (self.trained_tokens / self.trained_samples) / self.mean_generated_length
