"""Protocols of the roles that take part in a weight push."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import Protocol

from roll_async.schema import WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan


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
