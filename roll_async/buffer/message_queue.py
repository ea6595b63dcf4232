"""Finished groups between rollout and trainer: admission, the staleness bound, exactly-once accounting.

One instance per run, on one event loop; no call holds a lock across a wait. The arithmetic is in `staleness.py`, the
counts are in `book.py`, the durable log is in `ledger.py`. Synchronous and asynchronous runs differ by the admission
limit only.

What each call waits for: `reserve` for the trainer, a weight push or a release; `take_batch` for groups in flight;
`put` for the disk, and while the kept groups already fill the admission rule (over-sampling). `take_batch` logs what it
waits for every `batch_timeout_s` and raises StallError after `stall_timeout_s` without any change; the owners of the
step and of the push have deadlines of their own.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from roll_async.buffer.batch_choice import BatchChoice
from roll_async.buffer.book import Entry, GroupAccounting
from roll_async.buffer.errors import EndOfData, QueueClosed, StallError, TooManyFailures
from roll_async.buffer.fingerprint import Fingerprint, PromptAt, require_own_ledger, same_or_regenerate
from roll_async.buffer.freshness import BatchFreshness, LengthAudit, group_bytes, newest_version
from roll_async.buffer.ledger import Ledger
from roll_async.buffer.states import GroupState, QueueOptions, QueueStats, ReleaseReason, Slot
from roll_async.config.staleness import StalenessPolicy, due_step, staleness
from roll_async.schema import Group, WeightVersion

logger = logging.getLogger(__name__)

POOL = "pool"
"""Key of `choices` in the saved position."""
_NAMED_IN_REPORTS = 8
_ROUNDING_S = 1e-3
"""Tolerance in comparing times of the loop, which are sums of floats."""


class MessageQueue:
    """One producer (the rollouter), one consumer (the train loop), bounded by the admission rule."""

    def __init__(self, options: QueueOptions, ledger: Ledger) -> None:
        self._options, self._ledger = options, ledger
        self._book = GroupAccounting()
        self._choice = BatchChoice(options, self._book)
        self._next_id = self._next_index = 0
        self._requeued: list[tuple[int, int]] = []  # heap of (prompt index, attempt)
        self._closed_slots: list[tuple[int, int]] = []
        """(prompt index, attempt) of aborted surplus groups: slot and prompt are available again after the next push,
        because under the same weights they would become surplus again.
        """
        self._done: frozenset[int] = frozenset()
        self._held: WeightVersion | None = None
        self._limit = self._last_taken = 0
        self._no_more_prompts = self._closed = self._stopped_reserving = False
        self._late = self._dropped_stale = self._dropped_surplus = 0
        self._audit = LengthAudit()
        self._failures: list[str] = []
        self._fingerprint: Fingerprint = {}
        self._changed = asyncio.Event()
        self._progress_s = self._waits_since_s = self._reported_s = 0.0
        self._filtered_before = self._dropped_aged = self._dropped_aged_before = 0
        self.choices: Callable[[Collection[int]], Mapping[str, object]] | None = None
        """Returns the state of a prompt pool, to be saved with the position (`rollout/protocol.py: PromptPool`)."""
        self.taken: Callable[[Sequence[Group]], None] = lambda groups: None
        """Told the groups of every batch, or part of one, when it is taken."""
        self.stall_diagnosis: Callable[[], str] | None = None
        """Describes what keeps groups from finishing, for reports; empty = no cause is known."""

    @property
    def admission_limit(self) -> int:
        """ceil((p + 1 + r) * W) groups in total, p = weight pushes the engines hold; 0 before the first push."""
        return self._limit

    @property
    def groups_per_batch(self) -> int:
        """G: groups one training step consumes."""
        return self._options.groups_per_batch

    # Producer

    async def reserve(self, max_groups: int) -> list[Slot]:
        """Up to `max_groups` slots; waits for at least one. Empty when no group will be admitted any more."""
        while True:
            if self._closed or self._stopped_reserving:
                return []
            if not self._no_more_prompts or self._requeued:
                count = min(max_groups, self._free_slots())
                if self._no_more_prompts:
                    count = min(count, len(self._requeued))
                if count > 0:
                    return [self._admit() for _ in range(count)]
            elif not self._more_may_be_admitted():
                return []
            await self._changed.wait()

    def _more_may_be_admitted(self) -> bool:
        """After the end of the data: a group in flight may be released, or a buffered one dropped over the bound."""
        counts, options = self._book.counts, self._options
        drops = options.policy is not StalenessPolicy.WAIT or options.max_age_s is not None
        waits = counts[GroupState.IN_FLIGHT] or self._closed_slots
        return bool(waits or (drops and counts[GroupState.BUFFERED]))

    def _free_slots(self) -> int:
        """Minimum over the admission rule, max_queue_size and soft_versions; 0 before the first weight push."""
        options, counts = self._options, self._book.counts
        waiting = counts[GroupState.IN_FLIGHT] + counts[GroupState.BUFFERED]
        if self._book.finished >= self.admission_limit:
            return 0  # also for over-sampling: no finished group could be kept
        free = self.admission_limit + options.oversample_groups - self._book.occupying - len(self._closed_slots)
        free = min(free, options.queue_limit + options.oversample_groups - waiting)
        if waiting >= options.groups_per_batch and self._choice.num_stale(self._last_taken + 1):
            return 0  # a batch is complete without new groups, so the trainer does not wait for any of them
        return max(0, free)

    def _admit(self) -> Slot:
        assert self._held is not None
        if self._requeued:
            index, attempt = heapq.heappop(self._requeued)
        else:
            while self._next_index in self._done:  # after a restore: trained, filtered or failed before
                self._next_index += 1
            index, attempt, self._next_index = self._next_index, 0, self._next_index + 1
        slot = Slot(group_id=self._next_id, prompt_index=index, admitted_version=self._held, attempt=attempt)
        self._next_id += 1
        self._book.admit(slot, self._now())
        return slot

    async def put(self, group: Group) -> bool:
        """Buffer a finished, kept group, which is durable on return. False: refused, it was released or is surplus."""
        while True:
            entry = self._book.in_flight_entry(group.group_id)
            if entry is None:
                self._late += 1
                return False
            if entry.surplus or self._choice.is_too_many(entry, self._last_taken):
                self._audit.dropped(group)
                self._dropped_surplus += 1
                if not entry.surplus:
                    self._book.mark_surplus(entry)  # else its prompt would begin again under the same weights
                await self.release(group.group_id, ReleaseReason.REQUEUED, "surplus", group=group)
                return False
            if self._closed:
                logger.error("group %d finished after the queue was closed: it is not kept", group.group_id)
                return False
            if self._stopped_reserving or self._book.finished < self.admission_limit:
                break  # at the end of a run no slot would be freed any more, and the ledger keeps finished groups
            await self._changed.wait()
        expected = self._options.samples_per_group if group.prompt.answer_ids is None else 1
        assert expected is None or len(group.trajectories) == expected, f"group {group.group_id} is not whole"
        oldest = group.oldest_version
        assert oldest is None or oldest >= entry.slot.admitted_version, f"group {group.group_id} is older than its slot"
        version = self._held or 0
        # Before the book: if the ledger raises, the group is not buffered.
        self._ledger.finished(group, entry.slot.prompt_index, version)
        self._audit.generated(group)
        entry.group, entry.finished_version = group, version
        # Before it is durable: the step that trains it makes all earlier commits durable, too.
        self._book.move(entry, GroupState.BUFFERED)
        self._notify()
        await self._ledger.durable()
        return True

    async def release(
        self, group_id: int, outcome: ReleaseReason, reason: str = "", *, group: Group | None = None
    ) -> None:
        """Give a slot back without a kept group. `group`: samples that were generated, for the length audit.

        Raises TooManyFailures when more than `max_failed_groups` were quarantined.
        """
        entry = self._book.in_flight_entry(group_id)
        if entry is None:
            self._late += 1
            return
        if group is not None:
            self._audit.generated(group)
        index = entry.slot.prompt_index
        match outcome:
            case ReleaseReason.UNUSED:
                self._book.forget(entry)
                self._next_index = min(self._next_index, index)  # otherwise a checkpoint counts it as trained
            case ReleaseReason.REQUEUED:
                self._book.move(entry, GroupState.DROPPED)
                self._requeue_prompt(entry)
            case ReleaseReason.FILTERED:
                self._ledger.closed(index, group_id, "filtered", reason)
                self._book.move(entry, GroupState.FILTERED)
            case ReleaseReason.FAILED:
                self._ledger.closed(index, group_id, "failed", reason)
                self._book.move(entry, GroupState.FAILED)
                self._failures.append(f"prompt {index}: {reason}")
        self._notify()
        if outcome in (ReleaseReason.FILTERED, ReleaseReason.FAILED):
            await self._ledger.durable()
        failed, allowed = len(self._failures), self._options.max_failed_groups
        if outcome is ReleaseReason.FAILED and failed > allowed:
            last = "; ".join(self._failures[-3:])
            raise TooManyFailures(f"{failed} groups failed, more than fault.max_failed_groups={allowed}; last: {last}")

    def _requeue_prompt(self, entry: Entry) -> None:
        """Requeue the prompt of an aborted group at once, that of a surplus group with the next push."""
        again = (entry.slot.prompt_index, entry.slot.attempt + 1)
        if entry.surplus and len(self._closed_slots) < self._options.oversample_groups:
            self._closed_slots.append(again)
        else:
            heapq.heappush(self._requeued, again)

    def _open_slots(self) -> None:
        """Free the closed slots; their prompts are admitted first."""
        for again in self._closed_slots:
            heapq.heappush(self._requeued, again)
        self._closed_slots.clear()

    async def early_stop(self, asked: Collection[int] = ()) -> list[int]:
        """Wait until a group in flight that is not in `asked` has become surplus (the batch is complete without it) and
        return the ids of all that are; the caller aborts and releases them. Empty when the queue closes. Only
        over-sampling makes surplus groups.
        """
        while not self._closed:
            surplus = [e.slot.group_id for e in self._book.in_state(GroupState.IN_FLIGHT) if e.surplus]
            if not set(surplus).issubset(asked):
                return surplus
            await self._changed.wait()
        return []

    def resize(self, max_queue_size: int) -> None:
        """Another bound of the groups in flight and buffered, from now on: of those that are more than it, none is
        evicted, and no slot is given out until they are fewer. Raises ValueError for less than a batch.
        """
        self._options = replace(self._options, max_queue_size=max_queue_size)
        self._notify()

    def end_of_data(self) -> None:
        """The prompt stream is exhausted; requeued prompts are still admitted."""
        self._no_more_prompts = True
        self._notify()

    def stop_reserving(self) -> None:
        """No more slots are given out: the run is ending."""
        self._stopped_reserving = True
        self._notify()

    # Consumer

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        """Exactly G groups for training step `step` (1, 2, ...; after a restore the next one), oldest admission first.
        `num_groups`: only that many of them, the rest of the step follows by calls with the same `step`.

        Raises EndOfData when no full batch can be completed any more, QueueClosed after `close`, StallError after
        stall_timeout_s without a change.
        """
        taken = self._book.counts[GroupState.TRAINING]
        if step != self._last_taken + (0 if taken else 1):  # a step that is taken in parts is asked for again
            raise RuntimeError(f"take_batch({step}) after step {self._last_taken}: steps take their batches in order")
        wanted = self._options.groups_per_batch - taken if num_groups is None else num_groups
        assert 0 < wanted <= self._options.groups_per_batch - taken, f"step {step} cannot take {wanted} more groups"
        self._progress_s = self._waits_since_s = self._reported_s = self._now()
        self._filtered_before = self._book.counts[GroupState.FILTERED]
        self._dropped_aged_before = self._dropped_aged
        while True:
            if self._closed:
                raise QueueClosed("the queue was closed", leftovers=len(self._book.buffered_ids))
            chosen = self._choose(step, wanted)
            if chosen is not None:
                now = self._now()  # one time for all: the groups of a part are told by it
                for entry in chosen:
                    entry.asked_s, entry.taken_s = self._waits_since_s, now
                    self._book.move(entry, GroupState.TRAINING)
                self._last_taken = step
                self._notify()
                self.taken(groups := [entry.group for entry in chosen if entry.group is not None])
                return groups
            if self._closed_slots and not self._book.counts[GroupState.IN_FLIGHT]:
                self._open_slots()  # otherwise neither the batch nor the push after it could happen
                self._notify()
            if self._exhausted():
                left = len(self._book.buffered_ids)
                message = f"the data ended with {left} finished groups, fewer than the {wanted} of a batch"
                raise EndOfData(message, leftovers=left)
            await self._change_or_stall(step)

    def _choose(self, step: int, num_groups: int) -> list[Entry] | None:
        """The batch of this step, or the next part of it; None while it has to wait."""
        self._drop_stale(step)
        begun = bool(self._book.counts[GroupState.TRAINING])
        if self._no_more_prompts and not begun and len(self._book.buffered_ids) < self._options.groups_per_batch:
            return None  # take no part of a batch that cannot be completed
        full = self._book.finished >= self.admission_limit
        surplus = self._choice.surplus(step, num_groups, nothing_more_fits=full)
        for entry in surplus:
            self._book.mark_surplus(entry)
        if surplus:
            self._notify()
        return self._choice.batch(step, num_groups)

    def _drop_stale(self, step: int) -> None:
        """Discard buffered groups over the bound, or too old by time, and requeue their prompts. Under policy wait
        versions discard nothing; that old age does breaks no deadline, because it only removes groups.
        """
        options, now = self._options, self._now()
        by_version = options.policy is not StalenessPolicy.WAIT
        if not by_version and options.max_age_s is None:
            return
        for entry in [self._book.entries[i] for i in self._book.buffered_ids]:  # a copy: `move` changes the ids
            group = entry.group
            assert group is not None
            aged = options.max_age_s is not None and now - group.admitted_s > options.max_age_s
            if not aged and not (by_version and self._choice.is_over_bound(group, step)):
                continue
            self._dropped_aged += aged
            self._audit.dropped(group)
            self._dropped_stale += 1
            self._ledger.reopened(entry.slot.prompt_index)
            heapq.heappush(self._requeued, (entry.slot.prompt_index, entry.slot.attempt + 1))
            self._book.move(entry, GroupState.DROPPED)
            self._notify()

    def _exhausted(self) -> bool:
        ended = self._no_more_prompts and not self._requeued and not self._closed_slots
        return not self._book.counts[GroupState.IN_FLIGHT] and (ended or self._stopped_reserving)

    async def step_trained(self, step: int) -> None:
        """`step` has trained the groups that it took: they and the step are recorded in one transaction."""
        assert step == self._last_taken, f"step {step} is not the one that was taken, {self._last_taken}"
        entries = self._book.in_state(GroupState.TRAINING)
        ended = self._no_more_prompts or self._stopped_reserving
        whole = len(entries) == self._options.groups_per_batch or (bool(entries) and ended)
        assert whole, f"step {step} trained {len(entries)} groups"
        # First: if it raises, the groups stay in training and count as nothing.
        self._ledger.trained(step, [e.slot.prompt_index for e in entries])
        for entry in entries:
            assert entry.group is not None
            self._audit.trained(entry.group)
            self._book.move(entry, GroupState.TRAINED)
        self._notify()

    async def freshness(self, step: int) -> BatchFreshness:
        """Ages of the batch in training; call it between take_batch and step_trained."""
        taken = self._book.in_state(GroupState.TRAINING)
        return BatchFreshness.measure(
            [e.group for e in taken if e.group is not None],
            [e.finished_version for e in taken],
            step=step,
            asked_s=[e.asked_s for e in taken],
            taken_s=[e.taken_s for e in taken],
            soft_versions=self._options.soft_versions,
        )

    # Versions, restart, stop

    def weights_held(self, version: WeightVersion) -> None:
        """Every engine serves `version`."""
        assert self._held is None or version >= self._held, f"version {version} after {self._held}"
        self._held, self._limit = version, self._options.admission_limit(version)
        self._open_slots()
        self._notify()

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """Plain JSON: the position in the prompt stream once `step` is trained, which suffices to resume after it
        without a ledger. The groups that `step` took count as trained, whether that is recorded yet or not.
        """
        # Of an earlier step: what is taken since is open.
        done = GroupState.TRAINING if step == self._last_taken else None
        open_indexes = {e.slot.prompt_index for e in self._book.entries.values() if e.state is not done} | {
            i for i, _ in (*self._requeued, *self._closed_slots)
        }
        return {
            "step": step,
            "next_index": self._next_index,
            "open": sorted(open_indexes),
            "fingerprint": dict(self._fingerprint),
            **({} if self.choices is None else {POOL: self.choices(open_indexes)}),
        }

    def restore(
        self,
        step: int,
        state: Mapping[str, object] | None = None,
        fingerprint: Fingerprint | None = None,
        prompt_at: PromptAt | None = None,
    ) -> None:
        """Continue after training step `step`: groups of the ledger within the bound are buffered, every other open
        prompt is requeued. Weights newer than the restored step do not exist any more: what they sampled is generated
        again. `state`: `checkpoint_state` of that step. `prompt_at`: the stream, to name a prompt that has changed.
        """
        self._fingerprint = dict(fingerprint or {})
        saved, stored = (state or {}).get("fingerprint"), self._ledger.fingerprint()
        require_own_ledger(stored, self._fingerprint)
        before = saved if isinstance(saved, dict) and saved else stored
        usable = same_or_regenerate(before, self._fingerprint, step=step, at=prompt_at)
        recovered = self._ledger.restore(step, state)
        if fingerprint:  # now, because a damaged ledger has been replaced
            self._ledger.remember(self._fingerprint)
        self._last_taken, self._next_id = step, recovered.next_group_id
        self._next_index, self._done = recovered.next_index, recovered.done
        self._book.carry_over(
            {
                GroupState.TRAINED: step * self._options.groups_per_batch,
                GroupState.FILTERED: recovered.filtered,
                GroupState.FAILED: recovered.failed,
            }
        )
        kept = set()
        for stored in recovered.buffered:
            if usable and self._still_usable(stored.group, step):
                kept.add(stored.prompt_index)
                self._readmit(stored.prompt_index, stored.group, stored.finished_version)
            else:
                self._ledger.reopened(stored.prompt_index)
        # Ascending, so a heap already.
        self._requeued = [(i, 1) for i in range(self._next_index) if i not in self._done and i not in kept]
        self._book.check()  # no waiter to wake before the run begins

    def _still_usable(self, group: Group, step: int) -> bool:
        """Whether a stored group was sampled by weights that exist, is within the bound, and is schedulable together
        with the groups buffered already.
        """
        options = self._options
        if (newest_version(group) or 0) > step or self._book.finished >= options.admission_limit(step):
            return False
        if options.policy is StalenessPolicy.WAIT:
            return self._choice.still_fits(group.admitted_version, step + 1)
        oldest = group.oldest_version
        return oldest is None or staleness(step=step + 1, version=oldest) <= options.bound_versions

    def _readmit(self, index: int, group: Group, finished_version: WeightVersion) -> None:
        """Buffer a stored group under its old admission number, which orders deadlines. Its times are shifted, because
        loop times of the earlier process are not comparable.
        """
        now = self._now()
        slot = Slot(group_id=group.group_id, prompt_index=index, admitted_version=group.admitted_version)
        entry = self._book.admit(slot, now)
        entry.group = replace(group, admitted_s=now - (group.finished_s - group.admitted_s), finished_s=now)
        entry.finished_version = finished_version
        self._book.move(entry, GroupState.BUFFERED)

    async def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is complete: tokens consumed up to it are no longer needed."""
        if not self._closed:  # the last save of a run may end after the queue; the next checkpoint prunes for it
            self._ledger.prune(step)

    def close(self) -> None:
        """Wake all waiters; the ledger holds every finished group. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._notify()
            self._ledger.close()

    def stats(self) -> QueueStats:
        """Counts of invariant 2, and memory."""
        book, counts = self._book, self._book.counts
        return QueueStats(
            admitted=book.admitted,
            trained=counts[GroupState.TRAINED],
            filtered=counts[GroupState.FILTERED],
            dropped=counts[GroupState.DROPPED],
            failed=counts[GroupState.FAILED],
            training=counts[GroupState.TRAINING],
            buffered=counts[GroupState.BUFFERED],
            in_flight=counts[GroupState.IN_FLIGHT],
            dropped_stale=self._dropped_stale,
            dropped_surplus=self._dropped_surplus,
            late_results=self._late,
            requeued_prompts=len(self._requeued) + len(self._closed_slots),
            held_version=self._held,
            memory_bytes=sum(group_bytes(e.group) for e in book.entries.values() if e.group is not None),
            stale_waiting=self._choice.num_stale(self._last_taken + 1),
            generated_samples=self._audit.generated_samples,
            generated_tokens=self._audit.generated_tokens,
            trained_samples=self._audit.trained_samples,
            trained_tokens=self._audit.trained_tokens,
            mean_generated_length=self._audit.mean_generated,
            dropped_by_length=dict(self._audit.dropped_by_length),
            failures=tuple(self._failures[-_NAMED_IN_REPORTS:]),
        )

    def live_groups(self) -> dict[int, GroupState]:
        """State of every group that is not final, by group id."""
        return {group_id: entry.state for group_id, entry in self._book.entries.items()}

    def _notify(self) -> None:
        """Something changed: wake every waiter, which checks its condition again."""
        self._book.check()
        self._progress_s = self._now()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_or_stall(self, step: int) -> None:
        """Wait for any change. Every batch_timeout_s of the whole wait, log what it waits for; raise StallError after
        stall_timeout_s without a change.
        """
        # This event: `_notify` replaces it, and the next would miss a change.
        changed, options = self._changed, self._options
        while True:
            now = self._now()
            left = self._progress_s + options.stall_timeout_s - now
            if left < _ROUNDING_S:
                raise StallError(f"nothing moved for {now - self._progress_s:.0f} s: {self._wait_report(step)}")
            report_in_s = self._reported_s + options.batch_timeout_s - now
            if report_in_s < _ROUNDING_S:
                self._reported_s, report_in_s = now, options.batch_timeout_s
                logger.warning("%s", self._wait_report(step))
            try:
                async with asyncio.timeout(min(report_in_s, left)):
                    await changed.wait()
                    return
            except TimeoutError:
                continue

    def _wait_report(self, step: int) -> str:
        options, now, bound = self._options, self._now(), self._options.bound_versions
        flying = [e for e in self._book.in_state(GroupState.IN_FLIGHT) if not e.surplus]
        due = [e for e in flying if due_step(admitted_version=e.slot.admitted_version, max_versions=bound) <= step]
        names = [f"{e.slot.group_id} ({now - e.admitted_s:.0f} s)" for e in flying[:_NAMED_IN_REPORTS]]
        more = f" and {len(flying) - len(names)} more" if len(flying) > len(names) else ""
        who = f"groups {', '.join(names)}{more} in flight, {len(due)} of them due" if names else "no group is in flight"
        free = self._free_slots()
        filtered = self._book.counts[GroupState.FILTERED] - self._filtered_before
        why = f"; {filtered} groups without reward variance were filtered meanwhile" if filtered else ""
        if aged := self._dropped_aged - self._dropped_aged_before:
            why += f"; {aged} groups older than staleness.max_age_s={options.max_age_s:g} were dropped meanwhile"
        if self.stall_diagnosis is not None and (diagnosis := self.stall_diagnosis()):
            why += f"; {diagnosis}"
        return (
            f"the trainer has waited {now - self._waits_since_s:.0f} s for step {step}: "
            f"{len(self._book.buffered_ids)} of {options.groups_per_batch} groups "
            f"are finished; {who}; {free} free slots for the rollouter; engines hold version {self._held}{why}"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
