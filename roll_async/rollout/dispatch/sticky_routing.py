"""Later turns of a conversation wait for room on the replica whose cache has their prefix; not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from roll_async.rollout.dispatch.load_index import ReplicaChoice
from roll_async.rollout.dispatch.requests import PendingRequest

PATIENCE_S = 30.0
"""Age from which a later turn goes to any replica with room. To read a long prefix again takes seconds; older than this
it may wait behind answers of any length.
"""


class StickyRouting:
    """Where the KV cache limits the requests of a replica. Where their number alone does, a later turn goes to its
    replica at once and waits in the engine.
    """

    def __init__(self, choice: ReplicaChoice, pump: Callable[[], None], *, by_kv: bool) -> None:
        """`pump` dispatches what waits."""
        self._choice, self._pump, self._by_kv = choice, pump, by_kv
        self._timer: asyncio.TimerHandle | None = None

    def sticky_replica(self, pending: PendingRequest, avoided: Collection[str]) -> str | None:
        """The replica that a later turn goes to now."""
        assert pending.conversation is not None
        home = self._choice.home(pending.conversation, avoided)
        return None if home is None or (self._by_kv and not self._choice.has_room(home)) else home

    def waits(self, pending: PendingRequest, avoided: Collection[str]) -> bool:
        """Only its own replica is to be used, which has no room."""
        young = asyncio.get_running_loop().time() < pending.asked_s + PATIENCE_S
        if not (self._by_kv and pending.later_turn and young) or pending.conversation is None:
            return False
        return self._choice.home(pending.conversation, avoided) is not None

    def end_in_time(self, waiting: Iterable[PendingRequest]) -> None:
        """Dispatch again when the first of these need not wait for its own replica any more."""
        oldest_s = min((pending.asked_s for pending in waiting), default=None)
        if self._timer is None and oldest_s is not None:  # one timer is enough: its pump sets the next
            self._timer = asyncio.get_running_loop().call_at(oldest_s + PATIENCE_S, self._over)

    def _over(self) -> None:
        self._timer = None
        self._pump()

    def close(self) -> None:
        """Set no timer off any more."""
        if self._timer is not None:
            self._timer.cancel()
