"""The RLVR loop: generation and training run concurrently, coupled only by the queue and the weight push.

            reserve / put                  take_batch
 Rollouter ----------------> MessageQueue ------------> TrainLoop
     ^                            ^                          |
     |  pause / resume            | weights_held             |
     +----------------------------+------ synchronizer <-----+

Queue: one producer (Rollouter), one consumer (TrainLoop), bound `max_queue_size`. With `async_generation_ratio` 0 the
loop is the same: the next batch is admitted only when the engines hold its weights. One step, in this order:

    take, learn (part by part) | record | agree | push | validate | publish || save
         no checkpoint ------->|<-- whole: it may be saved, and is never repeated  || not where no step follows

Publish before save: a run that is killed in between repeats the step; one that is killed later has published all of it
but a validation that went on, which the next run measures again. The canary of a push is answered beside the next step,
whose record has its result; that of the last push is waited for.
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
from roll_async.observe.outside import border
from roll_async.observe.trace import DRIVER, starting
from roll_async.pipelines.agreement import PolicyAgreement
from roll_async.pipelines.metrics import (
    StepClock,
    StepRecord,
    custom_numbers,
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
from roll_async.weight_sync.protocol import DevicePhase, SyncReport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RLVRPipeline:
    """One training run: its loops under one TaskGroup, so that the first failure stops all. `run` is called once.

    train loop  consumes: batches (queue.take_batch)       waits for: groups, a push, a validation
                unblocked by: put, end_of_data, request_stop
    rollouter   consumes: admission slots (queue.reserve)  waits for: admission, engines, rewards
                unblocked by: weights_held, release, stop
    watch       consumes: nothing, it reads counters       waits for: its interval
                unblocked by: being cancelled at the end
    """

    def __init__(
        self,
        parts: PipelineParts,
        plan: RunPlan,
        trainer: TrainLoop,
        *,
        watch: Callable[[], Awaitable[None]] | None = None,
        states: Callable[[], list[str]] = list,
    ) -> None:
        """`trainer`: the training side, built from the same parts and plan. `watch`: monitors the run, `states`: a line
        of text for each component now (both `pipelines/health.py`).
        """
        self._queue, self._rollouter, self._watch = parts.queue, parts.rollouter, watch
        self._devices, self._export = parts.devices, parts.export
        self._rescue_timeout_s = plan.rescue_timeout_s
        self.trainer, self.states = trainer, states
        self._first: BaseException | None = None
        """The error of the role that failed first."""
        self.rescued: str | None = None
        """After an error: text that says whether the last whole step is saved."""

    def request_stop(self) -> None:
        """Finish the step under way, save, and end with RunEnd.INTERRUPTED. Safe to call more than once."""
        self.trainer.request_stop()

    @property
    def trained_step(self) -> int:
        """Last whole step."""
        return self.trainer.trained

    @property
    def doing(self) -> str:
        """What the trainer does now, in a word."""
        return self.trainer.state.value

    async def export_hf(self, folder: str) -> None:
        """Write the trained model as a folder that transformers loads."""
        assert self._export is not None, "a pipeline without ranks"
        await self._devices.phase(DevicePhase.TRAIN)
        await self._export(folder)

    async def run(self) -> RunEnd:
        """Push the first weights, then generate and train until the end.

        Shutdown (healthy): the train loop returns > rollouter.stop > the rollouter returns > watch is cancelled > the
        last whole step is saved > the queue is closed.
        Shutdown (crash): rollouter or watch raises > abandon > a step that has all of its groups is finished, and
        published without a push > rescue: the last whole step is saved > its error is raised, first of all. The train
        loop raises > the others are cancelled > rescue > raised. `rescued` then says what is saved.
        """
        try:
            return await self._run()
        except BaseExceptionGroup as errors:
            await self._rescue()  # the TaskGroup has ended all roles: nobody else asks the ranks
            first = self._first
            if first is None or errors.exceptions[0] is first:
                raise
            # `first_cause` takes the first of them.
            raise errors.derive([first, *(e for e in errors.exceptions if e is not first)]) from None
        finally:
            self._queue.close()

    async def _run(self) -> RunEnd:
        trainer = self.trainer
        try:
            async with asyncio.TaskGroup() as tasks:
                training = tasks.create_task(trainer.run(), name="train loop")
                rollout = tasks.create_task(self._run_beside(training, self._rollouter.run), name="rollouter")
                watch = None
                if self._watch is not None:
                    watch = tasks.create_task(self._run_beside(training, self._watch), name="watch")
                end = await training
                await self._rollouter.stop()  # it generates until it is told
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
                self.trainer.abandon()  # first: the trainer must not wait for the role that is gone
                if self.trainer.finishing:
                    logger.error("%s; the step under way is finished, then the run ends", first_cause(error))
                    await asyncio.wait({training}, timeout=self._rescue_timeout_s)
        finally:
            running.cancel()  # `wait` does not cancel it when it is cancelled itself
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # marks it as retrieved: the trainer may have failed first, by the same cause
        running.result()  # raises the error of the role, now that the trainer has finished

    async def _rescue(self) -> None:
        """Save the last whole step, unless a save has failed before. Errors are logged, not raised, so that they do not
        replace the first one.
        """
        trainer = self.trainer
        try:
            await within(self._rescue_timeout_s, trainer.rescue(), f"step {trainer.trained} was not saved")
        except (RuntimeError, OSError) as error:  # of a rank, the ledger, the disk, or a deadline
            logger.error("step %d could not be saved: %s", trainer.trained, error)
            self.rescued = f"step {trainer.trained} could not be saved"
            return
        if trainer.saved < trainer.trained:
            self.rescued = f"step {trainer.trained} is not saved: the weights hold a part of the next one"
        else:
            self.rescued = f"step {trainer.saved} is saved" if trainer.saved else "no step was trained"


class TrainLoop:
    """Trains one batch a step until `max_steps`, the end of the data, or a stop; `run` is called once.

    A stop ends the run after the step under way: nothing is pushed or measured any more, and the state is saved before
    what is left of a validation is waited for. While it waits, restarted replicas are given the present weights,
    because what it waits for may need them (`_until`).
    """

    def __init__(self, parts: PipelineParts, plan: RunPlan) -> None:
        self._queue, self._rollouter, self._learner = parts.queue, parts.rollouter, parts.learner
        self._synchronizer, self._devices, self._checkpoint = parts.synchronizer, parts.devices, parts.checkpoint
        self._observer, self._dump, self._plan = parts.observer, parts.dump, plan
        self.validator = Validator(parts.validate, parts.rollouter, plan, self._until_validated)
        self.agreement = PolicyAgreement(plan.on_policy_band, stops=plan.stops_on_mismatch)
        self._stop = asyncio.Event()
        self._abandoned = False
        """Another role has failed: what needs the engines is not waited for."""
        self._complete = False
        """All groups of the step under way have been taken."""
        self._data_ended = False
        self._clock: StepClock
        """Of the step under way; the first begins when engines have the first weights."""
        self._rollout_before: RollouterStats | None = None
        """The rollouter's counters when the last step was published."""
        self._traced_s = 0.0
        """Until when the trace has the requests of engines."""
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

    async def run(self) -> RunEnd:
        """The first weights, then step after step.

        consumes: steps   waits for: the first push; after the last step a validation and the canary
        unblocked by: the engines, which answer or are lost
        """
        try:
            await self._start()
            self._clock = StepClock()
            end, step = None, self._plan.first_step
            while end is None and step <= self._plan.max_steps:
                end, step = await self._step(step), step + 1
            if not self._abandoned:
                if self._stop.is_set():  # saved before anything is waited for: Ctrl-C again loses nothing
                    await self.save()
                    await self._checkpoint.finish()
                    if (left := self.validator.running) is not None:
                        logger.warning("step %d is saved; the validation of step %d is waited for", self.saved, left)
                self._publish_late(await self.validator.result(self.trained, wait=True, stoppable=False))
                await self.agreement.canary()  # of the last push
            return end or RunEnd.FINISHED
        finally:
            self.state = TrainerState.STOPPED

    async def close(self) -> None:
        """Nobody waits any more for a validation or the canary; what they asked for has ended when this returns."""
        await self.validator.drop()
        await self.agreement.close()

    async def _start(self) -> None:
        """The first weights; the validation of the restored step, where its result was lost."""
        step, last = self.trained, self._is_last(self.trained)
        measures = self._plan.measures_restored and self.validator.due(step, last=last)
        measures = measures and await self.validator.claim(step)
        with starting(DRIVER, "first_push"):
            await self._push_to_all(step)
        if measures:
            await self.validator.begin(step, last=last)

    async def _step(self, step: int) -> RunEnd | None:
        """One step; why the run ends, or None to go on.

        consumes: G groups (queue.take_batch)   waits for: groups, the canary, a push, a validation
        unblocked by: put, end_of_data, request_stop
        """
        try:
            record = await self._take_and_learn(step)
        except EndOfData as end:  # between two steps
            self._observer.event("end_of_data", leftover=str(end))
            await self._last_model()
            return RunEnd.END_OF_DATA
        if record is None:
            return RunEnd.INTERRUPTED
        self.trained, self.mid_step = step, False  # the weights contain it, whether recording it succeeds or not
        self.num_samples += record.report.num_samples
        try:
            await self._record(record)
            await self._agree(record)
            measures = await self._push(record)
            await self._validate(record, measures=measures)
        finally:  # also when the queue is closed or the push fails: the step is whole, and `rescue` saves it
            self._publish(record)
            self._clock = StepClock()  # a save is `time/save_s` of the next step, whose record is still to be written
        if self._data_ended or self._stop.is_set():  # no step follows, and the end of the run saves
            return RunEnd.END_OF_DATA if self._data_ended else RunEnd.INTERRUPTED
        # The last step is saved by the end of the run.
        if self._plan.save_every and step % self._plan.save_every == 0 and step < self._plan.max_steps:
            with self._clock.measure("save"):  # never before the record: a saved step is not repeated
                await self.save()
        return None

    async def _take_and_learn(self, step: int) -> StepRecord | None:
        """Learn from all groups of a step, part by part as they become ready (async_training.require_batches). None
        when a stop came before the first part; from then on only the end of the step makes the weights whole.
        """
        plan, clock = self._plan, self._clock
        groups: list[Group] = []
        reports: list[StepReport] = []
        while len(groups) < plan.groups_per_batch:
            self.state = TrainerState.WAITING
            with clock.measure("wait_batch"):
                await self._devices.phase(DevicePhase.GENERATE)  # engines also generate between two parts
                try:
                    taking = self._queue.take_batch(step, plan.groups_per_part)
                    part = await self._until(taking, stoppable=not groups)
                except EndOfData as end:
                    if not groups:
                        raise
                    # The weights contain these parts: the step ends with them, or it could not be saved.
                    self._observer.event("short_step", step=step, groups=len(groups), leftover=str(end))
                    self._data_ended = True
                    break
            if part is None:
                return None
            groups += part
            self._complete = len(groups) == plan.groups_per_batch
            self.state, self.mid_step = TrainerState.LEARNING, True  # before: a failure in between leaves mixed weights
            with clock.measure("learn"):
                replaced = plan.replaces_weights_after(step)  # such weights need not be kept while engines sleep
                phase_s = await self._devices.phase(DevicePhase.TRAIN, drop_engine_weights=replaced)
                report = await self._learner.learn(part, step)
                reports.append(replace(report, turn_s=phase_s))  # a change of phase is no work of the ranks
        ages = BatchFreshness.without_queue(groups, step=step, now_s=asyncio.get_running_loop().time())
        return StepRecord(step=step, groups=groups, report=merged_reports(reports), ages=ages, clock=clock)

    async def _record(self, record: StepRecord) -> None:
        """The queue counts the groups as trained; in the ledger that and the step are one transaction."""
        with record.clock.measure("record"):
            record.ages = await self._queue.freshness(record.step)  # first: then the queue forgets the groups
            await self._queue.step_trained(record.step)

    async def _agree(self, record: StepRecord) -> None:
        """What the canary of the push before found, answered beside this step; and the step's own tokens of the present
        weights. Raises EngineMismatch.
        """
        step, metrics = record.step, record.report.metrics
        if not self._abandoned:
            with record.clock.measure("weight_sync"):
                record.agreement |= await self.agreement.canary()  # first: it tells the suspects of a mismatch apart
        record.agreement |= self.agreement.check(step, metrics)  # into the record before it may raise
        self.agreement.stop_on_mismatch(step, metrics)

    async def _push(self, record: StepRecord) -> bool:
        """The weights of the step to the engines that are due. Returns whether its validation may begin: it is due, and
        its engines hold these weights.
        """
        step, last = record.step, self._is_last(record.step)
        measures = self.validator.due(step, last=last)
        if self._stop.is_set() or not (self._push_due(step) or measures):
            return measures
        with record.clock.measure("validation"):
            # One that runs measures the weights that this push replaces; with replicas of its own they stay.
            record.validations.append(await self.validator.result(step, wait=not self.validator.apart or last))
            measures = measures and await self.validator.claim(step)  # before the push, which reaches what is claimed
        with record.clock.measure("weight_sync"):
            record.sync = await self._push_to_due(step, measures=measures)
            if last and record.sync is not None:  # no later record would have it
                record.agreement |= await self.agreement.canary()
        return measures

    async def _validate(self, record: StepRecord, *, measures: bool) -> None:
        """Begin a validation that is due, unless a stop came; collect the result of one that has ended."""
        if self._abandoned:
            return
        with record.clock.measure("validation"):
            record.validations.append(await self.validator.result(record.step, wait=False))
            if measures and not self._stop.is_set():
                await self._devices.phase(DevicePhase.GENERATE)
                await self.validator.begin(record.step, last=self._is_last(record.step))
                record.validations.append(await self.validator.result(record.step, wait=False))

    def _publish(self, record: StepRecord) -> None:
        """Metrics, trace and dump of the step. One record holds one validation, the newest; earlier ones are events."""
        *earlier, validation = [result for result in record.validations if result] or [{}]
        metrics = self._metrics(record)
        for result in earlier:
            self._publish_late(result)
        self._observer.step(record.step, {**metrics, **record.agreement, **validation})
        seen = self._rollout_before
        assert seen is not None, "the metrics of the step are made of it"
        requests = [span for span in seen.spans if span[2] > self._traced_s]
        self._traced_s = max([self._traced_s, *(ended_s for *_, ended_s in requests)])
        trace_step(self._observer, record, requests, seen.busy_s_by_server)
        if self._dump is not None:
            report = record.report
            self._dump(record.step, record.groups, report.advantages, report.trainer_logprobs, report.entropies)

    def _publish_late(self, validation: Mapping[str, float]) -> None:
        """A result that belongs to no record of a step."""
        if validation:
            self._observer.event("validation", **validation)

    async def save(self) -> None:
        """Save the last whole step, unless it is saved, or the weights contain a part of the next one. In phase TRAIN;
        engines that generated go on afterwards, because a validation may still wait for them.
        """
        if self.saved < self.trained and not self.mid_step:
            self.state, self._save_begun = TrainerState.SAVING, self.trained
            before = self._devices.current
            await self._devices.phase(DevicePhase.TRAIN)
            await self._checkpoint.save(self.trained)
            if before is DevicePhase.GENERATE:
                await self._devices.phase(DevicePhase.GENERATE)
            self.saved = self.trained

    async def rescue(self) -> None:
        """After an error: a checkpoint of the last whole step is complete when this returns, unless the weights contain
        a part of the next one. Raises the error of the save.
        """
        if self._save_begun < self.trained:
            await self.save()
        elif self.saved < self.trained:
            raise RuntimeError("its save failed before")
        await self._checkpoint.finish()

    async def _last_model(self) -> None:
        """The data ended between two steps: push the last weights to the engines and validate them."""
        step, self._data_ended = self.trained, True
        if self._stop.is_set() or step < self._plan.first_step:  # none was trained: engines hold these weights
            return
        await self.agreement.canary()  # before a validation sets its engines aside
        # The validation of this step may have begun with the step itself.
        measures = self.validator.begun_until < step and self.validator.due(step, last=True)
        if self._synchronizer.status().version != step or (measures and self.validator.apart):
            self._publish_late(await self.validator.result(step, wait=True))
            measures = measures and await self.validator.claim(step)
            await self._push_to_due(step, measures=measures)
        if measures and not self._stop.is_set():
            await self._devices.phase(DevicePhase.GENERATE)
            await self.validator.begin(step, last=True)
            self._publish_late(await self.validator.result(step, wait=False))

    async def _push_to_due(self, step: int, *, measures: bool) -> SyncReport | None:
        """The weights of a step to all engines, if they are due there, else to those of the validation alone. Nothing
        after a stop: a validation may still measure what the engines hold.
        """
        if self._stop.is_set():
            return None
        self.state = TrainerState.SYNCHRONIZING
        if self._push_due(step) and self._synchronizer.status().version != step:
            return await self._push_to_all(step)
        if measures and self.validator.apart:
            await self._synchronizer.resync_returned(step)
        return None

    async def _push_to_all(self, version: WeightVersion) -> SyncReport:
        await self._devices.phase(DevicePhase.TRAIN)  # at the end of the data engines were waited for before it
        report = await self._synchronizer.push(version)
        self.agreement.pushed(self._synchronizer.checked())
        return report

    def _push_due(self, step: int) -> bool:
        """Every k steps, before a validation by the same engines (which measures the weights of its step), and after
        the last step.
        """
        last = self._is_last(step)
        measures = self.validator.due(step, last=last) and not self.validator.apart
        return step % self._plan.sync_every == 0 or measures or last

    def _is_last(self, step: int) -> bool:
        """No step comes after this one."""
        return step == self._plan.max_steps or self._data_ended

    async def _until_validated(self, result: Awaitable[object], stoppable: bool) -> object:
        self.state = TrainerState.VALIDATING
        return await self._until(result, stoppable=stoppable)

    async def _until(self, work: Awaitable[T], *, stoppable: bool) -> T | None:
        """The result of `work`, None when a stop came first. Meanwhile restarted replicas are given the current
        weights: otherwise a run with one engine would wait for ever for groups that only this one can generate.
        """
        synchronizer = self._synchronizer
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
                pending.cancel()  # what goes on after a stop would take groups that nobody trains

    def _metrics(self, record: StepRecord) -> dict[str, float]:
        """All metrics of this step, the user's own included."""
        rollout, before = self._rollouter.stats(), self._rollout_before
        self._rollout_before, devices = rollout, self._plan.devices_per_engine
        metrics = step_metrics(record, self._queue.stats(), rollout, before, devices_per_engine=devices)
        if self.validator.apart and self._plan.eval_every:
            metrics["validation/skipped"] = float(self.validator.num_skipped)
        with border():
            custom = custom_numbers(self.compute_custom_metrics(StepGroups(record.groups)))
        return {**metrics, **self._mode_metrics(record), **custom}  # the user's keys last: they win

    def _mode_metrics(self, record: StepRecord) -> Mapping[str, float]:
        """Metrics of the mode of the run; none here."""
        return {}

    def compute_custom_metrics(self, batch: StepGroups) -> Mapping[str, float] | None:
        """Hook: more metrics of a step, by key, from the groups that it trained; `batch.to_dataproto()` has them in the
        form of verl. They are published like all others.
        """
        return self._compute_custom_metrics(batch)

    def _compute_custom_metrics(self, batch: StepGroups) -> Mapping[str, float] | None:
        """The hook under the name that it has in other documents."""
        return None
