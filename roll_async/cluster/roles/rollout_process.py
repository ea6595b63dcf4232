"""The driver's end of the rollout process: the channel under the clients of `rollout/remote_side.py`.

    driver: TrainLoop -- QueueClient, RollouterClient, SynchronizerClient --> RolloutHost --> engines, reward host
               |                                                                 |
               +-------------------------- MegatronRank 0..n-1 <--weights--------+

Work in the driver's loop cannot delay the dispatch of requests. The process runs on the driver's node, because the
ledger is a file there and both use one clock. It owns the engines: when it dies they die, and the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_async.buffer.errors import Defect, EndOfData, LedgerError, StallError, TooManyFailures
from roll_async.cluster.ray_channel import RayChannel, wait_ended
from roll_async.cluster.remote import CallRules, remote
from roll_async.cluster.roles.rollout_host import HostStart, RolloutHost, StartRoles
from roll_async.observe.trace import started_beside, starting
from roll_async.rollout.filters.filter_budget import GeneratedTooMany
from roll_async.rollout.remote_side import ROLE, WAITS, Counters, RolloutCalls, RolloutClient, RpcChannel
from roll_async.weight_sync.protocol import SyncFailed

logger = logging.getLogger(__name__)

_OWN_ERRORS = (EndOfData, LedgerError, StallError, TooManyFailures, GeneratedTooMany, SyncFailed, Defect)
"""Errors of the roles inside that callers handle; others are raised as RoleFailed."""
_LOOK_EVERY_S = 1.0
_SLOW_S = 10.0
"""An answer that takes longer is logged."""
_INNER_S = 30.0
"""Added to the deadline of the start, so that the roles inside, whose errors say more, time out first."""


class _HostLink(RpcChannel):
    """Calls to the host."""

    def __init__(self, host: ActorHandle, *, silence_s: float, rpc_timeout_s: float) -> None:
        super().__init__()
        self.host, self._silence_s, self.rpc_timeout_s = host, silence_s, rpc_timeout_s
        self._ray = RayChannel(host, ends_cancelled=True)
        rules = CallRules(role=ROLE, deadline_s=rpc_timeout_s, waits=WAITS, own=_OWN_ERRORS)
        self.calls = remote(RolloutCalls, self, rules)

    def update(self, counters: Counters) -> None:
        for line in counters.warnings:
            print(line, file=sys.stderr, flush=True)
        super().update(counters)

    async def invoke(self, method: str, *args: object) -> Any:
        """`remote.py: Channel`."""
        answer, counters = await self._ray.invoke("answer", method, *args)
        self.update(counters)
        return answer

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            look = asyncio.ensure_future(self.calls.look())
            try:
                await self._wait_for(look)
                await look
            finally:
                look.cancel()

    async def _wait_for(self, look: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while not look.done():
            left_s = asked + self._silence_s - loop.time()
            if left_s <= 0:
                raise StallError(f"{ROLE}: no answer for {self._silence_s:g} s")
            await asyncio.wait({look}, timeout=min(_SLOW_S, left_s))
            if not look.done():
                logger.warning("%s: no answer for %.0f s", ROLE, loop.time() - asked)

    def close_queue(self) -> None:
        self.host.close_queue.remote()


class RolloutProcess:
    """One RolloutHost."""

    devices = None
    """Its engines share none with training roles."""

    def __init__(self, link: _HostLink) -> None:
        self._link = link

    @classmethod
    async def start(
        cls,
        start: StartRoles,
        *,
        log_files: Sequence[str],
        silence_s: float,
        rpc_timeout_s: float,
        env: Mapping[str, str],
    ) -> RolloutProcess:
        """Start the process, and in it engines and rewards. `silence_s`: how long it may give no answer before the run
        ends; `rpc_timeout_s`: how long the answer to one call may take.

        Raises ValueError for what the user can fix, RoleFailed for what a role reports, StallError when it does not
        come up in time.
        """
        # Not soft: on another node the ledger's file would be another one.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        env = {**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        options = {"scheduling_strategy": here, "runtime_env": {"env_vars": env}}
        actor = RolloutHost.options(**options, name="rollout")  # pyright: ignore[reportAttributeAccessIssue]  # see there
        host = actor.remote(start, list(log_files))
        try:
            with starting("rollout", "start"):
                started_beside(await _start_of(host, rpc_timeout_s + _INNER_S).start())
        except BaseException:  # also when cancelled: the process must not be left
            ray.kill(host)
            raise
        return cls(_HostLink(host, silence_s=silence_s, rpc_timeout_s=rpc_timeout_s))

    async def build(self, *run: object) -> RolloutClient:
        """Build queue, rollouter and synchronizer in the process. Raises ValueError where `run`, which
        `launch/rollout.py: StartedRollout.build` takes there, can not be pickled.
        """
        link = self._link
        try:
            validates, counters = await _start_of(link.host, link.rpc_timeout_s).build(*run)
        except TypeError as error:  # of its pickling here; one that is raised there is the cause of another
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"rollouter class and tools run in the {ROLE} and must be picklable: {why}") from error
        link.update(counters)
        return RolloutClient(link, validates=validates)

    async def close(self) -> None:
        """End engines and rewards, then the process."""
        await wait_ended([self._link.host.close.remote()], timeout_s=30)
        ray.kill(self._link.host)


def _start_of(host: ActorHandle, deadline_s: float) -> HostStart:
    starts = {HostStart.start, HostStart.build}
    return remote(
        HostStart, RayChannel(host), CallRules(role=ROLE, deadline_s=deadline_s, starts=starts, own=_OWN_ERRORS)
    )
