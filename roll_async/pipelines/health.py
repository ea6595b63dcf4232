"""Monitors all components of a run: one log line of statistics for each at every interval, and the user's own monitor.

It only reads. Its lines begin with `Component Statistics`, so that they can be found in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from roll_async.buffer.states import QueueStats
from roll_async.pipelines.protocol import PipelineParts, TrainerState
from roll_async.pipelines.rlvr import TrainLoop
from roll_async.rollout.rollouter import RollouterStats
from roll_async.weight_sync.protocol import SyncState, SyncStatus

logger = logging.getLogger(__name__)


class Health(Enum):
    """State of health of a component."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # for another component
    DEGRADED = "degraded"  # runs with less than it was started with, as after the loss of an engine
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerStats:
    """Counters of the training side since the start of this process."""

    global_steps: int
    processed_samples: int
    current_param_version: int
    """Newest version that the engines serve; -1 before the first."""
    param_sync_count: int
    sync_failures: int
    state: TrainerState


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentHealth:
    """Health of one component, with its statistics as text."""

    name: str
    health: Health
    detail: str


CustomMonitor = Callable[[TrainerStats, RollouterStats], None]
"""The user's own monitor. Metrics are published by `compute_custom_metrics` instead."""


def trainer_stats(trainer: TrainLoop, sync: SyncStatus) -> TrainerStats:
    """The statistics of the training side."""
    return TrainerStats(
        global_steps=trainer.trained,
        processed_samples=trainer.num_samples,
        current_param_version=-1 if sync.version is None else sync.version,
        param_sync_count=sync.param_sync_count,
        sync_failures=sync.sync_failures,
        state=trainer.state,
    )


class HealthMonitor:
    """`run` is a task beside the loops that is cancelled at the end. Exceptions of the custom monitor end the run."""

    def __init__(
        self,
        trainer: TrainLoop,
        parts: PipelineParts,
        *,
        interval_s: float = 10.0,
        custom_monitor: CustomMonitor | None = None,
    ) -> None:
        self._trainer, self._parts = trainer, parts
        self._interval_s, self._custom_monitor = interval_s, custom_monitor

    async def run(self) -> None:
        """Report every interval, and once more when cancelled."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.report()
        finally:
            self.report()

    def report(self) -> None:
        """One round: the log lines, then the custom monitor."""
        trainer, rollouter = self._stats()
        for line in self.lines():
            logger.info("%s", line)
        if self._custom_monitor is not None:
            self._custom_monitor(trainer, rollouter)

    def lines(self) -> list[str]:
        """The state of every component at this moment, a line each."""
        return [f"Component Statistics: {c.name} {c.health.value}: {c.detail}" for c in self.components()]

    def components(self) -> list[ComponentHealth]:
        """The health of every component at this moment."""
        trainer, rollouter = self._stats()
        return [
            _trainer_health(trainer),
            _rollouter_health(rollouter, self._parts.queue.stats()),
            _queue_health(self._parts.queue.stats()),
            _sync_health(self._parts.synchronizer.status()),
        ]

    def _stats(self) -> tuple[TrainerStats, RollouterStats]:
        return trainer_stats(self._trainer, self._parts.synchronizer.status()), self._parts.rollouter.stats()


def _trainer_health(stats: TrainerStats) -> ComponentHealth:
    health = {
        TrainerState.STARTING: Health.STARTING,
        TrainerState.WAITING: Health.WAITING,
        TrainerState.STOPPED: Health.STOPPED,
    }.get(stats.state, Health.RUNNING)
    detail = (
        f"{stats.state.value}, step {stats.global_steps}, {stats.processed_samples} samples, version "
        f"{stats.current_param_version}, {stats.param_sync_count} parameter synchronizations"
    )
    return ComponentHealth(name="Trainer", health=health, detail=detail)


def _rollouter_health(stats: RollouterStats, queue: QueueStats) -> ComponentHealth:
    health = Health.RUNNING if stats.running_groups else Health.WAITING
    if stats.lost_servers > stats.returned_servers:
        health = Health.DEGRADED
    detail = (
        f"{stats.running_groups} groups running on {stats.num_servers} engines ({stats.lost_servers} lost, "
        f"{stats.returned_servers} returned), {stats.total_generated_samples} samples, {stats.filtered_groups} groups "
        f"filtered, {stats.generation_errors} errors, {stats.reward_outages} reward outages, "
        f"{queue.dropped_stale} groups dropped stale"
    )
    return ComponentHealth(name="Rollouter", health=health, detail=detail)


def _queue_health(stats: QueueStats) -> ComponentHealth:
    health = Health.RUNNING if stats.buffered else Health.WAITING
    detail = (
        f"{stats.buffered} groups waiting, {stats.in_flight} in flight, {stats.trained} trained, {stats.dropped} "
        f"dropped, {stats.failed} failed, {stats.stale_waiting} stale, {stats.memory_bytes / 2**20:.1f} MiB"
    )
    return ComponentHealth(name="MessageQueue", health=health, detail=detail)


def _sync_health(status: SyncStatus) -> ComponentHealth:
    health = Health.WAITING if status.state is SyncState.IDLE else Health.RUNNING
    if status.removed:
        health = Health.DEGRADED
    removed = f", removed: {', '.join(status.removed)}" if status.removed else ""
    detail = (
        f"{status.state.value}, version {status.version}, {status.param_sync_count} done, "
        f"{status.sync_failures} failed attempts{removed}"
    )
    return ComponentHealth(name="ParameterSynchronizer", health=health, detail=detail)
