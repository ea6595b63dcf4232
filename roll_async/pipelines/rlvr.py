"""The RLVR loop: generation and training side by side, coupled only by the queue and the weight push.

            reserve / put                  take_batch
 Rollouter ----------------> MessageQueue ------------> TrainLoop: learn -> push weights -> validate -> save
     ^                            ^                          |
     |  pause / resume            | weights_held             |
     +----------------------------+------ synchronizer <-----+

Two coroutines under one TaskGroup (and a watcher that only reads); the first failure stops all.
`async_generation_ratio` 0 is the same loop: admission opens the next batch only when its weights are held. Queue: one
producer (Rollouter), one consumer (TrainLoop), bound `max_queue_size`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.train_loop import PipelineParts, RunPlan, TrainLoop


class RLVRPipeline:
    """Runs one training run to its end. `run` once.

    `trainer`: the training side, built from the same parts and plan. `watch`: a coroutine function that looks on until
    it is cancelled (`pipelines/health.py`).
    """

    def __init__(
        self,
        parts: PipelineParts,
        plan: RunPlan,
        *,
        trainer: TrainLoop | None = None,
        watch: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._parts, self._plan, self._watch = parts, plan, watch
        self._trainer = TrainLoop(parts, plan) if trainer is None else trainer

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self._trainer.request_stop()

    async def run(self) -> RunEnd:
        """Push the first weights, then generate and train until the end. Errors of any role are raised after all loops
        stopped.
        """
        parts, trainer = self._parts, self._trainer
        try:
            await parts.synchronizer.push(trainer.trained)
            async with asyncio.TaskGroup() as tasks:
                rollout = tasks.create_task(parts.rollouter.run(), name="rollouter")
                watch = tasks.create_task(self._watch(), name="watch") if self._watch else None  # type: ignore[arg-type]
                end = await tasks.create_task(trainer.run(), name="train loop")
                await parts.rollouter.stop()
                await rollout
                if watch is not None:
                    watch.cancel()
            await trainer.save()
        finally:
            parts.queue.close()
        return end
