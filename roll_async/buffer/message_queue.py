"""Finished groups between rollout and trainer: admission, the staleness bound, exactly-once accounting.

One instance per run, on one event loop; no call holds anything across a wait. The arithmetic is in `staleness.py`,
what is
durable in `ledger.py`. Every group is in exactly one `GroupState`, and the counts add up at every instant (invariant
2).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from dataclasses import dataclass

from roll_async.buffer.errors import EndOfData, QueueClosed, StallError, TooManyFailures
from roll_async.buffer.freshness import BatchFreshness, LengthAudit, group_bytes, response_lengths
from roll_async.buffer.ledger import Ledger
from roll_async.buffer.staleness import StalenessPolicy, is_schedulable, staleness
from roll_async.buffer.states import GroupState, Outcome, QueueOptions, QueueStats, Slot
from roll_async.schema import Group, WeightVersion

logger = logging.getLogger(__name__)

__all__ = ["EndOfData", "MessageQueue", "QueueClosed", "StallError", "TooManyFailures"]


@dataclass(slots=True)
class _Entry:
    """One admitted group."""

    slot: Slot
    state: GroupState
    admitted_s: float
    group: Group | None = None
    finished_version: WeightVersion = 0
    finished_s: float = 0.0


class MessageQueue:
    """One producer (the rollouter), one consumer (the train loop), bounded by the admission rule."""

    def __init__(self, options: QueueOptions, ledger: Ledger) -> None:
        self._options, self._ledger = options, ledger
        self._entries: dict[int, _Entry] = {}
        self._finals: Counter[GroupState] = Counter()
        self._next_id = self._next_index = 0
        self._requeued: list[tuple[int, int]] = []  # heap of (prompt index, attempt)
        self._done: frozenset[int] = frozenset()
        self._held: WeightVersion | None = None
        self._trained_before = 0  # slots of steps before the restored one: they count as admitted
        self._no_more_prompts = self._closed = self._reserving = False
        self._stopped_reserving = False
        self._late = self._dropped_stale = 0
        self._audit = LengthAudit()
        self._failures: list[str] = []
        self._changed = asyncio.Event()
        self._progress_s = 0.0

    # Producer

    async def reserve(self, max_groups: int) -> list[Slot]:
        """Up to `max_groups` slots; waits for at least one. Empty when nothing will ever be admitted again."""
        while True:
            if self._closed or self._stopped_reserving:
                return []
            if not self._no_more_prompts or self._requeued:
                count = min(max_groups, self._free_slots())
                if self._no_more_prompts:
                    count = min(count, len(self._requeued))
                if count > 0:
                    return [self._admit() for _ in range(count)]
            elif not self._count(GroupState.IN_FLIGHT):
                return []
            await self._change()

    def _free_slots(self) -> int:
        """min over the admission rule, the queue's own bound and soft_versions; 0 before the first weight push."""
        if self._held is None:
            return 0
        options = self._options
        live = self._count(GroupState.IN_FLIGHT) + self._count(GroupState.BUFFERED) + self._count(GroupState.TRAINING)
        admitted = live + self._finals[GroupState.TRAINED] + self._trained_before
        free = options.admission_limit(self._held) - admitted + options.oversample_groups
        free = min(free, options.queue_limit + options.oversample_groups - (live - self._count(GroupState.TRAINING)))
        if options.soft_versions is not None and self._stale_waiting():
            return 0
        return max(0, free)

    def _admit(self) -> Slot:
        assert self._held is not None
        if self._requeued:
            index, attempt = heapq.heappop(self._requeued)
        else:
            while self._next_index in self._done:
                self._next_index += 1
            index, attempt = self._next_index, 0
            self._next_index += 1
        slot = Slot(group_id=self._next_id, prompt_index=index, admitted_version=self._held, attempt=attempt)
        self._next_id += 1
        self._entries[slot.group_id] = _Entry(slot, GroupState.IN_FLIGHT, self._now())
        return slot

    async def put(self, group: Group) -> None:
        """A finished, kept group: durable first, then buffered. A result of a released group is late and refused."""
        entry = self._entries.get(group.group_id)
        if entry is None or entry.state is not GroupState.IN_FLIGHT:
            self._late += 1
            return
        expected = self._options.samples_per_group
        assert expected is None or len(group.samples) == expected, f"group {group.group_id} is not whole"
        version = self._held or 0
        self._ledger.finished(group, entry.slot.prompt_index, version)
        self._audit.generated(response_lengths(group))
        entry.group, entry.finished_version, entry.finished_s = group, version, self._now()
        entry.state = GroupState.BUFFERED
        self._notify()

    async def release(self, group_id: int, outcome: Outcome, reason: str = "") -> None:
        """Give a slot back without a group. Raises TooManyFailures when one group too many was quarantined."""
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.IN_FLIGHT:
            self._late += 1
            return
        index = entry.slot.prompt_index
        match outcome:
            case Outcome.UNUSED:
                del self._entries[group_id]
                self._notify()
                return
            case Outcome.REQUEUED:
                self._final(group_id, GroupState.DROPPED)
                heapq.heappush(self._requeued, (index, entry.slot.attempt + 1))
            case Outcome.FILTERED:
                self._ledger.closed(index, group_id, "filtered", reason)
                self._final(group_id, GroupState.FILTERED)
            case Outcome.FAILED:
                self._ledger.closed(index, group_id, "failed", reason)
                self._final(group_id, GroupState.FAILED)
                self._failures.append(f"prompt {index}: {reason}")
        self._notify()
        if self._finals[GroupState.FAILED] > self._options.max_failed_groups:
            last = "; ".join(self._failures[-3:])
            raise TooManyFailures(
                f"{self._finals[GroupState.FAILED]} groups failed, more than fault.max_failed_groups={self._options.max_failed_groups}; last: {last}"
            )

    def end_of_data(self) -> None:
        """The prompt stream is exhausted; requeued prompts still come."""
        self._no_more_prompts = True
        self._notify()

    def stop_reserving(self) -> None:
        """No more slots are given out: the run is ending."""
        self._stopped_reserving = True
        self._notify()

    # Consumer

    async def take_batch(self, step: int) -> list[Group]:
        """Exactly G groups for training step `step`, oldest admission first.

        Raises EndOfData when no full batch can come any more, StallError when nothing moved for stall_timeout.
        """
        self._progress_s = self._now()
        while True:
            if self._closed:
                raise QueueClosed("the queue was closed", leftovers=self._count(GroupState.BUFFERED))
            chosen = self._choose(step)
            if chosen is not None:
                for entry in chosen:
                    entry.state = GroupState.TRAINING
                self._notify()
                return [entry.group for entry in chosen if entry.group is not None]
            if self._exhausted():
                left = self._count(GroupState.BUFFERED)
                raise EndOfData(
                    f"the data ended with {left} finished groups, fewer than the {self._options.groups_per_batch} of a batch",
                    leftovers=left,
                )
            await self._change_or_stall(step)

    def _choose(self, step: int) -> list[_Entry] | None:
        """The batch of this step, or None while it has to wait."""
        options = self._options
        if options.policy is StalenessPolicy.DROP:
            self._drop_stale(step)
        ready = sorted(
            (e for e in self._entries.values() if e.state is GroupState.BUFFERED), key=lambda e: e.slot.group_id
        )
        if len(ready) < options.groups_per_batch:
            return None
        chosen = ready[: options.groups_per_batch]
        if options.policy is StalenessPolicy.WAIT:
            ids = {e.slot.group_id for e in chosen}
            waiting = (GroupState.IN_FLIGHT, GroupState.BUFFERED)
            left = Counter(
                e.slot.admitted_version
                for e in self._entries.values()
                if e.state in waiting and e.slot.group_id not in ids
            )
            if not is_schedulable(
                left_by_version=left,
                step=step,
                groups_per_batch=options.groups_per_batch,
                max_versions=options.bound_versions,
            ):
                return None
            for entry in chosen:
                oldest = entry.group.oldest_version if entry.group else None
                assert oldest is None or staleness(step=step, version=oldest) <= options.bound_versions, "bound broken"
        return chosen

    def _drop_stale(self, step: int) -> None:
        for group_id, entry in list(self._entries.items()):
            if entry.state is not GroupState.BUFFERED or entry.group is None:
                continue
            oldest = entry.group.oldest_version
            if oldest is not None and staleness(step=step, version=oldest) > self._options.bound_versions:
                self._audit.dropped(entry.group)
                self._dropped_stale += 1
                self._ledger.reopened(entry.slot.prompt_index)
                heapq.heappush(self._requeued, (entry.slot.prompt_index, entry.slot.attempt + 1))
                self._final(group_id, GroupState.DROPPED)
                self._notify()

    def _exhausted(self) -> bool:
        in_flight = self._count(GroupState.IN_FLIGHT)
        ended = self._no_more_prompts and not self._requeued
        return not in_flight and (ended or self._stopped_reserving)

    async def step_trained(self, step: int) -> None:
        """The groups taken last were consumed by `step`: one transaction with the record of the step."""
        ids = [i for i, e in self._entries.items() if e.state is GroupState.TRAINING]
        self._ledger.trained(step, [self._entries[i].slot.prompt_index for i in ids])
        for group_id in ids:
            group = self._entries[group_id].group
            assert group is not None
            self._audit.trained(group)
            self._final(group_id, GroupState.TRAINED)
        self._notify()

    def freshness(self, step: int) -> BatchFreshness:
        """Ages of the batch in training; call it between take_batch and step_trained."""
        taken = [e for e in self._entries.values() if e.state is GroupState.TRAINING]
        return BatchFreshness.measure(
            [e.group for e in taken if e.group is not None],
            [e.finished_version for e in taken],
            step=step,
            now_s=self._now(),
            max_versions=self._options.bound_versions,
            soft_versions=self._options.soft_versions,
        )

    # Versions, restart, stop

    def weights_held(self, version: WeightVersion) -> None:
        """Every engine serves `version`."""
        self._held = version
        self._notify()

    def restore(self, step: int) -> None:
        """Continue after training step `step`: what the ledger holds within the bound is buffered, every other open
        prompt comes again.

        A group sampled by weights newer than the restored step is generated again: those weights do not exist any more.
        """
        recovered = self._ledger.restore(step)
        self._trained_before = step * self._options.groups_per_batch
        self._next_index, self._done = recovered.next_index, recovered.done
        kept = set()
        for stored in recovered.buffered:
            versions = [v for s in stored.group.samples for v, _ in s.version_runs]
            oldest = stored.group.oldest_version
            usable = not versions or max(versions) <= step
            if usable and oldest is not None:
                usable = staleness(step=step + 1, version=oldest) <= self._options.bound_versions
            if not usable:
                self._ledger.reopened(stored.prompt_index)
                continue
            kept.add(stored.prompt_index)
            self._readmit(stored.prompt_index, stored.group, stored.finished_version)
        for index in range(self._next_index):
            if index not in self._done and index not in kept:
                heapq.heappush(self._requeued, (index, 1))
        self._notify()

    def _readmit(self, index: int, group: Group, finished_version: WeightVersion) -> None:
        group_id, now = self._next_id, self._now()
        self._next_id += 1
        renamed = Group(
            group_id=group_id,
            prompt=group.prompt,
            samples=group.samples,
            admitted_version=group.admitted_version,
            admitted_s=now,
            finished_s=now,
            baseline_score=group.baseline_score,
        )
        slot = Slot(group_id=group_id, prompt_index=index, admitted_version=group.admitted_version, attempt=0)
        self._entries[group_id] = _Entry(slot, GroupState.BUFFERED, now, renamed, finished_version, now)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of `step` is complete: tokens consumed up to it are no longer needed."""
        self._ledger.prune(step)

    def close(self) -> None:
        """Wake all waiters; the ledger holds every finished group."""
        self._closed = True
        self._notify()
        self._ledger.close()

    def stats(self) -> QueueStats:
        """Counts of invariant 2, memory, ages."""
        now, by_state = self._now(), Counter(e.state for e in self._entries.values())
        flying = [now - e.admitted_s for e in self._entries.values() if e.state is GroupState.IN_FLIGHT]
        waiting = [now - e.finished_s for e in self._entries.values() if e.state is GroupState.BUFFERED]
        held = [e.group for e in self._entries.values() if e.group is not None]
        live = sum(by_state.values())
        return QueueStats(
            admitted=live + sum(self._finals.values()),
            trained=self._finals[GroupState.TRAINED],
            filtered=self._finals[GroupState.FILTERED],
            dropped=self._finals[GroupState.DROPPED],
            failed=self._finals[GroupState.FAILED],
            training=by_state[GroupState.TRAINING],
            buffered=by_state[GroupState.BUFFERED],
            in_flight=by_state[GroupState.IN_FLIGHT],
            dropped_stale=self._dropped_stale,
            late_results=self._late,
            requeued_prompts=len(self._requeued),
            held_version=self._held,
            memory_bytes=sum(map(group_bytes, held)),
            oldest_in_flight_s=max(flying, default=0.0),
            oldest_buffered_s=max(waiting, default=0.0),
            stale_waiting=self._stale_waiting(),
            generated_samples=self._audit.generated_samples,
            generated_tokens=self._audit.generated_tokens,
            trained_samples=self._audit.trained_samples,
            trained_tokens=self._audit.trained_tokens,
            dropped_by_length=dict(self._audit.dropped_by_length),
        )

    # Inside

    def _stale_waiting(self) -> int:
        soft, held = self._options.soft_versions, self._held
        if soft is None or held is None:
            return 0
        waiting = (e.group for e in self._entries.values() if e.state is GroupState.BUFFERED and e.group is not None)
        return sum(1 for g in waiting if (v := g.oldest_version) is not None and held - v > soft)

    def _count(self, state: GroupState) -> int:
        return sum(1 for e in self._entries.values() if e.state is state)

    def _final(self, group_id: int, state: GroupState) -> None:
        del self._entries[group_id]
        self._finals[state] += 1

    def _notify(self) -> None:
        self._progress_s = self._now()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    async def _change_or_stall(self, step: int) -> None:
        """Wait for any change; say whom we wait for every batch_timeout, give up after stall_timeout without one."""
        changed, options = self._changed, self._options
        while True:
            try:
                async with asyncio.timeout(options.batch_timeout_s):
                    await changed.wait()
                    return
            except TimeoutError:
                silent = self._now() - self._progress_s
                report = self._whom_we_wait_for(step)
                if silent >= options.stall_timeout_s:
                    raise StallError(f"nothing moved for {silent:.0f} s: {report}") from None
                logger.warning("%s", report)

    def _whom_we_wait_for(self, step: int) -> str:
        stats = self.stats()
        return (
            f"the trainer waits for step {step}: {stats.buffered} of {self._options.groups_per_batch} groups are finished, "
            f"{stats.in_flight} are in flight (oldest {stats.oldest_in_flight_s:.0f} s), engines hold version {stats.held_version}"
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
