"""Trainer and engines on the same devices: they use them in turns, and each role frees its memory for the next.

             sleep(level), load all                    offload optimizer and gradients, wake weights
    ENGINES ------------------------> TRAINER ------------------------------------------------------> BOTH
       ^                                                                                                |
       +--------------- offload weights, wake KV cache (commit of a push, or nothing, in between) ------+

One step of a colocated run (async_generation_ratio 0):

    take_batch | to_trainer -> learn | to_both -> push, commit | to_engines -> resume -> generate

The classes below wrap queue, learner, checkpoint, validation, weight source and rollout. Each asks for the devices
before it needs them, so that loop and synchronizer are the same as in other runs. The memory that each role reports
after a change of turn is recorded by device (`DeviceMemory`): a role that did not free its memory is named at once,
before another role runs out of memory. Plain asyncio: the simulator and the tests run it on the virtual clock.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.states import QueueStats
from roll_async.inference.protocol import EngineMemory
from roll_async.inference.sleeping import KV_CACHE, WEIGHTS
from roll_async.pipelines.protocol import BatchQueue, Checkpointer, GroupLearner, PipelineParts, RunPlan
from roll_async.rollout.protocol import Validator
from roll_async.schema import Group
from roll_async.trainer.protocol import STATE_KINDS, OffloadingGroup, StateMemory, StepReport
from roll_async.weight_sync.bucket import Bucket, UpdatePlan
from roll_async.weight_sync.protocol import Rollout, WeightSource

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


class DevicePhase(Enum):
    """Which roles may use the shared devices."""

    ENGINES = "engines"  # weights and KV cache; the trainer has nothing there
    TRAINER = "trainer"  # all of its state; the engines have nothing there
    BOTH = "both"  # the weights of both, for a push; no KV cache, no optimizer state, no gradients


class MemoryNotGivenBack(RuntimeError):
    """A role still holds device memory in the turn of another role."""


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
            held[device] = held.get(device, 0) + sum(report.device_bytes.values())
        self._record(role, held)

    def record_replica(self, role: str, memory: EngineMemory) -> None:
        """Record the memory that a replica holds now, divided evenly over its devices."""
        devices = self.devices_of[role]
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
    """The state machine of turns. Transitions run one at a time; the error of a failed one ends the run."""

    def __init__(self, replicas: Callable[[], Sequence[SleepingReplica]], memory: DeviceMemory) -> None:
        """`replicas`: live replicas that share devices with a training role. At first the engines have the devices, and
        are paused.
        """
        self._replicas, self.memory = replicas, memory
        self._groups: dict[str, OffloadingGroup] = {}
        """Training roles that share devices with an engine."""
        self._lock = asyncio.Lock()
        self.turn = DevicePhase.ENGINES
        self.changes = 0
        """Changes of turn since the start."""
        self.seconds = 0.0
        """Seconds spent on changes of turn."""

    async def add_groups(self, groups: Mapping[str, OffloadingGroup]) -> None:
        """Add ranks that were started in the trainer's turn; they hold memory on their devices."""
        assert self.turn is DevicePhase.TRAINER, (
            "ranks start in the trainer's turn: otherwise there is no memory for them"
        )
        self._groups |= groups
        await self._record_groups(lambda group: group.load_states())

    async def to_trainer(self, level: int = KEEP_WEIGHTS) -> None:
        """Put the paused engines to sleep, then load all state of the ranks."""
        async with self._lock:
            if self.turn is DevicePhase.TRAINER:
                return
            if self.turn is DevicePhase.BOTH:  # a push failed half way: engines must be whole before they can sleep
                await self._both_to_engines()
            began = asyncio.get_running_loop().time()
            self.memory.check_released(await self._record_replicas(lambda replica: replica.sleep(level)))
            await self._record_groups(lambda group: group.load_states())
            self._changed(DevicePhase.TRAINER, began)

    async def to_both(self) -> None:
        """For a push: the ranks keep only their weights on the devices, the engines allocate theirs."""
        async with self._lock:
            if self.turn is DevicePhase.TRAINER:
                await self._trainer_to_both()
            assert self.turn is DevicePhase.BOTH, f"a push in the turn of the {self.turn.value}"

    async def to_engines(self) -> None:
        """Offload all state of the ranks, then give the engines weights and KV cache. They stay paused."""
        async with self._lock:
            if self.turn is DevicePhase.TRAINER:
                await self._trainer_to_both()
            if self.turn is DevicePhase.BOTH:
                await self._both_to_engines()

    async def _trainer_to_both(self) -> None:
        began = asyncio.get_running_loop().time()
        for name, group in self._groups.items():
            kinds = _TRAINING_ONLY if name == _PUSHED_ROLE else STATE_KINDS
            self.memory.record_ranks(name, await group.offload_states(kinds))
        self.memory.check_released([name for name in self._groups if name != _PUSHED_ROLE])
        await self._record_replicas(lambda replica: replica.wake([WEIGHTS]))
        self._changed(DevicePhase.BOTH, began)

    async def _both_to_engines(self) -> None:
        began = asyncio.get_running_loop().time()
        await self._record_groups(lambda group: group.offload_states())
        self.memory.check_released(list(self._groups))
        await self._record_replicas(lambda replica: replica.wake([KV_CACHE]))
        self._changed(DevicePhase.ENGINES, began)

    async def _record_groups(self, change: Callable[[OffloadingGroup], Awaitable[Sequence[StateMemory]]]) -> None:
        changed = await asyncio.gather(*(change(group) for group in self._groups.values()))
        for name, reports in zip(self._groups, changed, strict=True):
            self.memory.record_ranks(name, reports)

    async def _record_replicas(self, change: Callable[[SleepingReplica], Awaitable[EngineMemory]]) -> list[str]:
        """Returns their names."""
        replicas = list(self._replicas())
        changed = await asyncio.gather(*(change(replica) for replica in replicas))
        for replica, memory in zip(replicas, changed, strict=True):
            self.memory.record_replica(replica.name, memory)
        return [replica.name for replica in replicas]

    def _changed(self, turn: DevicePhase, began_s: float) -> None:
        self.turn, self.changes = turn, self.changes + 1
        self.seconds += asyncio.get_running_loop().time() - began_s


