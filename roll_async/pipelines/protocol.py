"""The plan of the loops, and the protocols of the other roles.

Queue, rollouter and synchronizer may be the objects themselves, or clients of objects in a process of their own
(`cluster/roles/rollout_process.py`); the counters of a client are those of the last answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.states import QueueStats
from roll_async.config.schema import PipelineConfig
from roll_async.rollout.protocol import ValidationMeasure
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.adapters import adapters_of
from roll_async.weight_sync.canary import CanaryReport, on_policy_band
from roll_async.weight_sync.protocol import OWN_DEVICES, Devices, SyncReport, SyncStatus


class BatchQueue(Protocol):
    """The trainer's side of `buffer/message_queue.py`, for the loop and its checkpoint."""

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]: ...

    async def freshness(self, step: int) -> BatchFreshness: ...

    async def step_trained(self, step: int) -> None: ...

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """What a checkpoint of a step holds of the queue: plain JSON values."""
        ...

    async def checkpointed(self, step: int) -> None:
        """That checkpoint is complete."""

    def stats(self) -> QueueStats: ...

    def close(self) -> None: ...


class Generator(Protocol):
    """`rollout/rollouter.py`, seen from the train loop."""

    async def run(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...

    def stats(self) -> RollouterStats: ...


class WeightPusher(Protocol):
    """`weight_sync/push.py`, seen from the train loop."""

    async def push(self, version: WeightVersion) -> SyncReport: ...

    async def checked(self) -> CanaryReport | None: ...

    async def wait_for_returned(self) -> None: ...

    async def resync_returned(self, version: WeightVersion) -> None: ...

    def status(self) -> SyncStatus: ...


class GroupLearner(Protocol):
    """`trainer/learner.py`, or a fake on the virtual clock."""

    async def learn(self, groups: Sequence[Group], step: int) -> StepReport: ...


class Checkpointer(Protocol):
    """Checkpoint of the whole loop at the end of a step."""

    async def save(self, step: int) -> None:
        """Write the checkpoint of a step; writing may continue in the background."""

    async def finish(self) -> None:
        """Wait for the save in the background, and raise its error."""


class RunObserver(Protocol):
    """The receiver of metrics, trace spans and events."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one training step (docs_roll/metrics.md)."""

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """A span of the trace, in seconds of the loop. `arrow_from`: a track that an arrow to the span begins at."""

    def event(self, name: str, **fields: float | str) -> None:
        """An event for the log: a validation, a weight push, a stop."""


class RunEnd(Enum):
    """Why a run ended without an error."""

    FINISHED = "finished"  # max_steps done
    END_OF_DATA = "end of data"
    INTERRUPTED = "interrupted"  # a stop was requested; the state is saved


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The number of steps, and the intervals of pushes, saves and validations."""

    first_step: int
    """1, or one past the restored step."""
    max_steps: int
    sync_every: int
    """k: training steps per weight push."""
    save_every: int
    """0 = only at the end."""
    eval_every: int
    """0 = never."""
    groups_per_batch: int
    """G: groups one step consumes."""
    samples_per_group: int
    """N."""
    groups_per_part: int
    """Groups that must be ready before the trainer starts on them; G, or a divisor of it (require_batches)."""
    devices_per_engine: int = 1
    on_policy_band: float | None = None
    """Largest mean difference of log-probs of tokens of the present weights, in nats; None disables the check."""
    stops_on_mismatch: bool = False
    """Such a mismatch ends the run."""
    validation_mode: str = "pause"
    """What waits for a validation: `ValidationConfig.mode`."""
    measures_restored: bool = False
    """The restored step has no result of a validation: if it is due there, it comes before step `first_step`."""
    pushes_adapters: bool = False
    """A push sends adapters alone: engines need the weights below them afterwards."""
    rescue_timeout_s: float = 1800.0
    """After another role failed: seconds to finish the step under way, and as many again for its checkpoint."""

    @classmethod
    def of(cls, config: PipelineConfig, *, first_step: int, measures_restored: bool = False) -> RunPlan:
        """As the config has it."""
        a = config.async_training
        return cls(
            first_step=first_step,
            max_steps=config.max_steps,
            sync_every=a.trigger_parameter_sync_step,
            save_every=config.save_steps,
            eval_every=config.eval_steps,
            groups_per_batch=config.groups_per_batch,
            samples_per_group=config.samples_per_group,
            groups_per_part=config.groups_per_batch * a.require_batches // config.mini_batches_per_batch,
            devices_per_engine=config.actor_infer.model_parallel_size,
            on_policy_band=on_policy_band(config),
            stops_on_mismatch=config.weight_sync.on_mismatch == "stop",
            validation_mode=config.validation_mode,
            measures_restored=measures_restored,
            pushes_adapters=adapters_of(config) is not None,
            rescue_timeout_s=config.fault.stall_timeout,
        )

    def replaces_weights_after(self, step: int) -> bool:
        """Whether engines get all of their weights anew before they generate again after step `step`."""
        whole = self.groups_per_part == self.groups_per_batch  # otherwise engines generate between the parts
        pushes = step % self.sync_every == 0 and step < self.max_steps
        return whole and pushes and not self.pushes_adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParts:
    """The roles the loop couples."""

    queue: BatchQueue
    rollouter: Generator
    learner: GroupLearner
    synchronizer: WeightPusher
    checkpoint: Checkpointer
    observer: RunObserver
    validate: ValidationMeasure | None = None
    devices: Devices = OWN_DEVICES
    dump: Callable[[int, Sequence[Group], Sequence[array], Sequence[array], Sequence[array]], None] | None = None
    """Called with the groups of every step; advantages, log-probs and entropies of their rows (`StepReport`)."""
    export: Callable[[str], Awaitable[None]] | None = None
    """Writes the trained model into a folder that transformers loads; None = there is no model."""


class TrainerState(Enum):
    """What the training side is doing."""

    STARTING = "starting"
    WAITING = "waiting"  # for groups
    LEARNING = "learning"
    SYNCHRONIZING = "synchronizing"  # a weight push
    VALIDATING = "validating"
    SAVING = "saving"
    STOPPED = "stopped"
