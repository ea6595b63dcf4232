"""Which groups form the next batch, which are too old, and which in flight are too many. Reads a
`GroupAccounting`, changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from roll_async.buffer.book import Entry, GroupAccounting
from roll_async.buffer.freshness import newest_trained_version
from roll_async.buffer.states import GroupState, QueueOptions
from roll_async.config.staleness import StalenessPolicy, is_schedulable, largest_excess, staleness
from roll_async.schema import Group, WeightVersion


class BatchChoice:
    """Which groups a step takes; the proof that they are in time is in `staleness.py`."""

    def __init__(self, options: QueueOptions, book: GroupAccounting) -> None:
        self._options, self._book = options, book

    def batch(self, step: int, num_groups: int) -> list[Entry] | None:
        """The `num_groups` finished groups of oldest admission; None while the trainer has to wait for others.
        `num_groups` is G, or fewer for a part of the batch.
        """
        options, book = self._options, self._book
        if len(book.buffered_ids) < num_groups:
            return None
        chosen = self._oldest(num_groups)
        if options.policy is StalenessPolicy.WAIT:
            if not self.may_take(chosen, step):
                return None
            for entry in chosen:
                oldest = None if entry.group is None else entry.group.oldest_version
                assert oldest is None or staleness(step=step, version=oldest) <= options.bound_versions, (
                    f"group {entry.slot.group_id} of version {oldest} is over the bound at step {step}"
                )
        return chosen

    def may_take(self, chosen: Sequence[Entry], step: int) -> bool:
        """The look-ahead rule: the groups left behind can still be trained in time."""
        return is_schedulable(
            left_by_version=self._without(chosen),
            step=step,
            groups_per_batch=self._options.groups_per_batch,
            max_versions=self._options.bound_versions,
            taken=self._taken + len(chosen),
        )

    @property
    def _taken(self) -> int:
        """Groups of the current step that the trainer has taken already: a batch may be taken in parts."""
        return self._book.counts[GroupState.TRAINING]

    def surplus(self, step: int, num_groups: int, *, nothing_more_fits: bool) -> list[Entry]:
        """Groups in flight that are too many once the batch of `step`, or the next part of it, is complete. There are
        such groups with over-sampling only: other runs admit no more than their steps can train in time, or let the
        policy drop or mask what is late.

        `nothing_more_fits`: the kept groups fill the admission rule, so no group in flight can be kept before the next
        weight push, and the batch need not wait for one. Under policies drop and token_mask a late group delays nothing
        and is surplus in this case only. The youngest are chosen first, prompts that were aborted before last.
        """
        options, book = self._options, self._book
        if not options.oversample_groups or len(book.buffered_ids) < num_groups:
            return []
        if options.policy is not StalenessPolicy.WAIT and not nothing_more_fits:
            return []
        flying = [e for e in book.in_state(GroupState.IN_FLIGHT) if not e.surplus]
        flying.sort(key=lambda e: (e.slot.attempt, -e.slot.group_id))
        chosen: list[Entry] = []
        while True:
            excess = self._excess(self._without(chosen), step, self._taken)
            if excess is None and nothing_more_fits:
                left = self._without([*chosen, *self._oldest(num_groups)])
                excess = self._excess(left, step, self._taken + num_groups)
            candidates = [e for e in flying if excess and e.slot.admitted_version <= excess[1]]
            if excess is None or not candidates:
                return chosen
            chosen += candidates[: excess[0]]
            flying = [e for e in flying if e not in chosen]

    def is_too_many(self, entry: Entry, last_taken: int) -> bool:
        """With this finished group the buffered ones could not all be trained in time. Over-sampling under policy wait
        only: the other policies drop or mask late tokens.
        """
        options, book = self._options, self._book
        if not options.oversample_groups or options.policy is not StalenessPolicy.WAIT:
            return False
        kept = Counter(book.entries[i].slot.admitted_version for i in book.buffered_ids)
        kept[entry.slot.admitted_version] += 1
        # A step of which a part is taken goes on; else the next step is the first to take any.
        return self._excess(kept, last_taken if self._taken else last_taken + 1, self._taken) is not None

    def still_fits(self, admitted_version: WeightVersion, next_step: int) -> bool:
        """Whether one more group of this version, in addition to those waiting, can be trained in time."""
        return self._excess(self._book.waiting_by_version + Counter({admitted_version: 1}), next_step) is None

    def is_over_bound(self, group: Group, step: int) -> bool:
        """Whether a group is too old for `step` under policies drop and token_mask. token_mask keeps a group as long as
        one of its trained tokens is within the bound.
        """
        masks = self._options.policy is StalenessPolicy.TOKEN_MASK
        decisive = newest_trained_version(group) if masks else group.oldest_version
        return decisive is not None and staleness(step=step, version=decisive) > self._options.bound_versions

    def num_stale(self, next_step: int) -> int:
        """Buffered groups that would be older than soft_versions at the next step."""
        soft = self._options.soft_versions
        if soft is None:
            return 0
        groups = (self._book.entries[i].group for i in self._book.buffered_ids)
        oldest = (g.oldest_version for g in groups if g is not None)
        return sum(1 for v in oldest if v is not None and staleness(step=next_step, version=v) > soft)

    def _oldest(self, num_groups: int) -> list[Entry]:
        return [self._book.entries[i] for i in self._book.buffered_ids[:num_groups]]

    def _without(self, entries: Sequence[Entry]) -> Counter[WeightVersion]:
        return self._book.waiting_by_version - Counter(e.slot.admitted_version for e in entries)

    def _excess(
        self, groups: Mapping[WeightVersion, int], next_step: int, taken: int = 0
    ) -> tuple[int, WeightVersion] | None:
        return largest_excess(
            groups_by_version=groups,
            next_step=next_step,
            groups_per_batch=self._options.groups_per_batch,
            max_versions=self._options.bound_versions,
            taken=taken,
        )
