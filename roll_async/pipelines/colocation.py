"""Training roles and engines on the same devices: who holds their memory, and how it changes hands.

              sleep(level), load all                   offload optimizer and gradients, wake weights
    GENERATE ----------------------> TRAIN ------------------------------------------------------> PUSH
        ^                                                                                           |
        +------------ offload weights, wake KV cache (commit of a push, or nothing, in between) ----+

One step of a colocated run (async_generation_ratio 0); `pipelines/rlvr.py` asks for the first two phases, the
synchronizer for the others:

    GENERATE: take_batch | TRAIN: learn, canary scores | PUSH: transfer, commit | GENERATE: take_batch of the next step

Engines are paused before they leave GENERATE and resumed when they are back. The memory that each role reports after a
change is recorded by device (`DeviceMemory`): a role that did not free its memory is named at once, before another role
runs out of memory. Plain asyncio: the tests run it on the virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from roll_async.inference.protocol import EngineMemory
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.trainer.protocol import STATE_KINDS, OffloadingGroup, StateMemory
from roll_async.weight_sync.protocol import DevicePhase

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of sleep of an engine. Weights that the next push replaces need not be kept."""
_PUSHED_ROLE = "actor_train"
"""The role whose weights are pushed to the engines."""
_TRAINING_ONLY = tuple(kind for kind in STATE_KINDS if kind != "weights")


class SleepingReplica(Protocol):
    """An engine replica on shared devices; see `inference/engine.py: Engine`."""

    name: str

    async def sleep(self, level: int) -> EngineMemory: ...

    async def wake(self, tags: Sequence[str]) -> EngineMemory: ...


class MemoryNotGivenBack(RuntimeError):
    """A role still holds device memory in the phase of another role."""


