"""Replicas of a pool on their way: started again or anew, held until a push has given them weights.

pool.lost --> supervisor: start, pause --> hold --> push --> rejoin --> pool.add | reject --> lost once more
claimed for a validation: pause ----------> hold --> push --> rejoin --> pool.resume
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.protocol import Replica

if TYPE_CHECKING:
    from roll_async.rollout.dispatch.engine_pool import EnginePool

logger = logging.getLogger(__name__)


class ReturningReplicas:
    """`weight_sync/protocol.py: ReplicaPool`, the side of a pool that a weight push sees."""

    def __init__(self, pool: EnginePool, options: ManagerOptions) -> None:
        self._pool, self._options = pool, options
        self._returns: Callable[[str, str], bool] = lambda name, reason: False
        self.expected: dict[str, bool] = {}
        """Replicas that are being started, or held; whether they were there before."""
        self.holding: dict[str, Replica] = {}
        """Replicas that are up and paused until a push has given them weights: started ones, and claimed ones."""
        self._held: asyncio.Event | None = None
        """Set for the weight push when one is held; None = nobody gives weights."""

    @property
    def clients(self) -> Sequence[Replica]:
        """Replicas alive that are in the pool."""
        return self._pool.clients

    @property
    def expects_return(self) -> bool:
        """Whether a lost or new replica is being started."""
        return bool(self.expected)

    def attach(self, held: asyncio.Event) -> None:
        """From now on replicas are given weights, and so can be started; `held` is set when one waits for them."""
        self._held = held

    @property
    def gives_weights(self) -> bool:
        """Whether a replica that is started gets weights."""
        return self._held is not None

    def hold(self, client: Replica) -> None:
        """This replica, up and paused, gets weights with the next push or `resync_returned`; then `rejoin` or `reject`
        is called.
        """
        assert self._held is not None, "attach() first"
        self.holding[client.name] = client
        self._held.set()

    async def rejoin(self, client: Replica) -> None:
        """A held replica has the weights: it runs and gets requests. One that does not resume is lost once more."""
        if any(client is mine for mine in self._pool.clients):  # claimed for a validation, and alive
            del self.holding[client.name]
            try:
                await self._pool.resume()
            except ConnectionError as error:
                logger.error("%s holds the weights and does not resume: %s", client.name, error)
            return
        timeout_s, reason = self._options.interrupt_timeout_s, ""
        try:
            async with asyncio.timeout(timeout_s):
                await client.resume()
        except TimeoutError:
            reason = f"did not resume within {timeout_s:g} s"
        except ConnectionError as error:
            reason = f"did not resume: {error}"
        if self.holding.get(client.name) is not client:  # it left meanwhile
            return
        if reason:
            await self.reject(client, reason)
        else:
            del self.holding[client.name]
            await self._pool.add(client)

    async def reject(self, client: Replica, reason: str) -> None:
        """A replica, held or serving, did not get the weights: it is lost."""
        name = client.name
        if self.holding.get(name, client) is not client:  # a restarted one has its name
            return
        self.holding.pop(name, None)
        if (link := next((link for link in self._pool.links if link.name == name), None)) is not None:
            self._pool.lost(link, reason)
        elif not self.lost(name, reason):  # without a link, whose loss would tell of it
            self.give_up(name, reason)

    def supervise(self, returns: Callable[[str, str], bool]) -> None:
        """`returns(name, reason)` is called when a replica is lost. True: `hold` is called when it is restarted, or
        `give_up` when that fails. Until then requests wait for it if no other replica is alive.
        """
        self._returns = returns

    def lost(self, name: str, reason: str) -> bool:
        """A replica is lost. True: it is started again."""
        self.holding.pop(name, None)  # what is held under this name is the lost process
        if returns := self._returns(name, reason):
            self.expected[name] = True
        return returns

    def expect(self, name: str) -> None:
        """A new replica is being started: requests wait for it if no other one is there."""
        self.expected.setdefault(name, False)

    def give_up(self, name: str, reason: str) -> None:
        """A lost or new replica will not be started any more."""
        self.expected.pop(name, None)
        self._pool.end_without_engines(name, reason)

    def arrived(self, name: str) -> bool:
        """A replica is in the pool. True: it was there before."""
        return self.expected.pop(name, True)
