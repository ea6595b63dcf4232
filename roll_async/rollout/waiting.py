"""Requests that no replica has: the foreground before the background, later turns before first ones, then by age."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from roll_async.rollout.requests import PendingRequest

_Queue = OrderedDict[PendingRequest, None]


class WaitingRequests:
    """Queues from which any request can leave at once, wherever it stands."""

    def __init__(self) -> None:
        self._later_foreground, self._foreground = _Queue(), _Queue()
        self._later_background, self._background = _Queue(), _Queue()
        self._queues = (self._later_foreground, self._foreground, self._later_background, self._background)
        """In the order of their turn."""
        self._queues_foreground = self._queues[:2]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter([pending for queue in self._queues for pending in queue])

    def add(self, pending: PendingRequest) -> None:
        """Behind all others of its kind."""
        self._of(pending)[pending] = None

    def put_back(self, pending: PendingRequest) -> None:
        """Before all others of its kind: it is older than they are."""
        queue = self._of(pending)
        queue[pending] = None
        queue.move_to_end(pending, last=False)

    def discard(self, pending: PendingRequest) -> bool:
        """False when it did not wait."""
        waited = pending in self._of(pending)
        self._of(pending).pop(pending, None)
        return waited

    def first(self, *, foreground_only: bool) -> PendingRequest | None:
        """Whose turn it is; it stays until it is discarded."""
        for queue in self._queues_foreground if foreground_only else self._queues:
            if queue:
                return next(iter(queue))
        return None

    @property
    def any_later_turn(self) -> bool:
        """A request waits whose conversation has begun."""
        return bool(self._later_background or self._later_foreground)

    def later_turns(self, *, foreground_only: bool) -> list[PendingRequest]:
        """Requests of conversations that have begun, in order."""
        return [*self._later_foreground, *(() if foreground_only else self._later_background)]

    def clear(self) -> None:
        """Forget all."""
        for queue in self._queues:
            queue.clear()

    def _of(self, pending: PendingRequest) -> _Queue:
        if pending.later_turn:
            return self._later_foreground if pending.foreground else self._later_background
        return self._foreground if pending.foreground else self._background
