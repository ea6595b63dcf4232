"""Which replica a request goes to: requests that share a key stay on one replica while that has room, later turns of a
conversation wait for the replica whose cache has their prefix; not for ever. All others go by free capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from roll_async.rollout.dispatch.load_index import ReplicaChoice
from roll_async.rollout.dispatch.replica_link import ReplicaLink
from roll_async.rollout.dispatch.requests import PendingRequest

PATIENCE_S = 30.0
"""Age from which a later turn goes to any replica with room. To read a long prefix again takes seconds; older than this
it may wait behind answers of any length.
"""


class StickyRouting:
    """Where the limit of a replica is strict, later turns wait here for room; else they go to their replica at once and
    wait in the engine.
    """

    def __init__(
        self, choice: ReplicaChoice, links: Mapping[str, ReplicaLink], pump: Callable[[], None], *, strict: bool
    ) -> None:
        """`links`: the live replicas. `pump` dispatches what waits."""
        self._choice, self._links, self._pump, self._strict = choice, links, pump, strict
        self._timer: asyncio.TimerHandle | None = None

    def avoided(self, pending: PendingRequest) -> Collection[str]:
        """Live replicas that failed this request: it goes to another one while there is one."""
        if not pending.failed_on:
            return ()
        return {link.name for link in pending.failed_on if self._links.get(link.name) is link}

    def sticky_replica(self, pending: PendingRequest) -> ReplicaLink | None:
        """The replica that a later turn goes to now, also when that is full and its limit is not strict."""
        assert pending.conversation is not None
        home = self._choice.home(pending.conversation, self.avoided(pending))
        return None if home is None or (self._strict and not self._choice.has_room(home)) else self._links[home]

    def choose(self, pending: PendingRequest, *, patient: bool) -> ReplicaLink | None:
        """The replica for the request; None: not yet. `patient`: a later turn may wait for its own one."""
        # One whose caller is gone would give a home to keys that are forgotten already.
        if pending.result.done() or (patient and self.waits(pending)):
            return None
        by_conversation = pending.validation and pending.later_turn
        key = pending.conversation if by_conversation else pending.affinity
        name = self._choice.choose(key, self.avoided(pending))
        if name is None:  # those with room have failed it
            return None
        if pending.conversation is not None:
            self._choice.settle(pending.conversation, name)
        return self._links[name]

    def waits(self, pending: PendingRequest) -> bool:
        """Only its own replica is to be used, which has no room."""
        if not (self._strict and pending.later_turn) or pending.conversation is None:
            return False
        young = asyncio.get_running_loop().time() < pending.asked_s + PATIENCE_S
        return young and self._choice.home(pending.conversation, self.avoided(pending)) is not None

    def end_in_time(self, passed: Iterable[PendingRequest]) -> None:
        """Dispatch again when the first of these need not wait for its own replica any more."""
        oldest_s = min((pending.asked_s for pending in passed if self.waits(pending)), default=None)
        if self._timer is None and oldest_s is not None:  # one timer is enough: its pump sets the next
            self._timer = asyncio.get_running_loop().call_at(oldest_s + PATIENCE_S, self._over)

    def _over(self) -> None:
        self._timer = None
        self._pump()

    def close(self) -> None:
        """Set no timer off any more."""
        if self._timer is not None:
            self._timer.cancel()
