"""The loop of a run without engines: step after step on given rows.

    learn | validate | publish | save

Publish before save, as in `rlvr.py`: a run that is killed in between repeats the step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from roll_async.pipelines.metrics import StepClock
from roll_async.pipelines.protocol import Checkpointer, RunEnd, RunObserver
from roll_async.trainer.protocol import StepReport


class GivenLearner(Protocol):
    """`trainer/supervised.py`, or a fake."""

    async def learn(self, step: int) -> StepReport | None:
        """One step; None at the end of the data."""
        ...

    async def validate(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedPlan:
    """Steps and intervals."""

    first_step: int
    max_steps: int
    save_every: int
    """0 = only at the end."""
    eval_every: int
    """0 = never."""


class SupervisedPipeline:
    """One run; `run` is called once. A stop ends it after the step under way, its state saved."""

    def __init__(
        self,
        learner: GivenLearner,
        checkpoint: Checkpointer,
        observer: RunObserver,
        export: Callable[[str], Awaitable[None]],
        plan: SupervisedPlan,
    ) -> None:
        """`export`: writes the trained model into a folder."""
        self._learner, self._checkpoint, self._observer, self._export = learner, checkpoint, observer, export
        self._plan, self._stopped, self._saved = plan, False, plan.first_step - 1
        self.doing = "starting"
        """What the trainer does now, in a word."""
        self.trained_step = plan.first_step - 1
        """Last whole step."""
        self.rescued: str | None = None
        """After an error: text that says which step is saved."""

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self._stopped = True

    def states(self) -> list[str]:
        """What the loop does now."""
        return [f"trainer: {self.doing}; step {self.trained_step} of {self._plan.max_steps} is trained"]

    async def export_hf(self, folder: str) -> None:
        """Write the trained model as a folder that transformers loads."""
        await self._export(folder)

    async def run(self) -> RunEnd:
        """Train until max_steps, the end of the data, or a stop; then save.

        consumes: rows (learner.learn)   waits for: the ranks   unblocked by: their answers, or that they are lost
        """
        try:
            end = await self._steps()
            await self._save()
            await self._checkpoint.finish()
        except Exception:  # of any part: the user is told what is saved, and the error goes on
            self.rescued = f"step {self._saved} is saved" if self._saved else "no step was saved"
            raise
        return end

    async def _steps(self) -> RunEnd:
        plan, clock = self._plan, StepClock()
        for step in range(plan.first_step, plan.max_steps + 1):
            if self._stopped:
                return RunEnd.INTERRUPTED
            self.doing = "learning"
            with clock.measure("learn"):
                report = await self._learner.learn(step)
            if report is None:
                return RunEnd.END_OF_DATA
            self.trained_step, last = step, step == plan.max_steps
            validation: dict[str, float] = {}
            if plan.eval_every and (last or step % plan.eval_every == 0) and not self._stopped:
                self.doing = "validating"
                with clock.measure("validation"):
                    found = await self._learner.validate()
                validation = {**found, "validation/version": float(step), "validation/lag": 0.0}
            self._publish(step, report, clock, validation)
            clock = StepClock()  # a save is `time/save_s` of the next step, whose record is still to be written
            if plan.save_every and step % plan.save_every == 0 and not last:
                with clock.measure("save"):
                    await self._save()
        return RunEnd.INTERRUPTED if self._stopped and self.trained_step < plan.max_steps else RunEnd.FINISHED

    def _publish(self, step: int, report: StepReport, clock: StepClock, validation: Mapping[str, float]) -> None:
        step_s = max(clock.total_s, 1e-9)
        times = {f"time/{name}_s": clock.spent.get(name, 0.0) for name in ("validation", "save")}
        self._observer.step(
            step,
            {
                **report.metrics,
                **times,
                "time/step_s": step_s,
                "time/train_s": report.train_s,
                "time/collation_s": report.collation_s,
                "throughput/samples_per_s": report.num_samples / step_s,
                "throughput/tokens_per_s": report.num_tokens / step_s,
                **validation,
            },
        )
        for name, start_s, end_s in clock.spans:
            self._observer.span("trainer", name, start_s, end_s, step=float(step))

    async def _save(self) -> None:
        """Save the last whole step, unless it is saved."""
        if self._saved < self.trained_step:
            self.doing = "saving"
            await self._checkpoint.save(self.trained_step)
            self._saved = self.trained_step
