"""The queue of requests: by priority, later turns before first ones, then by age."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from roll_async.rollout.dispatch.requests import PendingRequest

TRAINING, VALIDATION_FIRST, VALIDATION_LAST = 0, 1, -1
"""Priorities; the higher one is dispatched first. A mode of validation changes that of requests which wait already."""


class WaitingRequests:
    """A priority queue from which any request can be removed. A request that is added again takes its old place,
    because the order is by age.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, PendingRequest]] = []
        self._entries: dict[PendingRequest, int] = {}
        """Number of the valid heap entry of a request; its other entries are stale."""
        self._later: set[PendingRequest] = set()
        self._number = 0
        self._validation_priority = VALIDATION_FIRST

    @property
    def validation_priority(self) -> int:
        """Of the requests of validations; that of training is 0."""
        return self._validation_priority

    @validation_priority.setter
    def validation_priority(self, priority: int) -> None:
        if priority != self._validation_priority:
            self._validation_priority = priority
            # The heap is built anew; from a copy, because `add` writes.
            waiting = list(self._entries)
            self._heap.clear()
            for pending in waiting:
                self.add(pending)

    @property
    def num_training(self) -> int:
        """Requests of training that any replica may take."""
        return sum(not (pending.validation or pending.failed_on) for pending in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PendingRequest]:
        """In the order in which they are dispatched."""
        return iter(sorted(self._entries, key=lambda pending: (self._rank(pending), pending.order)))

    def __contains__(self, pending: PendingRequest) -> bool:
        return pending in self._entries

    def add(self, pending: PendingRequest) -> None:
        """Add a request; its place follows from its priority and its age."""
        self._number += 1
        self._entries[pending] = self._number
        if pending.later_turn:
            self._later.add(pending)
        # The number is unique, so that two requests, which have no order, are never compared.
        heapq.heappush(self._heap, (self._rank(pending), pending.order, self._number, pending))

    def discard(self, pending: PendingRequest) -> bool:
        """Remove a request. False if it was not in the queue."""
        self._later.discard(pending)
        return self._entries.pop(pending, None) is not None

    def priority(self, pending: PendingRequest) -> int:
        """Its priority at present."""
        return self._validation_priority if pending.validation else TRAINING

    def pop(self, floor: int) -> PendingRequest | None:
        """Remove and return the first request; None when all are of a priority below `floor`."""
        while self._heap:
            _, _, number, pending = self._heap[0]
            if self._entries.get(pending) != number:
                heapq.heappop(self._heap)
                continue
            if self.priority(pending) < floor:  # then that of all that follow is, too
                return None
            heapq.heappop(self._heap)
            self.discard(pending)
            return pending
        return None

    @property
    def first(self) -> PendingRequest | None:
        """The one that is dispatched next."""
        while self._heap and self._entries.get(self._heap[0][3]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    @property
    def any_later_turn(self) -> bool:
        """Whether a later turn of a conversation waits."""
        return bool(self._later)

    def later_turns(self, floor: int) -> list[PendingRequest]:
        """Waiting later turns of conversations, in order; without those after training, which get free slots only."""
        found = (p for p in self._later if self.priority(p) >= max(floor, TRAINING))
        return sorted(found, key=lambda pending: (self._rank(pending), pending.order))

    def clear(self) -> None:
        """Remove all requests."""
        self._heap.clear()
        self._entries.clear()
        self._later.clear()

    def _rank(self, pending: PendingRequest) -> int:
        """Among all requests; the lowest is dispatched first."""
        return -2 * self.priority(pending) + (not pending.later_turn)
