"""The invariants of design.md section 4, checked while a simulated run goes on.

`Watch` keeps its own books from what passes the seams (slots given out, groups put and released, batches trained) and
from what the fake engines really did, and compares them with what the real parts claim. A finding is a line that begins
with the number of the invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING

from roll_async.buffer.message_queue import MessageQueue
from roll_async.buffer.states import GroupState, ReleaseReason, Slot
from roll_async.config.staleness import StalenessPolicy, exact_ratio
from roll_async.inference.engine_host import PROGRESS_INTERVAL_S
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.schema import Answered, GenerateRequest, Group, Outcome, Prompt, Sample, SamplingParams
from roll_async.simulator.dispatch_checks import idle_slot_violations, num_displaced
from roll_async.simulator.lineage import Lineage
from roll_async.simulator.parts.engine import SimEngine
from roll_async.simulator.parts.replica import SimReplica
from roll_async.simulator.parts.roles import score_of
from roll_async.simulator.parts.text import Texts, expected_logprobs, sampled_as
from roll_async.simulator.scenario import Scenario

if TYPE_CHECKING:
    from roll_async.simulator.agents.checks import TraceChecks

_MAX_FINDINGS = 20
_ENDED_WITHIN_S = 20.0
"""Longer than the deadlines of an abort: by then a request without a waiting caller is gone from its engine."""


class Where(Enum):
    """State of a group as seen from outside the queue."""

    IN_FLIGHT = "in flight"
    BUFFERED = "buffered"
    TRAINING = "training"
    FINAL = "final"


class Watch:
    """Records of one process of a run."""

    def __init__(self, scenario: Scenario, restored_step: int = 0, *, every_token: bool = True) -> None:
        """`every_token`: look at the tokens of every sample, which is what costs time in a large world."""
        self.scenario, self.restored_step, self.every_token = scenario, restored_step, every_token
        self.findings: list[str] = []
        self.slots: dict[int, Slot] = {}
        self.where: dict[int, Where] = {}
        self.trained: dict[int, list[int]] = {}
        """Step to the prompts it trained."""
        self.decided: list[tuple[int, int, str]] = []
        """(last step trained then, prompt, filtered or failed)."""
        self.outcomes: Counter[ReleaseReason] = Counter()
        self.finished: dict[int, tuple[int, Group]] = {}
        """Group id to prompt and group: accepted by the queue."""
        self.steps_done = restored_step
        self.dropped = 0
        self._busy_at_pause: dict[str, float] = {}
        self._closed = False
        self._carried = (0, 0, 0)
        self._unwanted: dict[str, float] = {}
        """Requests on engines without a waiting caller, and since when."""
        self._serving: frozenset[object] = frozenset()
        self.slots_opened = 0
        """How often the slots of surplus groups were opened again: by pushes, and where nothing else can bring a batch.
        """
        self._due: set[int] = set()
        """Published steps whose validations are not."""
        self._validated: set[int] = set()
        self._measuring = 0
        """Sets of a validation that are being asked."""
        self.stopping = False
        """The run was asked to stop: training does not wait for its validation any more."""
        self._validates = bool(scenario.validation_prompts and scenario.plan.eval_every)
        if self._validates and restored_step and restored_step % scenario.plan.eval_every == 0:
            self._due.add(restored_step)  # its result may be lost with the process before
        self._num_skipped = 0
        """Due validations that will not come, by the last record."""
        self._overdue: list[int] = []
        """Those of them that should have been measured by the last record."""
        self._answers: dict[int, int] = {}
        """Step to the scored samples of its validation that its weights have sampled whole."""
        self.last_learned = restored_step
        """Last step the trainer has learned whole."""
        self._last_begun = restored_step
        """Last step of which it has got a part."""
        self._learned_groups: Counter[int] = Counter()
        self._progress_s = 0.0
        """When the trainer last ended a step."""
        self._seen_since_batch = self._kept_since_batch = 0
        self.budget_is_used = False
        """`max_num_gen_batches` was reached."""
        self._early_stopped = 0
        """Groups that came again because a batch was complete without them."""
        self._orphans: dict[str, int] = {}
        """Attempt after one that died with its engine, to the tokens of the whole request then."""
        self.lineage = Lineage(self.report, scenario.keep)
        self._without_samples: frozenset[int] = frozenset()
        """Prompts whose finished groups may have left the ledger: the run has gone back behind a checkpoint."""
        self._traces: TraceChecks | None = None
        if scenario.worlds is not None:
            from roll_async.simulator.agents.groups import checks_of  # needs the gateway, which other worlds do without

            self._traces = checks_of(scenario)

    def report(self, invariant: int, message: str) -> None:
        """One finding."""
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(f"invariant {invariant}: {message}")

    # Seams of the queue

    def restored(self, queue: MessageQueue) -> None:
        """A restart: groups that earlier processes finished are buffered again, if they are within the bound."""
        live, usable = queue.live_groups(), self._reusable()
        extra, lost = sorted(live.keys() - usable), sorted(usable - live.keys())
        if extra:
            self.report(8, f"groups {extra} are back, which cannot be used at step {self.restored_step + 1}")
        # Of over-sampled groups not all may be in time beside those that are buffered.
        may_leave_some = self.scenario.queue.oversample_groups > 0
        lost = [i for i in lost if self.finished[i][0] not in self._without_samples]
        if lost and not may_leave_some:
            self.report(8, f"groups {lost} were finished, are within the bound, and are lost")
        for group_id, state in live.items():
            if state is not GroupState.BUFFERED:
                self.report(8, f"group {group_id} is {state.value} after a restart")
            self.where[group_id] = Where.BUFFERED
        self.finished = {i: found for i, found in self.finished.items() if i in live}
        before = queue.stats()
        self._carried = (before.admitted, before.filtered, before.failed)

    def _reusable(self) -> set[int]:
        """Groups that earlier processes finished, that are not trained, and that the restored step can still use."""
        done, step, bound = self.fates(), self.restored_step, self.scenario.queue.bound_versions
        usable = set()
        for group_id, (prompt, group) in self.finished.items():
            versions = [v for s in group.samples for v, _ in s.version_runs] or [0]
            if prompt not in done and max(versions) <= step and step - min(versions) <= bound:
                usable.add(group_id)
        return usable

    def admitted(self, slots: Sequence[Slot], queue_now: MessageQueue, replicas: Iterable[SimReplica]) -> None:
        """Slots were given out while the engines really held what they hold."""
        self.follow_drops(queue_now)
        queue = self.scenario.queue
        for slot in slots:
            if slot.group_id in self.where:
                self.report(2, f"group {slot.group_id} is admitted twice")
            self.slots[slot.group_id], self.where[slot.group_id] = slot, Where.IN_FLIGHT
        live = sum(place is not Where.FINAL for place in self.where.values())
        used = live + queue.groups_per_batch * self.steps_done  # trained groups keep their slots, others give them back
        # While none serves, what comes back is given the present weights before it serves.
        versions = [r.engine.version for r in replicas if r.alive and r.engine.version is not None]
        held = min(versions, default=self.steps_done)
        every, size = queue.trigger_parameter_sync_step, queue.groups_per_batch
        # The admission rule of the design, with W = every * size and v / k * W = held * size.
        limit = ceil((1 + exact_ratio(queue.async_generation_ratio)) * every * size + held * size)
        limit += queue.oversample_groups
        if used > limit:
            self.report(1, f"{used} groups admitted while the engines hold {held}, which allows {limit}")

    def put(self, group: Group, *, accepted: bool) -> None:
        """A finished group was taken in or refused."""
        self._judged(kept=True)
        place = self.where.get(group.group_id)
        if not accepted:
            if place is Where.IN_FLIGHT:
                self.where[group.group_id] = Where.FINAL
            return
        if place is not Where.IN_FLIGHT:
            self.report(5, f"a late result of group {group.group_id} ({place}) was accepted")
        self.where[group.group_id] = Where.BUFFERED
        if group.group_id in self.slots:
            self.finished[group.group_id] = (self.slots[group.group_id].prompt_index, group)
        self._check_whole(group)

    def released(self, group_id: int, outcome: ReleaseReason, reason: str = "") -> None:
        """A slot came back without a group."""
        if outcome is ReleaseReason.FILTERED:
            self._judged(kept=False)
        if self.where.get(group_id) is not Where.IN_FLIGHT:
            return
        self.where[group_id] = Where.FINAL
        self.outcomes[outcome] += 1
        if outcome is ReleaseReason.FAILED and Outcome.CANCELLED.value in reason:
            self.report(9, f"group {group_id} counts as failed, because it was aborted: {reason}")
        if outcome is ReleaseReason.REQUEUED and reason in ("aborted", "surplus"):
            self._early_stopped += 1
        if outcome in (ReleaseReason.FILTERED, ReleaseReason.FAILED) and not self._closed:
            self.decided.append((self.steps_done, self.slots[group_id].prompt_index, outcome.value))
        if outcome is ReleaseReason.UNUSED:
            del self.where[group_id], self.slots[group_id]  # the queue undoes the admission, too

    def step_trained(self, step: int) -> None:
        """A step is reported to the queue as done."""
        for group_id, place in list(self.where.items()):
            if place is Where.TRAINING:
                self.where[group_id] = Where.FINAL
        size, trained = self.scenario.queue.groups_per_batch, len(self.trained.get(step, ()))
        # The data may end inside of a step that is taken in parts: what was learned of it is the last step.
        in_parts = self.scenario.plan.groups_per_part < size and self.scenario.num_prompts is not None
        if trained != size and not (in_parts and trained and trained % self.scenario.plan.groups_per_part == 0):
            self.report(3, f"step {step} trained {trained} groups, a batch has {size}")
        if step != self.steps_done + 1:
            self.report(3, f"step {step} was trained after step {self.steps_done}")
        self.steps_done = step
        self._check_admissions()

    def _check_admissions(self) -> None:
        """Invariant 16: what is begun is judged, unless a push or the end of a batch stops it; of the latter no more
        begin again between two pushes than are over-sampled.
        """
        extra, opened = self.scenario.queue.oversample_groups, self.slots_opened
        if self._early_stopped > extra * opened:
            self.report(16, f"{self._early_stopped} groups were stopped early; slots opened {opened} times for {extra}")

    def _judged(self, *, kept: bool) -> None:
        """Our own count of what `max_num_gen_batches` limits."""
        budget = self.scenario.budget
        if budget is None:
            return
        if self.budget_is_used:
            return
        self._seen_since_batch += 1
        self._kept_since_batch += kept
        if self._kept_since_batch >= budget.groups_per_batch:
            self._seen_since_batch = self._kept_since_batch = 0
        elif self._seen_since_batch >= budget.max_num_gen_batches * budget.gen_batch_size:
            self.budget_is_used = True

    # The trainer

    def batch(self, groups: Sequence[Group], step: int) -> None:
        """What a step, or a part of it, is about to train."""
        self._last_begun = step
        if self._overdue:
            self.report(17, f"steps {self._overdue} were to be validated, and were not")
        for group in groups:
            place = self.where.get(group.group_id)
            if place is not Where.BUFFERED:
                self.report(3, f"step {step} trains group {group.group_id}, which is {place}")
            self.where[group.group_id] = Where.TRAINING
            self._check_whole(group)
            self._check_scores(group)
            self._check_ages(group, step)
        rows = [int(g.prompt.row_id) for g in groups]  # its position in the stream
        before = {row for trained in self.trained.values() for row in trained}
        again = sorted(before.intersection(rows))
        if again:
            self.report(3, f"step {step} trains prompts {again} a second time")
        if len(set(rows)) != len(rows):
            self.report(3, f"step {step} trains prompts {rows} in one batch")
        self.trained.setdefault(step, []).extend(rows)

    def _check_whole(self, group: Group) -> None:
        number, there = self.scenario.scheduler.samples_per_group, len(group.trajectories)
        if there != number:
            self.report(3, f"group {group.group_id} has {there} of {number} samples")
        for rows in group.trajectories if self.every_token else ():
            self._check_tokens(group.prompt, rows, self.scenario.scheduler.sampling)

    def _check_tokens(self, prompt: Prompt, rows: Sequence[Sample], sampling: SamplingParams) -> None:
        """They are the ones the engines sampled, each once, under the versions they say."""
        if self._traces is not None:
            for number, message in self._traces.tokens(rows, sampling):
                self.report(number, message)
        for sample in rows if self._traces is None else ():
            self._check_answer(prompt, sample, sampling)

    def _check_answer(self, prompt: Prompt, sample: Sample, sampling: SamplingParams) -> None:
        assert isinstance(self.scenario.texts, Texts)
        name, start = sample.sample_id, len(prompt.token_ids)
        tokens, mask = self.scenario.texts.whole(name, prompt.token_ids, sampling.max_new_tokens, sampling.stop_strings)
        if sample.response_token_ids != tokens:
            self.report(5, f"sample {name} has tokens {list(sample.response_token_ids)}, expected {list(tokens)}")
        elif sample.loss_mask != mask:
            self.report(13, f"sample {name} trains {list(sample.loss_mask)}, the policy sampled {list(mask)}")
        elif sample.behaviour_logprobs != expected_logprobs(name, start, mask, sample.version_runs):
            told = [sampled_as(x) for x, m in zip(sample.behaviour_logprobs, mask, strict=True) if m]
            labels = [v for v, count in sample.version_runs for _ in range(count)]
            # 7: the labels are wrong; 13: something else is.
            number = 7 if [v for v, _, _ in told] != [v for v, m in zip(labels, mask, strict=True) if m] else 13
            self.report(number, f"sample {name} says versions {labels}, engines told (version, answer, place) {told}")

    def _check_scores(self, group: Group) -> None:
        """Every score is that of its sample, and the baseline that of a greedy answer."""
        if self._traces is not None:
            for number, message in self._traces.rewards(group) if self.every_token else ():
                self.report(number, message)
            return
        seed, rewards = self.scenario.seed, self.scenario.rewards
        for sample in group.samples:
            expected = score_of(seed, rewards, group.prompt, sample.sample_id)
            if sample.reward is None or sample.reward.score != expected:
                self.report(13, f"sample {sample.sample_id} has {sample.reward}, its score is {expected}")
        greedy = self.scenario.scheduler.greedy_baseline
        expected_baseline = score_of(seed, rewards, group.prompt, "/greedy") if greedy else None
        if group.baseline_score != expected_baseline:
            self.report(13, f"group {group.group_id} has baseline {group.baseline_score}, expected {expected_baseline}")

    def learned(self, num_groups: int, step: int) -> None:
        """The trainer has ended a step, or a part of it."""
        self._learned_groups[step] += num_groups
        if self._learned_groups[step] == self.scenario.queue.groups_per_batch:
            self.last_learned = step

    def died_after(self, saved: int, *, trainer_failed: bool) -> None:
        """Invariant 9: the rollout process died; the last whole step of a healthy trainer is saved, unless the weights
        have gone past it.
        """
        if not trainer_failed and saved < self.last_learned == self._last_begun:
            self.report(9, f"step {self.last_learned} was learned, and step {saved} is the last that is saved")

    def measuring(self, change: int) -> None:
        """A set of a validation begins to be asked (1), or all its answers came (-1)."""
        self._measuring += change

    def validated(self, step: int, answered: Sequence[Answered], sampling: SamplingParams) -> None:
        """Answers of a validation came. Only replicas that returned or joined meanwhile may have other versions."""
        number = self._answers.get(step, 0)
        for prompt, rows in answered:
            if self.every_token:
                self._check_tokens(prompt, rows, sampling)
            versions = {v for row in rows for v, _ in row.version_runs}
            number += versions == {step} and rows[0].reward is not None  # as the validation counts them
            if versions != {step} and not (self.scenario.max_restarts or self.scenario.scales):
                self.report(17, f"the validation of step {step} measures versions {sorted(versions)}")
        self._answers[step] = number

    def measured(self, metrics: Mapping[str, float | str], published_at: int | None = None) -> None:
        """Invariant 17: a result is that of the weights of its step, and of no others."""
        version = metrics.get("validation/version")
        if version is None:
            return
        step, lag = int(version), metrics["validation/lag"]
        self._due.discard(step)
        self._validated.add(step)
        if step not in self._answers:
            self.report(17, f"a validation says version {step}, which none has measured")
        if published_at is not None and lag != published_at - step:
            self.report(17, f"the validation of step {step} says lag {lag} at step {published_at}")
        told = sum(float(n) for key, n in metrics.items() if key.startswith("validation/") and key.endswith("/samples"))
        if told != self._answers.pop(step, told):
            self.report(17, f"the validation of step {step} counts {told} samples of its weights, which is wrong")

    def validations_over(self) -> None:
        """The run has ended as it should: what was due is measured, and so is the last model."""
        last = {self.steps_done} if self._validates and self.steps_done > self.restored_step else set()
        missing = (self._due | last) - self._validated
        if len(missing) > self._num_skipped or missing & last:
            self.report(17, f"the run ends without the validations of steps {sorted(missing)}")

    def published(self, step: int, metrics: Mapping[str, float], now_s: float) -> None:
        """The metrics of a step."""
        self._progress_s = now_s
        if self._validates and step % self.scenario.plan.eval_every == 0:
            self._due.add(step)
        self.measured(metrics, step)
        mode, held = self.scenario.plan.validation_mode, metrics["weights/version"]
        self._num_skipped = int(metrics.get("validation/skipped", 0))
        self._overdue = []
        if mode != "replicas":  # a fault unless it ends the run
            self._overdue = [due for due in self._due if mode == "pause" or held > due]

    def progressing(self, now_s: float) -> None:
        """Invariant 18: the trainer does not wait longer than what can hold up a batch."""
        if now_s - self._progress_s > self.scenario.step_patience_s:
            self.report(18, f"no step for {now_s - self._progress_s:.0f} s, after step {self.steps_done}")

    def _check_ages(self, group: Group, step: int) -> None:
        queue = self.scenario.queue
        strict = queue.async_generation_ratio == 0 and queue.trigger_parameter_sync_step == 1
        oldest = group.oldest_version
        if oldest is None:
            return
        age = step - 1 - oldest
        if strict and age:
            self.report(4, f"r = 0, k = 1, and step {step} trains tokens {age} versions old")
        bound = queue.bound_versions
        if (
            queue.policy is StalenessPolicy.TOKEN_MASK
        ):  # the trainer masks what is over the bound; something must be left
            age = step - 1 - max(v for s in group.samples for v, _ in s.version_runs)
        if age > bound:
            self.report(1, f"group {group.group_id} is {age} versions old at step {step}, bound {bound}")

    # Every instant

    def instant(self, queue: MessageQueue) -> None:
        """Conservation: the queue's counts add up, and it knows the groups that are known outside."""
        s = queue.stats()
        total = s.trained + s.filtered + s.dropped + s.failed + s.training + s.buffered + s.in_flight
        if s.admitted != total:
            self.report(2, f"{s.admitted} groups admitted, {total} accounted for: {s}")
        seen = self.outcomes
        admitted, filtered, failed = self._carried
        claims = (s.admitted - admitted, s.filtered - filtered, s.failed - failed)
        facts = (len(self.slots), seen[ReleaseReason.FILTERED], seen[ReleaseReason.FAILED])
        if claims != facts:
            self.report(2, f"the queue counts {claims} admitted, filtered, failed; the rollout {facts}")
        live = queue.live_groups()
        inside = {i for i, state in live.items() if state is GroupState.IN_FLIGHT}
        outside = {i for i, place in self.where.items() if place is Where.IN_FLIGHT}
        differ = sorted(inside ^ outside)
        if differ:
            self.report(2, f"groups {differ} are in flight for the queue or for the rollout, not for both")
        self.follow_drops(queue)
        gone = s.dropped_stale
        if self.dropped != gone:
            self.report(2, f"{self.dropped} finished groups are gone, {gone} were over the bound")

    def wanted(self, replica: SimReplica) -> list[str]:
        """What a serving replica has for somebody. What one that was given up still runs was dispatched again."""
        return sorted(set(replica.engine.request_ids) - self._unwanted.keys()) if replica in self._serving else []

    def dispatch(self, managers: Sequence[EnginePool], now_s: float) -> None:
        """Invariants 10 and 11, from the managers' links and what the engines really have."""
        cap = self.scenario.manager.max_concurrent_per_server
        for manager in managers:
            if self.scenario.manager.admission == "kv":
                for link in manager.links:
                    if (running := len(link.in_flight)) > cap:
                        self.report(10, f"{link.name} has {running} requests, and {cap} are allowed")
            for request, replica in idle_slot_violations(manager):
                self.report(10, f"{replica} has a free slot, and {request} waits")
            if self._measuring and not self.stopping and self.scenario.plan.validation_mode == "pause":
                held = {i for link in manager.links for i in link.in_flight if not i.startswith("validation.")}
                # What an engine has ended and not answered is in flight still.
                engines = [link.client.engine for link in manager.links]  # type: ignore[attr-defined]
                if running := [i for engine in engines for i in engine.request_ids if i in held]:
                    self.report(17, f"{running} are generated while a validation has set training aside")
            if displaced := num_displaced(manager):
                self.report(10, f"{displaced} requests wait, and a validation that yields holds slots")
        allowed_s = _ENDED_WITHIN_S + 2 * self.scenario.manager.interrupt_timeout_s
        self._serving = frozenset(link.client for manager in managers for link in manager.links)
        unwanted: dict[str, float] = {}
        for link in (link for manager in managers for link in manager.links):
            for request_id in () if link.client.ignores_calls else link.client.engine.request_ids:  # type: ignore[attr-defined]
                if request_id in link.in_flight:
                    continue
                since_s = unwanted[request_id] = self._unwanted.get(request_id, now_s)
                if now_s - since_s > allowed_s:
                    self.report(11, f"{link.name} has had {request_id} for {now_s - since_s:.0f} s, for nobody")
        self._unwanted = unwanted

    def follow_drops(self, queue: MessageQueue) -> None:
        """Finished groups may leave the queue untrained, but only over the bound, which policy wait never lets be."""
        live = queue.live_groups()
        known = {i for i, place in self.where.items() if place in (Where.BUFFERED, Where.TRAINING)}
        waiting = {i for i, state in live.items() if state in (GroupState.BUFFERED, GroupState.TRAINING)}
        if waiting - known:
            self.report(2, f"groups {sorted(waiting - known)} are buffered and never finished")
        for group_id in known - waiting:
            self.where[group_id] = Where.FINAL
            self.finished.pop(group_id, None)
            self.dropped += 1
            strict = self.scenario.queue.policy is StalenessPolicy.WAIT
            if strict:
                self.report(1, f"group {group_id} was dropped under policy wait")

    # Deaths of engines

    def died(self, engine: SimEngine) -> None:
        """An engine is about to die with all it has sampled."""
        if self.scenario.sync.interrupt_mode == "abort":
            return  # what is lost during a push is discarded, and its name begins anew
        for request, tokens in engine.tokens_so_far():
            name, _, attempt = request.request_id.partition("#")
            self._orphans[f"{name}#{int(attempt) + 1}"] = len(request.prompt_token_ids) + tokens

    def submitted(self, requests: Sequence[GenerateRequest]) -> None:
        """Requests arrive at an engine. If its engine died, a request lacks the tokens of one interval at most."""
        interval_tokens = ceil((PROGRESS_INTERVAL_S + 0.1) / self.scenario.speed.token_s) + 1
        for request in requests if self._orphans else ():
            reached, kept = self._orphans.pop(request.request_id, 0), len(request.prompt_token_ids)
            if kept < reached - interval_tokens:
                self.report(6, f"{request.request_id} goes on from token {kept}, its engine died at token {reached}")

    # Weight pushes

    def paused(self, mode: str, replicas: Iterable[SimReplica], in_flight: int) -> None:
        """`interrupt` has returned."""
        for replica in replicas:
            if not replica.alive:
                continue
            engine = replica.engine
            running = engine.num_running if mode != "keep" else 0  # with keep they stay there and stand still
            if running or not engine.paused:
                self.report(5, f"{engine.name} runs {running} requests after the pause")
            self._busy_at_pause[engine.name] = engine.busy_s
        if in_flight and mode != "keep":
            self.report(5, f"{in_flight} requests are waited for after the pause")

    def resuming(self, replicas: Iterable[SimReplica]) -> None:
        """`release` begins: nothing was sampled since the pause."""
        for replica in replicas:
            engine = replica.engine
            before = self._busy_at_pause.pop(engine.name, None)
            still = before is None or engine.busy_s == before  # exact: while it is paused nothing is added
            if not still:
                self.report(5, f"{engine.name} sampled tokens while it was paused")

    # Across restarts

    def closed(self) -> None:
        """The process is killed: what is decided in it from now on, while its coroutines end, never was."""
        self._closed = True

    def fates(self) -> dict[int, list[str]]:
        """Decisions of this process about prompts, by position."""
        found: dict[int, list[str]] = {}
        for row in (row for step, rows in self.trained.items() if step <= self.steps_done for row in rows):
            found.setdefault(row, []).append("trained")
        for _, row, verdict in self.decided:
            found.setdefault(row, []).append(verdict)
        return found

    def rewind(self, step: int) -> Watch:
        """Records of the next process, restored to `step`: decisions of later steps and verdicts are open again."""
        next_life = Watch(self.scenario, step, every_token=self.every_token)
        until = self.lineage.pruned_until
        gone = {row for s, rows in self.trained.items() if step < s <= until for row in rows}
        next_life.lineage, next_life._without_samples = self.lineage, self._without_samples | gone
        next_life.trained = {s: rows for s, rows in self.trained.items() if s <= step}
        next_life.decided = [d for d in self.decided if d[0] <= step]
        next_life.finished = dict(self.finished)
        next_life.findings = self.findings
        return next_life

    def other_run(self) -> Watch:
        """Records of the first process of another run in the same folder."""
        first = Watch(self.scenario, every_token=self.every_token)
        first.lineage, first.findings = self.lineage, self.findings
        return first
