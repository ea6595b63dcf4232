"""Continuous generation: slots from the queue, groups back to it.

    queue.reserve --slot--> run_group --KEPT--> queue.put
                               |  FILTERED, FAILED, REQUEUED --> queue.release (the slot is free at once)

One task per admitted group. `reserve` is the only brake: admission and staleness live in the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import Outcome, Slot
from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, GroupFate, GroupOutcome
from roll_async.rollout.protocol import PromptSource
from roll_async.rollout.server_manager import AsyncLLMServerManager
from roll_async.schema import Group

logger = logging.getLogger(__name__)

_RESERVE_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RollouterStats:
    """Counters since the start; names of the fully asynchronous mode's metrics."""

    total_generated_samples: int
    generation_errors: int
    param_sync_requests: int
    filtered_groups: int
    running_groups: int
    busy_s: float
    """Seconds during which at least one request ran."""


class Rollouter:
    """Produces finished groups until the data ends or `stop` is called."""

    def __init__(
        self,
        queue: MessageQueue,
        scheduler: ChatCompletionScheduler,
        manager: AsyncLLMServerManager,
        prompts: PromptSource,
        *,
        on_group: Callable[[Group], None] | None = None,
    ) -> None:
        self._queue, self._scheduler, self._manager, self._prompts = queue, scheduler, manager, prompts
        self._on_group = on_group
        self._groups: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._running = asyncio.Event()
        self._running.set()
        self._samples = self._errors = self._filtered = self._syncs = 0

    async def run(self) -> None:
        """Consumes slots, produces groups; waits for admission, unblocked by weight pushes, releases and `stop`."""
        async with asyncio.TaskGroup() as tasks:
            failure = tasks.create_task(self._manager.wait_failed(), name="engine watch")
            reserving = tasks.create_task(self._reserve(tasks), name="reserve")
            await reserving
            while self._groups:
                await asyncio.wait(list(self._groups))
            failure.cancel()

    async def _reserve(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping:
            await self._running.wait()
            slots = await self._queue.reserve(_RESERVE_AT_ONCE)
            if not slots:
                return
            for slot in slots:
                await self._start(slot, tasks)

    async def _start(self, slot: Slot, tasks: asyncio.TaskGroup) -> None:
        prompt = self._prompts.at(slot.prompt_index)
        if prompt is None:
            await self._queue.release(slot.group_id, Outcome.UNUSED)
            self._queue.end_of_data()
            return
        if self._stopping:
            await self._queue.release(slot.group_id, Outcome.REQUEUED, "stop")
            return

        async def produce() -> None:
            outcome = await self._custom_generation_logic(slot, prompt)
            await self._deliver(slot, outcome)

        task = tasks.create_task(produce(), name=f"group {slot.group_id}")
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    async def _custom_generation_logic(self, slot: Slot, prompt) -> GroupOutcome:  # noqa: ANN001 (Prompt)
        """How one slot becomes a group; the hook for sub-classes."""
        return await self._scheduler.run_group(
            prompt, group_id=slot.group_id, attempt=slot.attempt, admitted_version=slot.admitted_version
        )

    async def _deliver(self, slot: Slot, outcome: GroupOutcome) -> None:
        match outcome.fate:
            case GroupFate.KEPT:
                assert outcome.group is not None
                self._samples += len(outcome.group.samples)
                await self._queue.put(outcome.group)
                if self._on_group is not None:
                    self._on_group(outcome.group)
            case GroupFate.FILTERED:
                self._samples += len(outcome.group.samples) if outcome.group is not None else 0
                self._filtered += 1
                await self._queue.release(slot.group_id, Outcome.FILTERED, outcome.reason)
            case GroupFate.FAILED:
                self._errors += 1
                logger.error("group %d (prompt %d) failed: %s", slot.group_id, slot.prompt_index, outcome.reason)
                await self._queue.release(slot.group_id, Outcome.FAILED, outcome.reason)
            case GroupFate.REQUEUED:
                await self._queue.release(slot.group_id, Outcome.REQUEUED, outcome.reason)

    async def pause(self) -> None:
        """No new group starts, running requests stop and keep their tokens (validation)."""
        self._running.clear()
        await self._manager.set_aside(True)

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        await self._manager.set_aside(False)
        self._running.set()

    async def interrupt(self, mode: str, timeout_s: float) -> None:
        """Bring the engines to a stand-still for a weight push."""
        self._syncs += 1
        await self._manager.interrupt(mode, timeout_s)

    async def release(self) -> None:
        """The weight push is over: engines run again."""
        await self._manager.resume()

    async def stop(self) -> None:
        """Start nothing more, abort what runs, give its slots back; `run` then returns."""
        self._stopping = True
        self._running.set()
        self._queue.stop_reserving()
        while self._groups:
            running = [t for t in self._groups if not t.done()]
            if not running:
                await asyncio.sleep(0)
                continue
            await self._manager.abort_all()
            await asyncio.wait(running)

    def stats(self) -> RollouterStats:
        """Counters since the start."""
        return RollouterStats(
            total_generated_samples=self._samples,
            generation_errors=self._errors,
            param_sync_requests=self._syncs,
            filtered_groups=self._filtered,
            running_groups=len(self._groups),
            busy_s=self._manager.stats().busy_s,
        )
