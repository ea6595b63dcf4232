"""Which replica gets the next request: in proportion to free capacity, found without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

_KV_FLOOR = 0.05
"""Keeps the weight of a replica with a full KV cache above 0: it has slots, and comes after those with room."""


@dataclass(slots=True)
class _Capacity:
    """Free slots and free KV cache of a replica."""

    free_slots: int
    kv: float
    assigned: int = 0
    """Requests given to it in this round."""
    weight_at_start: float = 0.0
    """Its weight when the round gave it its first request."""
    entry: int = 0
    """Number of its valid heap entry."""

    @property
    def weight(self) -> float:
        """Relative share of the requests it gets; 0 = it has no free slot."""
        # Free slots are below 0 when later turns went to a full replica, or its limit fell.
        return max(0, self.free_slots) * (self.kv + _KV_FLOOR)

    @property
    def rank(self) -> float:
        """The highest one gets the next request: its weight divided by the requests it has already, which divides a
        round in proportion to the weights (the method of highest averages).
        """
        if self.free_slots <= 0:
            return 0.0
        return self.weight_at_start / (self.assigned + 1) if self.assigned else self.weight


class ReplicaChoice:
    """Replicas with their free slots. Requests that share an affinity go to one replica while that has room; those of a
    conversation go to its home, the replica of its first turn, while that lives, full or not.

    Worked example: free slots 30 and 10, equal caches, a round of 8 requests: 6 and 2. A choice costs O(log replicas).
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Capacity] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._number = 0
        self._round: list[str] = []
        self._homes: dict[str, str] = {}

    def set(self, name: str, free_slots: int, kv: float = 1.0) -> None:
        """Update a replica's number of free slots and the free share of its KV cache. Among equals the one that changed
        longest ago comes first.
        """
        capacity = self._replicas.get(name)
        if capacity is None:
            capacity = self._replicas[name] = _Capacity(free_slots, kv)
        capacity.free_slots, capacity.kv = free_slots, kv
        self._push(name, capacity)

    def remove(self, name: str) -> None:
        """Remove a replica."""
        self._replicas.pop(name, None)

    def begin_round(self) -> None:
        """Requests from now on are divided among the replicas as one round."""
        for name in self._round:
            capacity = self._replicas.get(name)
            if capacity is not None and capacity.assigned:
                capacity.assigned = 0
                self._push(name, capacity)
        self._round.clear()

    @property
    def any_free(self) -> bool:
        """A replica has a free slot."""
        heap = self._heap
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
        return bool(heap)

    def choose(self, affinity: str | None, avoid: Collection[str]) -> str | None:
        """The replica for the next request of this affinity; None while no replica that may take it has a free slot.
        `avoid`: replicas to use only when there is no other at all.
        """
        if avoid and self._replicas.keys() <= set(avoid):
            avoid = ()
        name = self._free_home(affinity, avoid) or self._highest(avoid)
        if name is None:
            return None
        if affinity is not None:
            self._homes[affinity] = name
        capacity = self._replicas[name]
        if not capacity.assigned:
            capacity.weight_at_start = capacity.weight
            self._round.append(name)
        capacity.assigned += 1  # its heap entry follows with the caller's `set` of its free slots
        return name

    def _free_home(self, affinity: str | None, avoid: Collection[str]) -> str | None:
        home = None if affinity is None else self.home(affinity, avoid)
        return home if home is not None and self._replicas[home].free_slots > 0 else None

    def _highest(self, avoid: Collection[str]) -> str | None:
        passed, found = [], None
        while self.any_free:
            name = self._heap[0][2]
            if name not in avoid:
                found = name
                break
            passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def settle(self, key: str, name: str) -> None:
        """This replica is the home of the key from now on."""
        self._homes[key] = name

    def is_settled(self, key: str) -> bool:
        """The key has, or had, a home."""
        return key in self._homes

    def home(self, key: str, avoid: Collection[str]) -> str | None:
        """The home of a key, however busy; None when it has none, or when that is removed or to be avoided."""
        home = self._homes.get(key)
        return home if home is not None and home not in avoid and home in self._replicas else None

    def has_room(self, name: str) -> bool:
        """The replica has a free slot."""
        return self._replicas[name].free_slots > 0

    def forget(self, key: str) -> None:
        """No further request will come with this key."""
        self._homes.pop(key, None)

    def _push(self, name: str, capacity: _Capacity) -> None:
        self._number += 1
        capacity.entry = self._number
        rank = capacity.rank
        if not rank:  # nothing is chosen for it, and its older entry is not valid any more
            return
        heapq.heappush(self._heap, (-rank, self._number, name))  # negated: heapq has the smallest first
        if len(self._heap) > 64 + 4 * len(self._replicas):  # mostly stale: a choice stays O(log replicas)
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)

    def _valid(self, entry: tuple[float, int, str]) -> bool:
        capacity = self._replicas.get(entry[2])
        return capacity is not None and capacity.entry == entry[1]
