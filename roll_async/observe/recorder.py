"""All outputs of a run (metrics, trackers, screen, log, trace) behind one object."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from roll_async.observe.disk import Unwritable
from roll_async.observe.machine import Gpus, peak_bytes_of_self
from roll_async.observe.outside import OutsideError, border
from roll_async.observe.progress import Screen, best_and_worst, facts, readable
from roll_async.observe.reading.advisories import FLAT_STEPS, flat_reward
from roll_async.observe.run_folder import RunFolder
from roll_async.observe.sample_dump import Row
from roll_async.observe.trace import StartTimeline, Trace
from roll_async.observe.trackers import Tracker

logger = logging.getLogger(__name__)

REQUIRED_KEYS = (
    "reward/mean", "reward/accuracy", "response/length_mean", "response/length_max", "staleness/mean", "staleness/max",
    "staleness/in_flight_share", "staleness/queue_share", "staleness/masked_fraction", "length_bias", "groups/admitted",
    "groups/trained", "groups/filtered", "groups/dropped", "groups/failed", "groups/buffered", "groups/in_flight",
    "weights/version", "trainer/loss", "trainer/grad_norm", "trainer/learning_rate", "correction/kl", "correction/ess",
    "correction/rho_max", "time/step_s", "time/wait_batch_s", "time/train_s", "time/logprobs_s", "time/weight_sync_s",
    "time/pause_s", "throughput/samples_per_s", "throughput/tokens_per_s", "idle/trainer", "idle/engines",
)  # fmt: skip
_COUNTERS = ("groups/buffered", "groups/in_flight", "staleness/mean", "staleness/max")
"""Drawn over time in the trace."""

KEYS_WITHOUT_ENGINES = (
    "trainer/loss", "trainer/grad_norm", "trainer/learning_rate", "data/epoch", "time/step_s", "time/train_s",
    "throughput/samples_per_s", "throughput/tokens_per_s",
)  # fmt: skip
"""Of sft and dpo runs."""


class Recorder:
    """`pipelines/protocol.py: RunObserver`: metrics.jsonl, trackers, the screen, the log.

    A tracker is a service of others: what it raises while a run goes on is one warning, and it gets no more of this
    branch of the run. metrics.jsonl has everything.
    """

    def __init__(
        self,
        folder: RunFolder,
        trackers: list[Tracker],
        screen: Screen,
        *,
        logging_steps: int,
        samples_every: int = 0,
        trace: Trace | None = None,
        gpus: Gpus | None = None,
        create: Mapping[str, Callable[[], Tracker]] | None = None,
        alarms: Mapping[str, float] | None = None,
        start: StartTimeline | None = None,
        required: Sequence[str] = REQUIRED_KEYS,
    ) -> None:
        """`trackers`: those that last as long as the process. `create`: by name, makes a tracker of the branch that the
        folder names; raises ValueError if it cannot. `gpus`: of the machine of the driver. `alarms`: the largest value
        of a metric that is no alarm, by key. `samples_every`: steps between two panels of samples, 0 = none. `start`:
        of the roles; its metrics are those of the first step after it. `required`: keys that every step has.
        """
        self.start = StartTimeline() if start is None else start
        self._alarms, self._raised, self._missed = dict(alarms or {}), set[str](), set[str]()
        self._folder, self.screen, self._create = folder, screen, dict(create or {})
        self._lasting, self._of_branch, self._failed = list(trackers), list[Tracker](), list[Tracker]()
        self._trace, self._gpus, self._required = trace, gpus, required
        self._logging_steps, self._samples_every = logging_steps, samples_every
        self._picked: deque[tuple[int, Sequence[Row]]] = deque()
        """Samples that trackers have not been told yet: by step, the best and the worst answer to a prompt."""
        self._has_samples = False
        self._flat = _FlatReward()
        self._started = time.monotonic()
        self._begun = False
        self.on_step: Callable[[int, Mapping[str, float]], object] | None = None
        """The user's own; called at last, with all that metrics.jsonl has of the step."""
        self.restarts = 0
        """Number of restarts of all roles (fault.max_run_restarts)."""
        with ExitStack() as undo:
            undo.callback(self.close)  # one that cannot be made leaves no other open
            for create_one in self._create.values():
                self._of_branch.append(create_one())
            undo.pop_all()  # all are made: nothing is to be undone

    def begin(self, state: Callable[[], str] = str) -> None:
        """Start the clock of `time_s` when all roles have started. Restarts do not reset it. `state`: what the trainer
        does now, in a word.
        """
        self.screen.begin(state)
        if not self._begun:
            self._begun, self._started = True, time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One training step. Asserts that every key that docs_roll/metrics.md promises is present."""
        missing = [key for key in self._required if key not in metrics]
        assert not missing, f"metrics of step {step} lack {missing}"
        full = {"step": step, "time_s": time.monotonic() - self._started, "run/restarts": self.restarts, **metrics}
        full |= self._start_metrics()
        full["memory/driver_peak_bytes"] = float(peak_bytes_of_self())
        if self._gpus is not None:
            full |= self._gpus.metrics()
        self._folder.append_metrics(full)
        if self._trace is not None:
            counted = {key: full[key] for key in _COUNTERS if key in full}  # a run without engines has none of them
            self._trace.counters(time.monotonic(), counted)  # the clock of event loops
            self._trace.flush()
        logged = self._logged(full)
        self._tell_samples()
        if logged:
            for tracker in [*self._of_branch, *self._lasting]:
                self._tell(tracker, step, partial(tracker.log, step, logged))
        self.screen.show(full)
        self._alarm(step, full)
        self._flat.look(full)
        if self.on_step is not None:
            self.on_step(step, full)

    def _start_metrics(self) -> dict[str, float]:
        """Of a start that no step has told of; its phases become spans."""
        phases = self.start.take()
        for role, phase, began_s, ended_s in phases:
            self.span("start", f"{role} {phase}", began_s, ended_s)
        return self.start.metrics(phases)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Rows that a step trained, with their texts. Called by the thread that decodes them: the screen shows them at
        once, trackers are told by the next call of the run's own thread.
        """
        self._flat.rows = rows
        if self._samples_every and (step % self._samples_every == 0 or not self._has_samples):
            self._has_samples = True
            picked = best_and_worst(rows)
            self.screen.samples(step, picked)
            if picked:
                self._picked.append((step, picked))

    def _tell_samples(self) -> None:
        while self._picked:
            step, picked = self._picked.popleft()
            for tracker in [*self._of_branch, *self._lasting]:
                self._tell(tracker, step, partial(tracker.samples, step, picked))

    def _tell(self, tracker: Tracker, step: int, told: Callable[[], None]) -> bool:
        """Whether the tracker took it. One that raises is told nothing more."""
        try:
            with border(Unwritable):
                told()
        except OutsideError as error:
            logger.warning(
                "tracker %s failed at step %d and is left out; metrics.jsonl has all steps: %s",
                tracker.name,
                step,
                error,
            )
            for those in (self._of_branch, self._lasting):
                if tracker in those:
                    those.remove(tracker)
            self._failed.append(tracker)
            return False
        return True

    def _close(self, tracker: Tracker, *, quiet: bool = False) -> None:
        try:
            with border(Unwritable):
                tracker.close()
        except OutsideError as error:
            if not quiet:
                logger.warning("tracker %s failed to finish; metrics.jsonl has all steps: %s", tracker.name, error)

    def _alarm(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of a metric when it comes to lie above its limit, not again at every step that it stays there."""
        for key, limit in self._alarms.items():
            value = metrics.get(key)
            if value is None and key not in self._missed:
                self._missed.add(key)
                logger.warning("tracking.alarms: step %d has no metric %s; docs_roll/metrics.md lists all", step, key)
            elif value is not None and value > limit and key not in self._raised:
                self._raised.add(key)
                logger.warning("alarm: %s is %g at step %d, above %g (tracking.alarms)", key, value, step, limit)
            elif value is not None and value <= limit:
                self._raised.discard(key)

    def new_branch(self) -> None:
        """The run goes back to an earlier step: trackers begin anew, with the steps that the folder keeps. One that
        failed before gets another chance.
        """
        self._close_branch()
        for name, create_one in self._create.items():
            try:
                self._of_branch.append(create_one())
            except ValueError as error:
                logger.warning("tracker %s is left out; metrics.jsonl has all steps: %s", name, error)
        self.repeat()

    def repeat(self) -> None:
        """Tell the new trackers of the steps that the folder keeps."""
        for tracker in [t for t in self._of_branch if t.keeps_history]:
            records = ((int(record["step"]), self._logged(record)) for record in self._folder.read_metrics())
            # Until one fails.
            all(self._tell(tracker, step, partial(tracker.log, step, logged)) for step, logged in records if logged)

    def _logged(self, record: Mapping[str, float]) -> Mapping[str, float]:
        return record if record["step"] % self._logging_steps == 0 else _validation_of(record)

    def event(self, name: str, **fields: float | str) -> None:
        """A line in the log; of a validation that is in no record of a step also one on the screen."""
        logger.info("%s %s", name, " ".join(f"{key}={value}" for key, value in fields.items()))
        if name == "validation":
            self.screen.validation({key: value for key, value in fields.items() if not isinstance(value, str)})

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: float | str) -> None:
        """Add a span to the trace."""
        if self._trace is not None:
            self._trace.span(track, name, start_s, end_s, **args)

    def close(self) -> None:
        """Flush all sinks."""
        self.screen.end()
        if self._gpus is not None:
            self._gpus.close()
        with ExitStack() as stack:  # whatever the others raise
            stack.callback(self._close_branch)
            for tracker in self._lasting:
                stack.callback(self._close, tracker)
            self._tell_samples()
            if self._trace is not None:
                self._trace.write()

    def _close_branch(self) -> None:
        """Close the trackers of this branch; of one that failed the user knows already."""
        with ExitStack() as stack:
            for tracker in self._failed:
                stack.callback(self._close, tracker, quiet=True)
            for tracker in self._of_branch:
                stack.callback(self._close, tracker)
        self._failed, self._of_branch = [], []


def _validation_of(record: Mapping[str, float]) -> dict[str, float]:
    """The result of a validation in a record, if there is one: no other record will have it."""
    if "validation/lag" not in record:  # validation/skipped alone, which every record may have, is no result
        return {}
    return {key: value for key, value in record.items() if key.startswith("validation/")}


class _FlatReward:
    """Explains once, with three answers, that no answer of the first steps scored otherwise than the others."""

    def __init__(self) -> None:
        self.rows: Sequence[Row] = ()
        """Of the newest step whose texts are known; set by the thread that decodes them."""
        self._first: list[Mapping[str, float]] = []

    def look(self, metrics: Mapping[str, float]) -> None:
        """At the record of a step. A run that goes on after a step of an earlier process is past its start."""
        if len(self._first) == FLAT_STEPS or "reward/min" not in metrics:
            return
        self._first.append(metrics)
        if metrics["step"] == len(self._first) == FLAT_STEPS and (score := flat_reward(self._first)) is not None:
            self._warn(score, metrics)

    def _warn(self, score: float, metrics: Mapping[str, float]) -> None:
        num = metrics["throughput/samples_per_s"] * metrics["time/step_s"]
        cut = metrics["response/truncated"]
        # Of different prompts, where there are any.
        shown = list({row["group_id"]: row for row in self.rows if row["score"] is not None}.values())[:3]
        lines = [f"the reward is flat: all {num:.0f} answers of each of the first {FLAT_STEPS} steps scored {score:g}"]
        for row in shown:
            expected = f"; expected {readable(row['ground_truth'], longest=60)}" if row["ground_truth"] else ""
            lines.append(f'"{readable(row["response"], longest=200)}" ({facts(row)}{expected})')
        lines.append(
            "usual causes: the reward looks for another form of answer than the model writes (format, extraction); "
            f"answers are cut before they end (here {cut:.0%}: response_length); prompts are all too hard or too easy"
        )
        logger.warning("\n  ".join(lines))