@dataclass(kw_only=True, slots=True)
class DeviceMemory:
    """Bytes by device and role, as the roles report them.

    Worked example: trainer ranks 0 and 1 on devices 0 and 1, one replica on both: its weights count half on each.
    """

    devices_of: Mapping[str, tuple[int, ...]]
    """Role to devices: one per rank, all of a replica."""
    capacity_bytes: int | None = None
    """Of each device; None = not known: only roles that must hold nothing are checked."""
    held: dict[str, dict[int, int]] = field(default_factory=dict)
    """Role to bytes by device."""
    peak_bytes: int = 0
    """Largest reported total of one device."""

    def record_ranks(self, role: str, reports: Sequence[StateMemory]) -> None:
        """Record the memory that the ranks of a training role hold now."""
        held: dict[int, int] = {}
        for device, report in zip(self.devices_of[role], reports, strict=True):
            held[device] = held.get(device, 0) + sum(report.device_bytes.values())  # ranks may share a device
        self._record(role, held)

    def record_replica(self, role: str, memory: EngineMemory) -> None:
        """Record the memory that a replica holds now, divided evenly over its devices."""
        devices = self.devices_of[role]
        # Rounded up: a replica that holds anything must not count as one that holds nothing.
        share = -(-(memory.weights_bytes + memory.kv_cache_bytes) // len(devices))
        self._record(role, {device: share for device in devices})

    def _record(self, role: str, held: dict[int, int]) -> None:
        """Raises MemoryNotGivenBack when the total of a device exceeds its capacity."""
        self.held[role] = held
        totals: dict[int, int] = {}
        for by_device in self.held.values():
            for device, size in by_device.items():
                totals[device] = totals.get(device, 0) + size
        self.peak_bytes = max(self.peak_bytes, *totals.values())
        for device, total in totals.items():
            if self.capacity_bytes is not None and total > self.capacity_bytes:
                shares = {name: parts[device] for name, parts in self.held.items() if parts.get(device)}
                raise MemoryNotGivenBack(
                    f"device {device} has {self.capacity_bytes} bytes and its roles hold {total}: {shares}"
                )

    def check_released(self, roles: Sequence[str]) -> None:
        """Raises MemoryNotGivenBack when one of these roles holds anything."""
        for role in roles:
            if size := sum(self.held.get(role, {}).values()):
                raise MemoryNotGivenBack(f"{role} should have freed its device memory and holds {size} bytes")


class PhaseSwitcher:
    """`weight_sync/protocol.py: Devices`, and the `Rollout` of the synchronizer, which a phase may have paused already.

    One caller at a time: the train loop, and the synchronizer while the loop waits for a push. The error of a change
    that failed ends the run.
    """

    def __init__(
        self,
        engines: EnginePool,
        sleepers: Callable[[], Sequence[SleepingReplica]],
        memory: DeviceMemory,
        *,
        pause_timeout_s: float,
    ) -> None:
        """`engines`: all of them; at first they run, and have the devices. `sleepers`: live replicas that share devices
        with a training role. `pause_timeout_s`: how long engines may take to pause.
        """
        self._engines, self._sleepers, self._pause_timeout_s = engines, sleepers, pause_timeout_s
        self.memory = memory
        self._groups: dict[str, OffloadingGroup] = {}
        """Training roles that share devices with an engine."""
        self.current = DevicePhase.GENERATE
        self._paused = False

    async def add_groups(self, groups: Mapping[str, OffloadingGroup]) -> None:
        """Add ranks that were started in phase TRAIN; they hold memory on their devices."""
        assert self.current is DevicePhase.TRAIN, "ranks start in phase TRAIN: otherwise there is no memory for them"
        self._groups |= groups  # all of their state is loaded: the call below only tells how much it is
        await self._record_groups(lambda group: group.load_states())

    async def phase(self, phase: DevicePhase, *, drop_engine_weights: bool = False) -> float:
        """See `Devices.phase`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if phase is DevicePhase.TRAIN:
            await self._train(DROP_WEIGHTS if drop_engine_weights else KEEP_WEIGHTS)
        elif phase is DevicePhase.PUSH:
            await self._push()
        else:
            await self.release()
        return loop.time() - began_s

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Pause the engines, unless they are paused. Requests keep their tokens; those of a sleeping engine lose their
        KV cache.
        """
        if not self._paused:
            await self._engines.interrupt(mode, timeout_s)
            self._paused = True

    async def release(self) -> None:
        """Phase GENERATE, in which the engines run."""
        if self.current is DevicePhase.TRAIN:  # no push came: the same changes, without a transfer
            await self._push()
        if self.current is DevicePhase.PUSH:
            await self._wake_engines()
        if self._paused:
            await self._engines.resume()  # last: without a KV cache they cannot run
            self._paused = False

    async def _train(self, level: int) -> None:
        """Put the paused engines to sleep, then load all state of the ranks."""
        if self.current is DevicePhase.TRAIN:
            return
        await self.interrupt("resume", self._pause_timeout_s)
        if self.current is DevicePhase.PUSH:  # a push failed half way: engines must be whole before they can sleep
            await self._wake_engines()
        self.memory.check_released(await self._record_replicas(lambda replica: replica.sleep(level)))
        await self._record_groups(lambda group: group.load_states())
        self.current = DevicePhase.TRAIN

    async def _push(self) -> None:
        """The ranks keep only their weights on the devices, the engines allocate theirs."""
        if self.current is DevicePhase.PUSH:  # another attempt
            return
        assert self.current is DevicePhase.TRAIN, "a push from phase GENERATE: the ranks have no weights to send"
        for name, group in self._groups.items():
            kinds = _TRAINING_ONLY if name == _PUSHED_ROLE else STATE_KINDS  # its weights are what is sent
            self.memory.record_ranks(name, await group.offload_states(kinds))
        self.memory.check_released([name for name in self._groups if name != _PUSHED_ROLE])
        # Without the KV cache, which is the larger part and would not fit beside the trainer's weights.
        await self._record_replicas(lambda replica: replica.wake([WEIGHTS]))
        self.current = DevicePhase.PUSH

    async def _wake_engines(self) -> None:
        """Offload all state of the ranks, then give the engines their KV cache. They stay paused."""
        # First: the KV cache takes the memory they free.
        await self._record_groups(lambda group: group.offload_states())
        self.memory.check_released(list(self._groups))
        await self._record_replicas(lambda replica: replica.wake([KV_CACHE]))
        self.current = DevicePhase.GENERATE

    async def _record_groups(self, change: Callable[[OffloadingGroup], Awaitable[Sequence[StateMemory]]]) -> None:
        changed = await asyncio.gather(*(change(group) for group in self._groups.values()))
        for name, reports in zip(self._groups, changed, strict=True):
            self.memory.record_ranks(name, reports)

    async def _record_replicas(self, change: Callable[[SleepingReplica], Awaitable[EngineMemory]]) -> list[str]:
        """Returns their names."""
        replicas = list(self._sleepers())
        changed = await asyncio.gather(*(change(replica) for replica in replicas))
        for replica, memory in zip(replicas, changed, strict=True):
            self.memory.record_replica(replica.name, memory)
        return [replica.name for replica in replicas]
