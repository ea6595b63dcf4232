"""The RLVR loop: generation and training run concurrently, coupled only by the queue and the weight push.

            reserve / put                  take_batch
 Rollouter ----------------> MessageQueue ------------> TrainLoop: learn -> push weights -> validate -> save
     ^                            ^                          |
     |  pause / resume            | weights_held             |
     +----------------------------+------ synchronizer <-----+

Two coroutines under one TaskGroup (and a monitor that only reads); the first failure stops all. When another role than
the trainer failed, the step under way is finished first, and the last whole step is saved before the error is raised.
With `async_generation_ratio` 0 the loop is the same: the next batch is admitted only when the engines hold its weights.
Queue: one producer (Rollouter), one consumer (TrainLoop), bound `max_queue_size`.

One training step:

    take_batch --groups--> learn --+ until the step is whole --> step_trained --> push --> validate --> metrics --> save
        ^                          |
        +---- next part of it <----+   (one part, unless async_training.require_batches is below a whole step)

A validation measures the weights of its step; `validator.py` says when it begins and who waits for it. A stop
ends the run after the step under way: nothing is pushed or measured any more, and the state is saved before what is
left of a validation is waited for.

The canary of a push is answered beside the next step, whose record has its result; that of the last push is waited for.
The metrics of a step are published before it is saved: a run that is killed in between repeats the step, one that is
killed afterwards has published all of it but a validation that went on; the next run measures that again. When another
role fails, a step whose groups have all been taken is finished
and published without a push, so that it can be saved (`abandon`, `rescue`). While the trainer waits for groups,
restarted replicas are given the current weights, because they may be needed to generate the groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import EndOfData, first_cause
from roll_async.buffer.freshness import BatchFreshness
from roll_async.pipelines.agreement import PolicyAgreement
from roll_async.pipelines.metrics import (
    StepClock,
    StepRecord,
    merged_reports,
    step_metrics,
    trace_step,
)
from roll_async.pipelines.protocol import PipelineParts, RunEnd, RunPlan, TrainerState
from roll_async.pipelines.validator import Validator
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.trainer.dataproto import StepGroups
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.protocol import DevicePhase
from roll_async.weight_sync.synchronizer import SyncReport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RLVRPipeline:
    """Runs one training run to its end; `run` is called once.

    `trainer`: the training side, built from the same parts and plan. `watch`: a coroutine function that monitors the
    run until it is cancelled, `states`: a line of text for each component now (both `pipelines/health.py`).
    """

    def __init__(
        self,
        parts: PipelineParts,
        plan: RunPlan,
        *,
        trainer: TrainLoop | None = None,
        watch: Callable[[], Awaitable[None]] | None = None,
        states: Callable[[], list[str]] = list,
    ) -> None:
        self._parts, self._plan, self._watch = parts, plan, watch
        self.trainer = TrainLoop(parts, plan) if trainer is None else trainer
        self.states = states
        self._first: BaseException | None = None
        self.rescued: str | None = None
        """After an error: text that says whether the last whole step is saved."""

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self.trainer.request_stop()

    @property
    def trained_step(self) -> int:
        """Last whole step."""
        return self.trainer.trained

    async def run(self) -> RunEnd:
        """Push the first weights, then generate and train until the end. Errors of any role are raised after all loops
        stopped, the first one first; `self.rescued` then says whether the last step is saved.
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
        try:
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(trainer.run(), name="train loop")
                rollout = tasks.create_task(self._run_beside(training, parts.rollouter.run), name="rollouter")
                watch = None
                if self._watch is not None:
                    watch = tasks.create_task(self._run_beside(training, self._watch), name="watch")
                end = await training
                await parts.rollouter.stop()
                await rollout
                if watch is not None:
                    watch.cancel()
        finally:
            await trainer.close()  # not in its own loop, which is canceled while it ends when another role fails
        await trainer.save()
        return end

    async def _run_beside(self, training: asyncio.Task[RunEnd], role: Callable[[], Awaitable[None]]) -> None:
        """Run a role concurrently with the trainer. Its failure is raised once the trainer has finished work that needs
        no other role, because the ranks would finish it in any case.
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
            if not running.cancelled():
                running.exception()  # marks it as retrieved: the trainer may have failed first, by the same cause
        running.result()

    async def _rescue(self) -> None:
        """Save the last whole step, unless a save has failed before. Errors are logged, not raised, so that they do not
        replace the first one.
        """
        trainer, limit_s = self.trainer, self._plan.rescue_timeout_s
        try:
            await within(limit_s, trainer.rescue(), f"step {trainer.trained} was not saved")
        except (RuntimeError, OSError) as error:  # of a rank, the ledger, the disk, or a deadline
            logger.error("step %d could not be saved: %s", trainer.trained, error)
            self.rescued = f"step {trainer.trained} could not be saved"
            return
        if trainer.saved < trainer.trained:
            self.rescued = f"step {trainer.trained} is not saved: the weights hold a part of the next one"
        else:
            self.rescued = f"step {trainer.saved} is saved" if trainer.saved else "no step was trained"


class TrainLoop:
    """Consumes one batch a step until `max_steps`, the end of the data, or a stop; `run` is called once."""

    def __init__(self, parts: PipelineParts, plan: RunPlan) -> None:
        self._parts, self._plan = parts, plan
        self.agreement = PolicyAgreement(plan.on_policy_band, stops=plan.stops_on_mismatch)
        self._stop = asyncio.Event()
        self._abandoned = self._complete = self._data_ended = False
        self._rollout_before: RollouterStats | None = None
        """Its counters when the last step was published."""
        self.validator = Validator(parts.validate, parts.rollouter, plan, self._until_validated)
        self._clock: StepClock
        """Of the step under way; the first begins when engines have the first weights."""
        self.state = TrainerState.STARTING
        self.trained = plan.first_step - 1
        """Last whole step."""
        self.saved = self.trained
        """Last step with a checkpoint, or the step after which the run began."""
        self._save_begun = self.trained
        """Last step whose save was begun. One that failed is not tried again."""
        self.mid_step = False
        """The weights contain a part of the next step, so that no checkpoint can be made of them."""
        self.num_samples = 0
        """Samples trained by this process."""

    def request_stop(self) -> None:
        """Finish the step under way and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self._stop.set()

    def abandon(self) -> None:
        """Another role failed: as a stop, and nothing that needs the engines is waited for."""
        self._abandoned = True
        self._stop.set()

    @property
    def finishing(self) -> bool:
        """The current work of the trainer needs no other role, and cancelling would waste it."""
        return self.state is TrainerState.SAVING or (self.state is TrainerState.LEARNING and self._complete)

    async def rescue(self) -> None:
        """After an error: a checkpoint of the last whole step is complete when this returns, unless the weights contain
        a part of the next one. Raises the error of the save.
        """
        if self._save_begun < self.trained:
            await self.save()
        elif self.saved < self.trained:
            raise RuntimeError("its save failed before")
        await self._parts.checkpoint.finish()

    async def run(self) -> RunEnd:
        """The first weights, then train until the end. Waits for the queue, unblocked by put, by the end of the data or
        by a stop.
        """
        try:
            await self._start()
            self._clock = StepClock()
            end, step = None, self._plan.first_step
            while end is None and step <= self._plan.max_steps:
                end, step = await self._step(step), step + 1
            if not self._abandoned:
                if self._stop.is_set():
                    await self._save_before_waiting()
                self._tell(await self.validator.result(self.trained, wait=True, stoppable=False))
                await self.agreement.canary()
            return end or RunEnd.FINISHED
        finally:
            self.state = TrainerState.STOPPED

    async def close(self) -> None:
        """Nobody waits any more for a validation or the canary; what they asked for has ended when this returns."""
        await self.validator.drop()
        await self.agreement.close()

    async def _start(self) -> None:
        """The first weights; the validation of the restored step, where its result was lost."""
        step, validator = self.trained, self.validator
        last = self._is_last(step)
        measures = self._plan.measures_restored and validator.due(step, last=last)
        measures = measures and await validator.claim(step)
        await self.push(step)
        if measures:
            await validator.begin(step, last=last)

    async def _save_before_waiting(self) -> None:
        """After a stop: whatever ends the process from now on, the state is saved."""
        await self.save()
        await self._parts.checkpoint.finish()
        if (step := self.validator.running) is not None:
            logger.warning("step %d is saved; the validation of step %d is waited for", self.saved, step)

    async def push(self, version: WeightVersion) -> SyncReport:
        """The trainer's weights to all engines."""
        await self._parts.devices.phase(DevicePhase.TRAIN)  # at the end of the data engines were waited for before it
        report = await self._parts.synchronizer.push(version)
        self.agreement.pushed(self._parts.synchronizer.checked())
        return report

    async def save(self) -> None:
        """Save the last whole step, unless it is saved, or the weights contain a part of the next one. In phase TRAIN;
        engines that generated go on afterwards, because a validation may still wait for them.
        """
        if self.saved < self.trained and not self.mid_step:
            self.state, self._save_begun = TrainerState.SAVING, self.trained
            devices = self._parts.devices
            before = devices.current
            await devices.phase(DevicePhase.TRAIN)
            await self._parts.checkpoint.save(self.trained)
            if before is DevicePhase.GENERATE:
                await devices.phase(DevicePhase.GENERATE)
            self.saved = self.trained

    async def _step(self, step: int) -> RunEnd | None:
        """One training step. Returns why the run ends, or None to go on."""
        try:
            record = await self._take_and_learn(step)
        except EndOfData as end:  # between two steps
            self._parts.observer.event("end_of_data", leftover=str(end))
            await self._last_model()
            return RunEnd.END_OF_DATA
        if record is None:
            return RunEnd.INTERRUPTED
        self.trained, self.mid_step = step, False  # the weights contain it, whether recording it succeeds or not
        self.num_samples += record.report.num_samples
        try:
            await self._record(record)
            await self._agree(record)
            measures = await self._push_step(record)
            await self._validate(record, measures=measures)
        finally:  # also when the queue is closed or the push fails: the step is whole, and may be saved
            self._publish(record)
            self._clock = StepClock()  # a save is `time/save_s` of the next step, whose record is still to be written
        if self._data_ended or self._stop.is_set():  # no step follows, and `run` saves
            return RunEnd.END_OF_DATA if self._data_ended else RunEnd.INTERRUPTED
        if self._plan.save_every and step % self._plan.save_every == 0 and step < self._plan.max_steps:
            with self._clock.measure("save"):  # never before the record: a saved step is not repeated
                await self.save()
        return None

    async def _take_and_learn(self, step: int) -> StepRecord | None:
        """Learn from all groups of a step, part by part as they become ready. None when a stop came before the first
        part; from then on the weights contain a part of the step, and only the end of the step makes them whole.
        """
        parts, plan, clock = self._parts, self._plan, self._clock
        groups: list[Group] = []
        reports: list[StepReport] = []
        while len(groups) < plan.groups_per_batch:
            self.state = TrainerState.WAITING
            with clock.measure("wait_batch"):
                await parts.devices.phase(DevicePhase.GENERATE)  # engines also generate between two parts
                taking = parts.queue.take_batch(step, plan.groups_per_part)
                try:
                    part = await self._resync_during(taking, stoppable=not groups)
                except EndOfData as end:
                    if not groups:
                        raise
                    # The weights contain these parts: the step ends with them, or it could not be saved.
                    parts.observer.event("short_step", step=step, groups=len(groups), leftover=str(end))
                    self._data_ended = True
                    break
            if part is None:
                return None
            groups += part
            self._complete = len(groups) == plan.groups_per_batch
            self.state, self.mid_step = TrainerState.LEARNING, True
            with clock.measure("learn"):
                replaced = plan.replaces_weights_after(step)
                phase_s = await parts.devices.phase(DevicePhase.TRAIN, drop_engine_weights=replaced)
                reports.append(replace(await parts.learner.learn(part, step), turn_s=phase_s))
        ages = BatchFreshness.without_queue(groups, step=step, now_s=asyncio.get_running_loop().time())
        return StepRecord(step=step, groups=groups, report=merged_reports(reports), ages=ages, clock=clock)

    async def _record(self, record: StepRecord) -> None:
        """The queue counts the groups as trained; in the ledger that and the step are one transaction."""
        with record.clock.measure("record"):
            record.ages = await self._parts.queue.freshness(record.step)  # first: then the queue forgets the groups
            await self._parts.queue.step_trained(record.step)

    async def _agree(self, record: StepRecord) -> None:
        """What the canary of the push before found, answered beside this step; and the step's own tokens of the present
        weights. Raises EngineMismatch.
        """
        if not self._abandoned:
            with record.clock.measure("weight_sync"):
                record.agreement |= await self.agreement.canary()
        record.agreement |= self.agreement.check(record.step, record.report.metrics)  # into the record, then raised
        self.agreement.stop_on_mismatch(record.step, record.report.metrics)

    async def _push_step(self, record: StepRecord) -> bool:
        """The weights of the step to the engines that are due. Returns whether its validation may begin: it is due, and
        its engines hold these weights.
        """
        step, validator, clock = record.step, self.validator, record.clock
        last = self._is_last(step)
        measures = validator.due(step, last=last)
        if self._stop.is_set() or not (self._push_due(step) or measures):
            return measures
        with clock.measure("validation"):
            # One that runs measures the weights that this push replaces. Then the next one's replicas are claimed, so
            # that this push reaches them, too.
            record.validations.append(await validator.result(step, wait=not validator.apart or last))
            measures = measures and await validator.claim(step)
        with clock.measure("weight_sync"):
            record.sync = await self._push(step, measures=measures)
            if last and record.sync is not None:  # no later step would publish it
                record.agreement |= await self.agreement.canary()
        return measures

    async def _validate(self, record: StepRecord, *, measures: bool) -> None:
        """Begin a validation that is due, unless a stop came; collect the result of one that has ended."""
        if self._abandoned:
            return
        with record.clock.measure("validation"):
            record.validations.append(await self.validator.result(record.step, wait=False))
            if measures and not self._stop.is_set():
                await self._parts.devices.phase(DevicePhase.GENERATE)
                await self.validator.begin(record.step, last=self._is_last(record.step))
                record.validations.append(await self.validator.result(record.step, wait=False))

    def _publish(self, record: StepRecord) -> None:
        """Metrics, trace and dump of the step. One record holds one validation, the newest; earlier ones are events."""
        observer = self._parts.observer
        *earlier, validation = [result for result in record.validations if result] or [{}]
        metrics = self._metrics(record)
        for result in earlier:
            self._tell(result)
        observer.step(record.step, {**metrics, **record.agreement, **validation})
        trace_step(observer, record)
        if self._parts.dump is not None:
            self._parts.dump(record.step, record.groups, record.report.advantages)

    async def _last_model(self) -> None:
        """The data ended between two steps: push the last weights to the engines and validate them."""
        parts, step, self._data_ended = self._parts, self.trained, True
        if self._stop.is_set() or step < self._plan.first_step:
            return
        await self.agreement.canary()  # before a validation sets its engines aside
        validator = self.validator
        measures = validator.begun_until < step and validator.due(step, last=True)
        if parts.synchronizer.status().version != step or (measures and validator.apart):
            self._tell(await validator.result(step, wait=True))
            measures = measures and await validator.claim(step)
            await self._push(step, measures=measures)
        if measures and not self._stop.is_set():
            await parts.devices.phase(DevicePhase.GENERATE)
            await validator.begin(step, last=True)
            self._tell(await validator.result(step, wait=False))

    async def _push(self, step: int, *, measures: bool) -> SyncReport | None:
        """The weights of a step to all engines, if they are due there, else to those of the validation alone. Nothing
        after a stop: a validation may still measure what the engines hold.
        """
        if self._stop.is_set():
            return None
        synchronizer, self.state = self._parts.synchronizer, TrainerState.SYNCHRONIZING
        if self._push_due(step) and synchronizer.status().version != step:
            return await self.push(step)
        if measures and self.validator.apart:
            await synchronizer.resync_returned(step)
        return None

    def _push_due(self, step: int) -> bool:
        """Every k steps, before a validation by the same engines (which measures the weights of its step), and after
        the last step.
        """
        validator, last = self.validator, self._is_last(step)
        measures = validator.due(step, last=last) and not validator.apart
        return step % self._plan.sync_every == 0 or measures or last

    def _is_last(self, step: int) -> bool:
        """No step comes after this one."""
        return step == self._plan.max_steps or self._data_ended

    async def _until_validated(self, result: Awaitable[object], stoppable: bool) -> object:
        self.state = TrainerState.VALIDATING
        return await self._resync_during(result, stoppable=stoppable)

    async def _resync_during(self, work: Awaitable[T], *, stoppable: bool) -> T | None:
        """The result of `work`, None when a stop came first. Meanwhile restarted replicas are given the current
        weights, because `work` may need them to end.
        """
        synchronizer = self._parts.synchronizer
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            while not task.done():
                back = asyncio.ensure_future(synchronizer.wait_for_returned())
                waits = {task, back, stop} if stoppable else {task, back}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                came_back = back.done()
                back.cancel()
                if task.done():
                    break
                if stoppable and stop.done():
                    return None
                if came_back:
                    await synchronizer.resync_returned(self.trained)
            return await task
        finally:
            for pending in (task, stop):
                pending.cancel()

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        """All metrics of this step, the user's own included."""
        parts, plan, before = self._parts, self._plan, self._rollout_before
        rollout = self._rollout_before = parts.rollouter.stats()
        devices = plan.devices_per_engine
        metrics = step_metrics(record, parts.queue.stats(), rollout, before, devices_per_engine=devices)
        if self.validator.apart and plan.eval_every:
            metrics["validation/skipped"] = float(self.validator.num_skipped)
        custom = self._compute_custom_metrics(StepGroups(record.groups)) or {}
        return {**metrics, **self._mode_metrics(record), **custom}

    def _mode_metrics(self, record: StepRecord) -> Mapping[str, float]:
        """Metrics of the mode of the run; none here."""
        return {}

    def _compute_custom_metrics(self, batch: StepGroups) -> Mapping[str, float] | None:
        """Hook: more metrics of a step, by key, from the groups that it trained; `batch.to_dataproto()` has them in the
        form of verl. They are published like all others.
        """
        return None

    def _tell(self, validation: Mapping[str, float]) -> None:
        """Publish a result that belongs to no record of a step."""
        if validation:
            self._parts.observer.event("validation", **validation)
