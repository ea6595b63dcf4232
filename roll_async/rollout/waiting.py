"""Requests that no replica has: oldest first, those in the foreground before the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from roll_async.rollout.requests import PendingRequest


class WaitingRequests:
    """Two queues from which any request can leave at once, wherever it stands."""

    def __init__(self) -> None:
        self._foreground: OrderedDict[PendingRequest, None] = OrderedDict()
        self._background: OrderedDict[PendingRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter([*self._foreground, *self._background])

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
        if self._foreground:
            return next(iter(self._foreground))
        return None if foreground_only else next(iter(self._background), None)

    def clear(self) -> None:
        """Forget all."""
        self._foreground.clear()
        self._background.clear()

    def _of(self, pending: PendingRequest) -> OrderedDict[PendingRequest, None]:
        return self._foreground if pending.foreground else self._background
