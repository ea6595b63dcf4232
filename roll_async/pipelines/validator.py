"""When the validations of a run begin, and what waits for their results (`validation.mode`).

    mode      training meanwhile  the next push        due while one runs  engines
    pause     is set aside        -                    -                   those of training, before its requests
    share     goes on             waits for the rest   -                   those of training, behind its requests
    replicas  goes on             does not wait        skipped, counted    its own, claimed before the push of the step

The last model's result is waited for in every mode. A stop ends every wait, so that the state is saved first; what runs
then is waited for after the save. A result lost with its process is measured again by the resumed run. The measurement,
and the claim of its own engines, run where these are: here, or in the rollout process (`pipelines/validation.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from roll_async.pipelines.protocol import Generator, RunPlan
from roll_async.rollout.protocol import ValidationMeasure

logger = logging.getLogger(__name__)

Until = Callable[[Awaitable[object], bool], Awaitable[object]]
"""Waits until a result is there; with True, or until the run is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunningValidation:
    """A validation that has begun, and whose result is not published."""

    step: int
    metrics: asyncio.Future[Mapping[str, float]]


class Validator:
    """One validation at a time; used by `pipelines/rlvr.py: TrainLoop` alone. The order of a step:

    if validator.due(step, last=last):
        validation = await validator.result(step, wait=...)    # what runs measures the weights that the push replaces
        begins = await validator.claim(step)                   # its own engines join the push
    await synchronizer.push(step)
    if begins:
        await validator.begin(step, last=last)
    """

    def __init__(
        self, measure: ValidationMeasure | None, rollouter: Generator, plan: RunPlan, wait_until: Until
    ) -> None:
        """`measure`: None = the run has no validation."""
        self._measure, self._rollouter, self._wait_until = measure, rollouter, wait_until
        self._every = 0 if measure is None else plan.eval_every
        self._mode = plan.validation_mode
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

    async def claim(self, step: int) -> bool:
        """Before the push of a due step: whether its validation can begin. With mode replicas its engines get the
        weights of that push; it is skipped while another one runs.
        """
        if not self.apart:
            return True
        why = "none of its replicas is alive"
        if self._running is not None:
            behind = f"that of step {self._running.step} still runs"
            why = f"{behind}; give validation more num_replicas or fewer prompts, or raise eval_steps"
        elif self._measure is not None and await self._measure.prepare(step):
            return True
        logger.warning("the validation of step %d is skipped: %s", step, why)
        self.num_skipped += 1
        return False

    async def begin(self, step: int, *, last: bool) -> None:
        """Begin the validation of a due step. Where training waits for it, `result` has it afterwards."""
        if self._mode != "pause" and not last:
            self._begin(step)
            return
        async with self._training_paused():
            self._begin(step)
            await self._wait(stoppable=True)

    def _begin(self, step: int) -> None:
        assert self._measure is not None and self._running is None
        self.begun_until = step
        self._running = _RunningValidation(step=step, metrics=asyncio.ensure_future(self._measure(step)))

    async def result(self, trained: int, *, wait: bool, stoppable: bool = True) -> Mapping[str, float]:
        """The result of the validation that has begun; nothing without one. What is left of it goes before training;
        without `wait`, it is left alone. `trained`: the last whole step.
        """
        if self._running is None or not (wait or self._running.metrics.done()):
            return {}
        if self._running.metrics.done():
            return await self._result(trained, stoppable=False)  # training need not be paused for what is there
        async with self._training_paused():
            return await self._result(trained, stoppable=stoppable)

    async def _wait(self, *, stoppable: bool) -> _RunningValidation:
        assert self._running is not None
        # Shielded: a stop cancels the wait, and what is measured by then is waited for once the state is saved.
        await self._wait_until(asyncio.shield(self._running.metrics), stoppable)
        return self._running

    async def _result(self, trained: int, *, stoppable: bool) -> Mapping[str, float]:
        begun = await self._wait(stoppable=stoppable)
        if not begun.metrics.done():
            return {}
        measured, self._running = await begun.metrics, None
        if not measured:  # its replicas are lost
            self.num_skipped += 1
            return {}
        return {**measured, "validation/lag": float(trained - begun.step)}

    @asynccontextmanager
    async def _training_paused(self) -> AsyncIterator[None]:
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
