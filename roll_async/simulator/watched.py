"""The parts of a run with checks at their interfaces, and the receiver of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import ReleaseReason, Slot
from roll_async.rollout.dispatch.engine_pool import REPLY_WITHIN_S, EnginePool
from roll_async.rollout.rollouter import Rollouter
from roll_async.schema import Answered, Group, Prompt, SamplingParams
from roll_async.simulator.invariants import Watch

if TYPE_CHECKING:
    from roll_async.simulator.world import SimulatedRun


class CheckedQueue(MessageQueue):
    """A queue whose calls are checked."""

    watch: Watch
    world: SimulatedRun

    @property
    def last_change(self) -> object:
        """Another object after every change."""
        return self._changed

    async def reserve(self, max_groups: int) -> list[Slot]:
        slots = await super().reserve(max_groups)
        self.watch.admitted(slots, self, self.world.serving())
        return slots

    async def put(self, group: Group) -> bool:
        accepted = await super().put(group)
        self.watch.put(group, accepted=accepted)
        return accepted

    async def release(
        self, group_id: int, outcome: ReleaseReason, reason: str = "", *, group: Group | None = None
    ) -> None:
        # First: the call raises for too many failures, after the release.
        self.watch.released(group_id, outcome, reason)
        await super().release(group_id, outcome, reason, group=group)

    async def step_trained(self, step: int) -> None:
        await super().step_trained(step)
        self.watch.step_trained(step)

    def _open_slots(self) -> None:
        self.watch.slots_opened += 1
        super()._open_slots()


class SeenRollouter(Rollouter):
    """A rollouter whose pauses are checked."""

    watch: Watch
    world: SimulatedRun

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        await super().interrupt(mode, timeout_s)
        self.watch.paused(mode, self.world.serving(), self.world.manager.stats().in_flight)

    async def stop(self) -> None:
        self.world.ending_s = asyncio.get_running_loop().time()
        await super().stop()

    async def release(self) -> None:
        self.watch.resuming(self.world.serving())  # before the engines run again
        await super().release()


class SeenManager(EnginePool):
    """A manager whose aborts are timed."""

    watch: Watch
    world: SimulatedRun

    async def abort(self, request_ids: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        started, limit_s = loop.time(), self._options.interrupt_timeout_s + REPLY_WITHIN_S + 0.1
        await super().abort(request_ids)
        if (took_s := loop.time() - started) > limit_s:
            self.watch.report(11, f"an abort took {took_s:.1f} s, more than {limit_s:.1f} s")


class SeenSource:
    """Mixed into a group source: its validations are checked."""

    watch: Watch

    async def validate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, name: str) -> list[Answered]:
        self.watch.measuring(1)
        try:
            answered = await super().validate(prompts, sampling, name=name)  # type: ignore[misc]
        finally:
            self.watch.measuring(-1)
        self.watch.validated(int(name.split(".")[1]), answered, sampling)
        return answered


class Observer:
    """`pipelines/protocol.py: RunObserver`; adds how busy both sides were so far."""

    def __init__(self, world: SimulatedRun) -> None:
        self._world = world

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        world, now = self._world, asyncio.get_running_loop().time()
        engines_s = sum(r.engine.busy_until_now_s() for r in world.replicas if r.alive)
        busy = {"busy/engines_s": engines_s, "busy/trainer_s": world.trainer.busy_s}
        world.outcome.steps.append({"step": float(step), "time_s": now, **busy, **metrics})
        world.watch.published(step, metrics, now)

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        self._world.outcome.spans.append((track, name, start_s, end_s, args))

    def event(self, name: str, **fields: float | str) -> None:
        now = asyncio.get_running_loop().time()
        if name == "validation":
            self._world.watch.measured(fields)
        self._world.outcome.spans.append(("events", name, now, now, fields))
