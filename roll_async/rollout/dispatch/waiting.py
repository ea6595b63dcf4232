"""The queue of requests: foreground before background (or after it), later turns before first ones, then by age."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from roll_async.rollout.dispatch.requests import PendingRequest

_BACKGROUND, _YIELDING = 2, 4
"""First kinds of the background, and of a foreground that yields to it."""


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
        self._foreground_yields = False

    @property
    def foreground_yields(self) -> bool:
        """The foreground (a validation) comes after the background (training) instead of before it."""
        return self._foreground_yields

    @foreground_yields.setter
    def foreground_yields(self, yields: bool) -> None:
        if yields != self._foreground_yields:
            self._foreground_yields = yields
            # All kinds have changed, so the heap is built anew; a copy, because `add` writes.
            waiting = list(self._entries)
            self._heap.clear()
            for pending in waiting:
                self.add(pending)

    @property
    def num_background(self) -> int:
        """Requests of the background that any replica may take."""
        return sum(not (pending.foreground or pending.failed_on) for pending in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PendingRequest]:
        """In the order in which they are dispatched."""
        return iter(sorted(self._entries, key=lambda pending: (self._kind(pending), pending.order)))

    def __contains__(self, pending: PendingRequest) -> bool:
        return pending in self._entries

    def add(self, pending: PendingRequest) -> None:
        """Add a request; its place follows from its kind and its age."""
        self._number += 1
        self._entries[pending] = self._number
        if pending.later_turn:
            self._later.add(pending)
        # The number is unique, so that two requests, which have no order, are never compared.
        heapq.heappush(self._heap, (self._kind(pending), pending.order, self._number, pending))

    def discard(self, pending: PendingRequest) -> bool:
        """Remove a request. False if it was not in the queue."""
        self._later.discard(pending)
        return self._entries.pop(pending, None) is not None

    def pop(self, *, foreground_only: bool) -> PendingRequest | None:
        """Remove and return the first request; None when none may be dispatched."""
        while self._heap:
            _, _, number, pending = self._heap[0]
            if self._entries.get(pending) != number:
                heapq.heappop(self._heap)
                continue
            if foreground_only and not pending.foreground:  # then all that follow are of the background, too
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

    def later_turns(self, *, foreground_only: bool) -> list[PendingRequest]:
        """Waiting later turns of conversations, in order, without those of a foreground that yields."""
        out = foreground_only or self._foreground_yields
        found = (p for p in self._later if not out or p.foreground is foreground_only)
        return sorted(found, key=lambda pending: (self._kind(pending), pending.order))

    def clear(self) -> None:
        """Remove all requests."""
        self._heap.clear()
        self._entries.clear()
        self._later.clear()

    def _kind(self, pending: PendingRequest) -> int:
        first = _BACKGROUND if not pending.foreground else _YIELDING if self._foreground_yields else 0
        return first + (not pending.later_turn)