class PhasedRollout:
    """`weight_sync/protocol.py: Rollout`: engines are resumed only in their own turn."""

    def __init__(self, rollout: Rollout, turns: PhaseSwitcher, *, timeout_s: float, keeps_frozen: bool = False) -> None:
        """`timeout_s`: how long the engines may take to pause. `keeps_frozen`: a push sends adapters alone, so engines
        need the weights below them afterwards.
        """
        self._rollout, self._turns, self._timeout_s = rollout, turns, timeout_s
        self.level_before_push = KEEP_WEIGHTS if keeps_frozen else DROP_WEIGHTS
        self._stopped = turns.turn is not DevicePhase.ENGINES

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Pause the engines, unless they are paused."""
        if not self._stopped:
            await self._rollout.interrupt(mode, timeout_s)
            self._stopped = True

    async def release(self) -> None:
        await self._turns.to_engines()
        await self._rollout.release()
        self._stopped = False

    async def to_trainer(self, level: int = KEEP_WEIGHTS) -> None:
        """Pause the engines and give their devices to the trainer. Requests keep their tokens, not their KV cache."""
        await self.interrupt("resume", self._timeout_s)
        await self._turns.to_trainer(level)

    async def to_engines(self) -> None:
        """Give the engines the devices and resume them, unless they run."""
        if self._stopped:
            await self.release()

    @property
    def engines_run(self) -> bool:
        """Whether the engines have their turn and generate."""
        return not self._stopped


class PhasedSource:
    """`WeightSource`: the engines allocate memory for the weights before the first bucket."""

    def __init__(self, source: WeightSource, turns: PhaseSwitcher) -> None:
        self._source, self._turns = source, turns

    async def export_weights(self, plan: UpdatePlan) -> AsyncIterator[UpdatePlan | Bucket | str]:
        await self._turns.to_both()
        async for part in self._source.export_weights(plan):
            yield part

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        return await self._source.score(rows)


class PhasedLearner:
    """`GroupLearner` in the trainer's turn, whose beginning is reported apart from the work of the ranks. If a push of
    all weights follows the step, engines drop theirs instead of keeping a copy in host memory.
    """

    def __init__(self, learner: GroupLearner, rollout: PhasedRollout, pushes_after: Callable[[int], bool]) -> None:
        self._learner, self._rollout, self._pushes_after = learner, rollout, pushes_after

    async def learn(self, groups: Sequence[Group], step: int) -> StepReport:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._rollout.to_trainer(self._rollout.level_before_push if self._pushes_after(step) else KEEP_WEIGHTS)
        turn_s = loop.time() - began
        return replace(await self._learner.learn(groups, step), turn_s=turn_s)


class PhasedQueue:
    """`BatchQueue`: waiting for groups begins with the engines' turn."""

    def __init__(self, queue: BatchQueue, rollout: PhasedRollout) -> None:
        self._queue, self._rollout = queue, rollout

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        await self._rollout.to_engines()
        return await self._queue.take_batch(step, num_groups)

    async def freshness(self, step: int) -> BatchFreshness:
        return await self._queue.freshness(step)

    async def step_trained(self, step: int) -> None:
        await self._queue.step_trained(step)

    def stats(self) -> QueueStats:
        return self._queue.stats()

    def close(self) -> None:
        self._queue.close()


class PhasedSaves:
    """`Checkpointer` in the trainer's turn; engines that generated before are resumed afterwards."""

    def __init__(self, saves: Checkpointer, rollout: PhasedRollout) -> None:
        self._saves, self._rollout = saves, rollout

    async def save(self, step: int) -> None:
        generated = self._rollout.engines_run
        await self._rollout.to_trainer()
        await self._saves.save(step)
        if generated:
            await self._rollout.to_engines()

    async def finish(self) -> None:
        await self._saves.finish()


class PhasedValidates:
    """`Validator` in the engines' turn."""

    def __init__(self, validate: Validator, rollout: PhasedRollout) -> None:
        self._validate, self._rollout = validate, rollout

    async def prepare(self, step: int) -> bool:
        return await self._validate.prepare(step)

    async def __call__(self, step: int) -> Mapping[str, float]:
        await self._rollout.to_engines()
        return await self._validate(step)


def take_turns(parts: PipelineParts, plan: RunPlan, rollout: PhasedRollout) -> PipelineParts:
    """The parts of a run whose roles share devices. Each asks for the devices before it uses them."""

    def pushes_after(step: int) -> bool:
        whole = plan.groups_per_part == plan.groups_per_batch  # otherwise engines generate between the parts
        return whole and step % plan.sync_every == 0 and step < plan.max_steps

    validate = parts.validate
    return replace(
        parts,
        queue=PhasedQueue(parts.queue, rollout),
        learner=PhasedLearner(parts.learner, rollout, pushes_after),
        checkpoint=PhasedSaves(parts.checkpoint, rollout),
        validate=None if validate is None else PhasedValidates(validate, rollout),
    )
