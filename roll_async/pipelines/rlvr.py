"""The RLVR loop: generation and training side by side, coupled only by the queue and the weight push.

            reserve / put                  take_batch
 Rollouter ----------------> MessageQueue ------------> TrainLoop: learn -> push weights -> validate -> save
     ^                            ^                          |
     |  pause / resume            | weights_held             |
     +----------------------------+------ synchronizer <-----+

Two coroutines under one TaskGroup (and a watcher that only reads); the first failure stops all. When it is not the
trainer's own, the step under way is finished first, and the last whole step is saved before the error is raised.
`async_generation_ratio` 0 is the same loop: admission opens the next batch only when its weights are held. Queue: one
producer (Rollouter), one consumer (TrainLoop), bound `max_queue_size`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import first_cause
from roll_async.pipelines.protocol import RunEnd
from roll_async.pipelines.train_loop import PipelineParts, RunPlan, TrainLoop

logger = logging.getLogger(__name__)


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
        self.trainer = TrainLoop(parts, plan) if trainer is None else trainer
        self._first: BaseException | None = None
        self.rescued: str | None = None
        """After an error, what became of the last whole step, in words."""

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self.trainer.request_stop()

    @property
    def trained_step(self) -> int:
        """Last whole step."""
        return self.trainer.trained

    async def run(self) -> RunEnd:
        """Push the first weights, then generate and train until the end. Errors of any role are raised after all loops
        stopped, the first one first; `self.rescued` says what became of the last step then.
        """
        try:
            return await self._run()
        except BaseExceptionGroup as errors:
            await self._rescue()
            first = self._first
            if first is None or errors.exceptions[0] is first:
                raise
            raise errors.derive([first, *(e for e in errors.exceptions if e is not first)]) from None
        finally:
            self._parts.queue.close()

    async def _run(self) -> RunEnd:
        parts, trainer = self._parts, self.trainer
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(self._train(), name="train loop")
            rollout = tasks.create_task(self._beside(training, parts.rollouter.run), name="rollouter")
            watch = None
            if self._watch is not None:
                watch = tasks.create_task(self._beside(training, self._watch), name="watch")
            end = await training
            await parts.rollouter.stop()
            await rollout
            if watch is not None:
                watch.cancel()
        await trainer.save()
        return end

    async def _train(self) -> RunEnd:
        """The first weights, then the train loop."""
        await self._parts.synchronizer.push(self.trainer.trained)
        return await self.trainer.run()

    async def _beside(self, training: asyncio.Task[RunEnd], role: Callable[[], Awaitable[None]]) -> None:
        """A role beside the trainer, to its end. Its failure is raised when the trainer has finished what needs nobody
        else: the ranks would do that to its end anyway.
        """
        running = asyncio.ensure_future(role())
        try:
            await asyncio.wait({running})
            error = None if running.cancelled() else running.exception()
            if error is not None:
                self._first = self._first or error
                self.trainer.abandon()
                if self.trainer.finishing:
                    logger.error("%s; the step under way is finished, then the run ends", first_cause(error))
                    await asyncio.wait({training}, timeout=self._plan.rescue_timeout_s)
        finally:
            running.cancel()
            await asyncio.wait({running})
        running.result()

    async def _rescue(self) -> None:
        """Save what the trainer has, unless it is what failed; a failure of that hides no other."""
        trainer, limit_s = self.trainer, self._plan.rescue_timeout_s
        try:
            await within(limit_s, trainer.rescue(), f"step {trainer.trained} was not saved")
        except (RuntimeError, OSError, ValueError) as error:
            logger.error("step %d could not be saved: %s", trainer.trained, error)
            self.rescued = f"step {trainer.trained} could not be saved"
            return
        if trainer.saved < trainer.trained:
            self.rescued = f"step {trainer.trained} is not saved: the weights hold a part of the next one"
        else:
            self.rescued = f"step {trainer.saved} is saved" if trainer.saved else "no step was trained"
