"""The state of every group by id, and the counts: every admitted group is in exactly one state at every instant."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from roll_async.buffer.states import GroupState, Slot
from roll_async.schema import Group, WeightVersion

_LIVE = frozenset({GroupState.IN_FLIGHT, GroupState.BUFFERED, GroupState.TRAINING})
_WAITING = frozenset({GroupState.IN_FLIGHT, GroupState.BUFFERED})


@dataclass(eq=False, slots=True)
class Entry:
    """One admitted group whose state is not final."""

    slot: Slot
    state: GroupState
    admitted_s: float
    group: Group | None = None
    """From BUFFERED on."""
    finished_version: WeightVersion = 0
    """Version the engines held when it finished."""
    taken_s: float = 0.0
    """Loop time at which a step took it."""
    asked_s: float = 0.0
    """Loop time at which that step, or the part of it, began to wait."""
    surplus: bool = False
    """In flight, and no step can train it in time: its result will be refused."""


class GroupAccounting:
    """States and counts of all groups. Costs O(1) per change, whatever the number of groups; buffered ids are
    sorted.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.counts: Counter[GroupState] = Counter()
        """Number of groups by state; for final states since the start."""
        self.admitted = 0
        self.buffered_ids: list[int] = []
        """Ascending: oldest admission first."""
        self.waiting_by_version: Counter[WeightVersion] = Counter()
        """Groups in flight or buffered and not surplus, by the version they were admitted at."""

    def carry_over(self, counts: Mapping[GroupState, int]) -> None:
        """Take over the counts of final groups of an earlier process; they count as admitted."""
        assert not self.entries and not self.admitted, "carry over before anything is admitted"
        self.counts.update(counts)
        self.admitted = sum(counts.values())

    def admit(self, slot: Slot, now_s: float) -> Entry:
        """A slot was given out: its group is in flight."""
        assert slot.group_id not in self.entries, f"group {slot.group_id} is admitted twice"
        entry = Entry(slot, GroupState.IN_FLIGHT, now_s)
        self.entries[slot.group_id] = entry
        self.admitted += 1
        self.counts[GroupState.IN_FLIGHT] += 1
        self.waiting_by_version[slot.admitted_version] += 1
        return entry

    def move(self, entry: Entry, state: GroupState) -> None:
        """The only way to change a state. Final states leave the book and stay in the counts."""
        group_id, before = entry.slot.group_id, entry.state
        assert self.entries.get(group_id) is entry, f"group {group_id} is final and cannot become {state.value}"
        if before is GroupState.BUFFERED:
            self.buffered_ids.remove(group_id)
        if state is GroupState.BUFFERED:
            insort(self.buffered_ids, group_id)  # groups finish, and are restored, in any order
        if before in _WAITING and state not in _WAITING and not entry.surplus:
            self._leave(entry)
        entry.state = state
        self.counts[before] -= 1
        self.counts[state] += 1
        if state not in _LIVE:
            del self.entries[group_id]

    def mark_surplus(self, entry: Entry) -> None:
        """Mark a group in flight that no step can train in time any more."""
        assert entry.state is GroupState.IN_FLIGHT and not entry.surplus
        entry.surplus = True
        self._leave(entry)

    def forget(self, entry: Entry) -> None:
        """Undo an admission: the slot was never used."""
        assert entry.state is GroupState.IN_FLIGHT
        if not entry.surplus:
            self._leave(entry)
        del self.entries[entry.slot.group_id]
        self.counts[GroupState.IN_FLIGHT] -= 1
        self.admitted -= 1

    def _leave(self, entry: Entry) -> None:
        version = entry.slot.admitted_version
        self.waiting_by_version[version] -= 1
        if not self.waiting_by_version[version]:  # else every version of the run would stay as a key
            del self.waiting_by_version[version]

    @property
    def finished(self) -> int:
        """Groups kept so far: buffered, in training, trained."""
        return self.counts[GroupState.BUFFERED] + self.counts[GroupState.TRAINING] + self.counts[GroupState.TRAINED]

    @property
    def occupying(self) -> int:
        """Groups that hold a slot: finished ones and those in flight."""
        return self.finished + self.counts[GroupState.IN_FLIGHT]

    def in_state(self, state: GroupState) -> list[Entry]:
        """Entries in this state, oldest admission first."""
        return sorted((e for e in self.entries.values() if e.state is state), key=lambda e: e.slot.group_id)

    def in_flight_entry(self, group_id: int) -> Entry | None:
        """The entry if this group is in flight; None for a group that is finished, released or unknown."""
        entry = self.entries.get(group_id)
        return entry if entry is not None and entry.state is GroupState.IN_FLIGHT else None

    def check(self) -> None:
        """Invariant 2, by count and by id."""
        assert self.admitted == sum(self.counts.values()), f"{self.admitted} admitted, counts {dict(self.counts)}"
        live = sum(self.counts[state] for state in _LIVE)
        assert live == len(self.entries), f"{live} live groups counted, {len(self.entries)} known"
        assert self.counts[GroupState.BUFFERED] == len(self.buffered_ids)
