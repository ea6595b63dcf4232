"""The RLVR loop: generation and training side by side, coupled only by the queue and the weight push.

            reserve / put                  take_batch
 Rollouter ----------------> MessageQueue ------------> train loop: learn -> push weights -> validate -> save
     ^                            ^                          |
     |  pause / resume            | weights_held             |
     +----------------------------+------ synchronizer <-----+

Two coroutines under one TaskGroup; the first failure stops both. `async_generation_ratio` 0 is the same loop: admission
opens the next batch only when its weights are held. Queue: one producer (Rollouter), one consumer (train loop), bound
`max_queue_size`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from roll_async.buffer.message_queue import EndOfData, MessageQueue
from roll_async.pipelines.metrics import StepClock, step_metrics
from roll_async.pipelines.protocol import Learns, Observes, RunEnd, Saves
from roll_async.rollout.rollouter import Rollouter
from roll_async.schema import Group
from roll_async.weight_sync.synchronizer import ParameterSynchronizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """How long, and how often what."""

    first_step: int
    """1, or one past the restored step."""
    max_steps: int
    sync_every: int
    """k: training steps per weight push."""
    save_every: int
    """0 = only at the end."""
    eval_every: int
    """0 = never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParts:
    """The roles the loop couples."""

    queue: MessageQueue
    rollouter: Rollouter
    learner: Learns
    synchronizer: ParameterSynchronizer
    checkpoint: Saves
    observer: Observes
    validate: Callable[[int], Awaitable[Mapping[str, float]]] | None = None


class RLVRPipeline:
    """Runs one training run to its end. `run` once."""

    def __init__(self, parts: PipelineParts, plan: RunPlan) -> None:
        self._parts, self._plan = parts, plan
        self._stop = asyncio.Event()
        self._trained = plan.first_step - 1

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self._stop.set()

    async def run(self) -> RunEnd:
        """Push the first weights, then generate and train until the end. Errors of any role are raised after all loops
        stopped.
        """
        parts, plan = self._parts, self._plan
        await parts.synchronizer.push(self._trained)
        async with asyncio.TaskGroup() as tasks:
            rollout = tasks.create_task(parts.rollouter.run(), name="rollouter")
            end = await tasks.create_task(self._train(), name="train loop")
            await parts.rollouter.stop()
            await rollout
        if self._trained >= plan.first_step and not (plan.save_every and self._trained % plan.save_every == 0):
            await parts.checkpoint.save(self._trained)
        parts.queue.close()
        return end

    async def _train(self) -> RunEnd:
        """Consumes one batch a step; waits for the queue, unblocked by put, by the end of the data or by a stop."""
        parts, plan = self._parts, self._plan
        busy_s = 0.0
        for step in range(plan.first_step, plan.max_steps + 1):
            clock = StepClock()
            try:
                with clock.measure("wait_batch"):
                    groups = await self._unless_stopped(parts.queue.take_batch(step))
            except EndOfData as end:
                parts.observer.event("end_of_data", leftover=str(end))
                return RunEnd.END_OF_DATA
            if groups is None:
                return RunEnd.INTERRUPTED
            with clock.measure("learn"):
                report = await parts.learner.learn(groups, step)
            ages = parts.queue.freshness(step)
            await parts.queue.step_trained(step)
            self._trained = step
            sync = None
            if step % plan.sync_every == 0 and step < plan.max_steps:
                with clock.measure("weight_sync"):
                    sync = await parts.synchronizer.push(step)
            with clock.measure("validation"):
                validation = await self._validate(step)
            if plan.save_every and step % plan.save_every == 0:
                with clock.measure("save"):
                    await parts.checkpoint.save(step)
            busy_s, busy_before = parts.rollouter.stats().busy_s, busy_s
            metrics = step_metrics(step, groups, report, sync, clock, parts.queue.stats(), ages, busy_s - busy_before)
            parts.observer.step(step, {**metrics, **validation})
            self._trace(step, groups, clock)
            if self._stop.is_set():
                return RunEnd.INTERRUPTED
        return RunEnd.FINISHED

    def _trace(self, step: int, groups: Sequence[Group], clock: StepClock) -> None:
        observer = self._parts.observer
        for name, started, ended in clock.spans:
            observer.span("trainer", name, started, ended, step=step)
        for group in groups:
            observer.span("groups", f"group {group.group_id}", group.admitted_s, group.finished_s, trained_by=step)

    async def _validate(self, step: int) -> Mapping[str, float]:
        """Generation for training stands still while the validation prompts run, and goes on afterwards."""
        parts, plan = self._parts, self._plan
        if parts.validate is None or not plan.eval_every or step % plan.eval_every:
            return {}
        await parts.rollouter.pause()
        try:
            return await parts.validate(step)
        finally:
            await parts.rollouter.resume()

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when the stop came first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for pending in (task, stop):
                pending.cancel()
