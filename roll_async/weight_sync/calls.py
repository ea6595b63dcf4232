"""One call of several replicas at once: who failed, who was late, and how long the others wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar

from roll_async.weight_sync.errors import UpdateFailed
from roll_async.weight_sync.protocol import UpdatedReplica

_STRAGGLER_S = 30.0
_LIVENESS_INTERVAL_S = 1.0
"""How often a push checks that the replicas it waits for are alive."""

Replica = TypeVar("Replica", bound=UpdatedReplica)


class ReplicaCalls(Generic[Replica]):
    """The calls of one transfer, or of one swap, after the other; all of one have a deadline in common."""

    def __init__(self, alive: Callable[[], Collection[int]], timeout_s: float) -> None:
        """`alive`: identities of the replicas that are there now. `timeout_s`: of a transfer, and of a swap."""
        self._alive, self._timeout_s = alive, timeout_s
        self.limit = f"sync_timeout {timeout_s:g} s"
        self.deadline = 0.0
        self.late: set[int] = set()
        """Identities of replicas that missed the deadline since `begin`."""

    def begin(self) -> None:
        """A transfer or a swap begins."""
        self.late.clear()
        self.deadline = asyncio.get_running_loop().time() + self._timeout_s

    async def each(
        self, replicas: Sequence[Replica], failures: dict[str, str], call: Callable[[Replica], Awaitable[None]]
    ) -> None:
        """Call all replicas concurrently. One that is not done at the deadline has failed for this push, and the others
        get a new deadline. Once half of them are done, the rest have three times as long, at least `_STRAGGLER_S`, so
        that one hung load does not hold up the others for a whole `sync_timeout`; calls that failed say nothing about
        how long it takes. The wait for a replica ends when it is removed. Losses and failed updates go to `failures`,
        every other error is raised.
        """
        if not replicas:
            return
        loop = asyncio.get_running_loop()
        calls = {asyncio.ensure_future(call(r)): r for r in replicas}
        waiting, done = set(calls), set[asyncio.Task[None]]()
        began, deadline = loop.time(), self.deadline
        straggles_s: float | None = None
        try:
            while waiting and (left_s := deadline - loop.time()) > 0:
                ended, waiting = await asyncio.wait(
                    waiting, timeout=min(left_s, _LIVENESS_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
                )
                done |= ended
                held = sum(task.exception() is None for task in done)
                if straggles_s is None and len(replicas) > 1 and 2 * held >= len(calls):
                    straggles_s = max(_STRAGGLER_S, 3 * (loop.time() - began))
                    deadline = min(deadline, loop.time() + straggles_s)
                alive = self._alive()
                lost = {task for task in waiting if id(calls[task]) not in alive}
                waiting -= lost
                failures.update({calls[task].name: "lost during the push" for task in lost})
        finally:
            for task in calls:
                task.cancel()
        for task in waiting:
            cut = straggles_s is not None and deadline < self.deadline
            limit = f"{straggles_s:g} s after half of the replicas were" if cut else self.limit
            failures[calls[task].name] = f"not done within {limit}"
            self.late.add(id(calls[task]))
        if waiting:
            self.deadline = loop.time() + self._timeout_s
        for task in done:
            error = task.exception()
            # A replica that was lost is tried again, too, until its owner has noticed it.
            if isinstance(error, (UpdateFailed, ConnectionError, TimeoutError)):
                failures[calls[task].name] = f"{type(error).__name__}: {error}"
            elif error is not None:
                raise error
