"""When the validations of a run begin, and what waits for their results (`validation.mode`).

    pause      training is set aside until the result is there
    share      training goes on; the next push, which would change the weights, waits for what is left
    replicas   engines of its own keep the weights of the step; what is due while another runs is skipped and counted

The last model's result is waited for in every mode. A stop ends every wait, so that the state is saved first; what runs
then is waited for after the save. A result lost with its process is measured again by the resumed run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from roll_async.pipelines.protocol import PipelineParts, RunPlan

logger = logging.getLogger(__name__)


class Waits(Protocol):
    """Waits until a result is there; `stoppable`: or until the run is stopped."""

    async def __call__(self, result: Awaitable[object], *, stoppable: bool) -> object: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunningValidation:
    """A validation that has begun, and whose result is not published."""

    step: int
    metrics: asyncio.Future[Mapping[str, float]]


class ValidationSchedule:
    """One validation at a time. Used by `pipelines/rlvr.py: TrainLoop` alone."""

    def __init__(self, parts: PipelineParts, plan: RunPlan, wait_for: Waits, trained: Callable[[], int]) -> None:
        """`trained`: the last whole step."""
        self._validate, self._rollouter = parts.validate, parts.rollouter
        self._every = plan.eval_every if parts.validate is not None else 0
        self._mode, self._wait_for, self._trained = plan.validation_mode, wait_for, trained
        self._running: _RunningValidation | None = None
        self.begun_until = 0
        """Last step of which a validation has begun."""
        self.num_skipped = 0
        """Due validations without a result, with mode replicas."""

    @property
    def apart(self) -> bool:
        """Whether it has engines of its own."""
        return self._mode == "replicas"

    @property
    def running(self) -> int | None:
        """The step whose result is not published yet."""
        return None if self._running is None else self._running.step

    def due(self, step: int, *, last: bool) -> bool:
        """Every `eval_every` steps, and after the last step."""
        return bool(self._every) and (last or step % self._every == 0)

    async def can_begin(self, step: int) -> bool:
        """Whether a due validation can begin. With mode replicas it is skipped while another one runs."""
        if not self.apart:
            return True
        why = "none of its replicas is alive"
        if self._running is not None:
            behind = f"that of step {self._running.step} still runs"
            why = f"{behind}; give validation more num_replicas or fewer prompts, or raise eval_steps"
        elif self._validate is not None and await self._validate.prepare(step):
            return True
        logger.warning("the validation of step %d is skipped: %s", step, why)
        self.num_skipped += 1
        return False

    async def begin(self, step: int, *, last: bool) -> None:
        """Begin the validation of a due step. Where training waits for it, `result` has it afterwards."""
        if self._mode != "pause" and not last:
            self._begin(step)
            return
        async with self._training_set_aside():
            self._begin(step)
            await self._wait(stoppable=True)

    def _begin(self, step: int) -> None:
        assert self._validate is not None and self._running is None
        self.begun_until = step
        self._running = _RunningValidation(step=step, metrics=asyncio.ensure_future(self._validate(step)))

    async def result(self, *, wait: bool, stoppable: bool = True) -> Mapping[str, float]:
        """The result of the validation that has begun; nothing without one. What is left of it goes before training;
        without `wait`, it is left alone.
        """
        if self._running is None or not (wait or self._running.metrics.done()):
            return {}
        if self._running.metrics.done():
            return await self._result(stoppable=False)
        async with self._training_set_aside():
            return await self._result(stoppable=stoppable)

    async def _wait(self, *, stoppable: bool) -> _RunningValidation:
        """A stop ends the wait, not the validation."""
        assert self._running is not None
        await self._wait_for(asyncio.shield(self._running.metrics), stoppable=stoppable)
        return self._running

    async def _result(self, *, stoppable: bool) -> Mapping[str, float]:
        begun = await self._wait(stoppable=stoppable)
        if not begun.metrics.done():
            return {}
        measured, self._running = await begun.metrics, None
        if not measured:  # its replicas are lost
            self.num_skipped += 1
            return {}
        return {**measured, "validation/lag": float(self._trained() - begun.step)}

    @asynccontextmanager
    async def _training_set_aside(self) -> AsyncIterator[None]:
        """Generation for training is paused meanwhile, where it has the same engines."""
        if self.apart:
            yield
            return
        await self._rollouter.pause()
        try:
            yield
        finally:
            await self._rollouter.resume()

    async def drop(self) -> None:
        """The run has ended: nobody waits for the validation any more."""
        if self._running is not None:
            metrics = self._running.metrics
            metrics.cancel()
            await asyncio.wait({metrics})
            if not metrics.cancelled():
                metrics.exception()  # marks it as retrieved
