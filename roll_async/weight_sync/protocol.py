"""The roles that take part in a weight push, its options, and what it tells of itself."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from roll_async.config.schema import PipelineConfig
from roll_async.schema import WeightVersion
from roll_async.weight_sync.adapters import adapters_of
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.transport.transports import sends_changes


class WeightSource(Protocol):
    """The trainer's side."""

    def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        """The plan with the engines' layout, every bucket, then the digest."""
        ...

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        """Log-prob of every token of each row but the first, given those before it, under the current weights, at
        temperature 1.
        """
        ...


class TakesWeights(Protocol):
    """One weight update after the other, see `inference/protocol.py: Engine`."""

    async def begin_update(self, plan: UpdatePlan) -> None: ...

    async def load_bucket(self, bucket: Bucket) -> None: ...

    async def finish_update(self) -> str: ...

    async def commit(self, version: WeightVersion) -> None: ...


class UpdatedReplica(TakesWeights, Protocol):
    """One engine replica, seen from the synchronizer. A dead replica raises ConnectionError from any call."""

    name: str

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        """As `WeightSource.score`, under the weights that are served."""
        ...


Replica = TypeVar("Replica", bound=UpdatedReplica)
"""The pool's type of replicas; it is called with the same objects."""


class ReplicaPool(Protocol[Replica]):
    """Replicas that a push gives weights: `rollout/dispatch/returning.py`."""

    holding: dict[str, Replica]
    """By name: up and paused until they have weights."""

    @property
    def clients(self) -> Sequence[Replica]:
        """Those that serve."""
        ...

    @property
    def expects_return(self) -> bool:
        """Whether another one is being started."""
        ...

    def attach(self, held: asyncio.Event) -> None:
        """`held` is to be set when a replica is held."""

    async def rejoin(self, client: Replica) -> None:
        """A held replica has the weights: it runs from now on."""

    async def reject(self, client: Replica, reason: str) -> None:
        """This replica did not get the weights."""


class Rollout(Protocol):
    """Pauses and resumes all replicas for a push."""

    async def interrupt(self, mode: str, timeout_s: float) -> None: ...

    async def release(self) -> None: ...


class DevicePhase(Enum):
    """Which roles hold the memory of devices that training roles and engines share."""

    GENERATE = "generate"  # engines: weights and KV cache; training roles hold nothing there
    TRAIN = "train"  # training roles: all of their state; engines hold nothing there
    PUSH = "push"  # the weights of both; no KV cache, no gradients, no optimizer state


class Devices(Protocol):
    """Changes of phase: `pipelines/colocation.py: PhaseSwitcher`, or `OWN_DEVICES`."""

    @property
    def current(self) -> DevicePhase: ...

    async def phase(self, phase: DevicePhase, *, drop_engine_weights: bool = False) -> float:
        """Change to a phase, unless it is the current one; returns the seconds of it. Pauses the engines before TRAIN
        and resumes them in GENERATE. `drop_engine_weights`: a push replaces them all before engines run again, so they
        need not be kept in host memory.
        """
        ...


class OwnDevices:
    """`Devices` where training roles and engines share none: engines may always generate."""

    current = DevicePhase.GENERATE

    async def phase(self, phase: DevicePhase, *, drop_engine_weights: bool = False) -> float:
        return 0.0


OWN_DEVICES = OwnDevices()


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """The options of a push. Times in seconds of the loop."""

    transport: str
    verify: str = "sample"
    interrupt_mode: str = "resume"
    interrupt_timeout_s: float = 30.0
    max_retries: int = 3
    timeout_s: float = 300.0
    """Limit of one attempt to transfer, and of the swap."""
    retry_delay_s: float = 1.0
    sparse: bool = False
    """Send only what changed to replicas that hold what the last export sent."""
    adapters: bool = False
    """Send only the adapters to replicas that hold the weights below them."""

    @classmethod
    def of(cls, config: PipelineConfig, transport: str) -> SyncOptions:
        """Options of a weight push as in the config. `transport`: the result of `choose_transport`."""
        a = config.async_training
        return cls(
            transport=transport,
            verify=config.weight_sync.verify,
            interrupt_mode=a.interrupt.mode,
            interrupt_timeout_s=a.interrupt.timeout,
            max_retries=a.max_sync_retries,
            timeout_s=a.sync_timeout,
            retry_delay_s=a.sync_retry_delay,
            sparse=sends_changes(config.weight_sync.sparse, transport),
            adapters=adapters_of(config) is not None,
        )


class SyncState(Enum):
    """Phase of a push."""

    IDLE = "idle"
    PAUSING = "pausing"  # engines finish or abort their requests
    TRANSFERRING = "transferring"  # buckets are sent and loaded
    VERIFYING = "verifying"  # digests of the replicas are compared
    WAITING_TO_RETRY = "waiting_to_retry"
    COMMITTING = "committing"  # verified weights become the served ones
    RESUMING = "resuming"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One finished push."""

    version: WeightVersion
    total_s: float
    pause_s: float
    """Seconds until the engines were paused."""
    transfer_s: float
    """Seconds until the digests of all replicas were verified, all attempts together."""
    stopped_s: float
    """Seconds from the interruption until the engines go on, in which none generated."""
    num_bytes: int
    """Sent by the trainer in the last attempt."""
    sent_share: float
    """Values sent of all values; below 1 where only changes were sent."""
    attempts: int
    replicas: int
    """Replicas that serve the version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncStatus:
    """A snapshot for monitoring and error messages."""

    state: SyncState
    version: WeightVersion | None
    """Newest version that the engines serve."""
    target: WeightVersion | None
    """Version being pushed."""
    attempt: int
    param_sync_count: int
    sync_failures: int
    failures: dict[str, str] = field(default_factory=dict)
    """Replica name to the reason of its last failure, cleared when it holds a version."""
    removed: tuple[str, ...] = ()


class SyncFailed(RuntimeError):
    """No replica holds the version after all retries."""
