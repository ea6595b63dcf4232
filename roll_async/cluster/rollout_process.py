"""The driver's end of the rollout process: one client per role in it, with the methods of the role.

    driver: TrainLoop -- QueueClient, RollouterClient, SynchronizerClient --> RolloutHost --> engines, reward host
               |                                                                 |
               +-------------------------- MegatronRank 0..n-1 <--weights--------+

Work in the driver's loop cannot delay the dispatch of requests. The process runs on the driver's node, because the
ledger is a file there and both use one clock. It owns the engines: when it dies they die, and the run ends.

Counters of the clients are those of the last answer; every answer contains them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_async.buffer.errors import EndOfData, LedgerError, StallError, TooManyFailures
from roll_async.buffer.freshness import BatchFreshness
from roll_async.buffer.states import QueueStats
from roll_async.cluster.errors import call, wait_ended
from roll_async.cluster.rollout_host import Counters, RolloutHost, StartRoles
from roll_async.rollout.filter_budget import GeneratedTooMany
from roll_async.rollout.rollouter import RollouterStats
from roll_async.schema import Group, WeightVersion
from roll_async.weight_sync.synchronizer import SyncFailed, SyncReport, SyncStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROLE = "rollout process"
_OWN_ERRORS = (EndOfData, LedgerError, StallError, TooManyFailures, GeneratedTooMany, SyncFailed)
"""Errors of the roles inside that callers handle; others are raised as RoleFailed."""
_LOOK_EVERY_S = 1.0
_CANCEL_WITHIN_S = 5.0
"""How long a cancelled call may take to end."""
_SLOW_S = 10.0
"""An answer that takes longer is logged."""
_INNER_S = 30.0
"""Added to the deadline of the start, so that the roles inside, whose errors say more, time out first."""


class _Link:
    """Calls to the host, and its counters as of the last answer."""

    def __init__(self, host: ActorHandle, *, silence_s: float, rpc_timeout_s: float) -> None:
        self.host, self._silence_s, self._rpc_timeout_s = host, silence_s, rpc_timeout_s
        self._counters: Counters | None = None
        self.returned = asyncio.Event()
        """Set while a restarted engine waits for weights."""

    @property
    def counters(self) -> Counters:
        assert self._counters is not None, "couple first"
        return self._counters

    def update(self, counters: Counters) -> None:
        """Store the counters, unless a later answer has arrived before this one."""
        for line in counters.warnings:
            print(line, file=sys.stderr, flush=True)
        if self._counters is not None and counters.taken_s < self._counters.taken_s:
            return
        self._counters = counters
        if counters.returning:
            self.returned.set()
        else:
            self.returned.clear()

    async def ask(self, what: str, ref: Awaitable[T]) -> T:
        """The answer to a call; raises what the role inside raised. Cancelling the wait cancels the call. Raises
        StallError when the answer does not come in time (fault.rpc_timeout).
        """
        return await self._answer(what, ref, self._rpc_timeout_s)

    async def wait(self, what: str, ref: Awaitable[T]) -> T:
        """As `ask`, for calls without a fixed duration: the rollouter's run, the next batch, a push, a validation.
        Their waits have owners and deadlines in the process; `watch` detects a process that does not answer.
        """
        return await self._answer(what, ref, None)

    async def _answer(self, what: str, ref: Awaitable[T], timeout_s: float | None) -> T:
        try:
            return await call(ROLE, what, ref, timeout_s=timeout_s, own=_OWN_ERRORS)
        except asyncio.CancelledError:
            assert isinstance(ref, ray.ObjectRef)
            ray.cancel(ref)
            await wait_ended([ref], _CANCEL_WITHIN_S)  # otherwise the next call may run before this one is cancelled
            raise

    async def watch(self) -> None:
        """Poll the counters. Raises StallError when the process does not answer, ConnectionError when it dies."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            look = asyncio.ensure_future(self.wait("counters", self.host.counters.remote()))
            try:
                await self._wait_for(look)
                self.update(await look)
            finally:
                look.cancel()

    async def _wait_for(self, look: asyncio.Future[Counters]) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while not look.done():
            left_s = asked + self._silence_s - loop.time()
            if left_s <= 0:
                raise StallError(f"{ROLE}: no answer for {self._silence_s:g} s")
            await asyncio.wait({look}, timeout=min(_SLOW_S, left_s))
            if not look.done():
                logger.warning("%s: no answer for %.0f s", ROLE, loop.time() - asked)


class QueueClient:
    """`pipelines/protocol.py: Batches`, and what a checkpoint needs of the queue."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._position: dict[str, object] = {}

    async def take_batch(self, step: int, num_groups: int | None = None) -> list[Group]:
        groups, counters, self._position = await self._link.wait(
            "take_batch", self._link.host.take_batch.remote(step, num_groups)
        )
        self._link.update(counters)
        return groups

    async def freshness(self, step: int) -> BatchFreshness:
        return await self._link.ask("freshness", self._link.host.freshness.remote(step))

    async def step_trained(self, step: int) -> None:
        self._link.update(await self._link.ask("step_trained", self._link.host.step_trained.remote(step)))

    async def checkpoint_state(self, step: int) -> dict[str, object]:
        """The position that the process reports. If it has died, that of the moment when `step` took its last groups:
        groups that finished since then are generated again.
        """
        try:
            return await self._link.ask("checkpoint_state", self._link.host.checkpoint_state.remote(step))
        except (RuntimeError, OSError) as error:
            if self._position.get("step") != step:
                raise
            logger.warning("step %d is saved without the %s: %s", step, ROLE, error)
            return self._position

    async def checkpointed(self, step: int) -> None:
        await self._link.ask("checkpointed", self._link.host.checkpointed.remote(step))

    def stats(self) -> QueueStats:
        return self._link.counters.queue

    def close(self) -> None:
        """Called at the end of a run; does not wait for the answer."""
        self._link.host.close_queue.remote()


class RollouterClient:
    """`pipelines/protocol.py: Generates`."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def run(self) -> None:
        """Run the rollouter to its end, or to the end of its process."""
        running = asyncio.ensure_future(self._link.wait("run", self._link.host.run.remote()))
        looking = asyncio.ensure_future(self._link.watch())
        try:
            await asyncio.wait({running, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                looking.result()
            self._link.update(await running)
        finally:
            running.cancel()
            looking.cancel()

    async def pause(self) -> None:
        await self._link.ask("pause", self._link.host.pause.remote())

    async def resume(self) -> None:
        await self._link.ask("resume", self._link.host.resume.remote())

    async def stop(self) -> None:
        self._link.update(await self._link.ask("stop", self._link.host.stop.remote()))

    def stats(self) -> RollouterStats:
        return self._link.counters.rollouter


class SynchronizerClient:
    """`pipelines/protocol.py: Pushes`."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def push(self, version: WeightVersion) -> SyncReport:
        report, counters = await self._link.wait("push", self._link.host.push.remote(version))
        self._link.update(counters)
        return report

    async def wait_for_returned(self) -> None:
        await self._link.returned.wait()

    async def resync_returned(self, version: WeightVersion) -> None:
        self._link.update(
            await self._link.wait("re-sync of restarted replicas", self._link.host.resync_returned.remote(version))
        )

    def status(self) -> SyncStatus:
        return self._link.counters.sync


class ValidateClient:
    """`pipelines/protocol.py: Validates`."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    async def prepare(self, step: int) -> bool:
        prepared, counters = await self._link.wait(
            "prepare_validation", self._link.host.prepare_validation.remote(step)
        )
        self._link.update(counters)
        return prepared

    async def __call__(self, step: int) -> Mapping[str, float]:
        metrics, counters = await self._link.wait("validate", self._link.host.validate.remote(step))
        self._link.update(counters)
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSide:
    """Clients of the coupled roles, for the driver."""

    queue: QueueClient
    rollouter: RollouterClient
    synchronizer: SynchronizerClient
    validate: ValidateClient | None
    turns: None = None
    """Roles on shared devices are refused before this process starts."""


class RolloutProcess:
    """One RolloutHost."""

    def __init__(self, link: _Link) -> None:
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
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        env = {**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        options = {"scheduling_strategy": here, "runtime_env": {"env_vars": env}}
        remote = RolloutHost.options(**options, name="rollout")  # pyright: ignore[reportAttributeAccessIssue]  # see there
        host = remote.remote(start, list(log_files))
        try:
            await call(ROLE, "start", host.start.remote(), timeout_s=rpc_timeout_s + _INNER_S, own=_OWN_ERRORS)
        except BaseException:  # also when cancelled: the process must not be left
            ray.kill(host)
            raise
        return cls(_Link(host, silence_s=silence_s, rpc_timeout_s=rpc_timeout_s))

    async def couple(self, spec: object) -> RemoteSide:
        """Build queue, rollouter and synchronizer in the process. Raises ValueError for an unpicklable spec."""
        link = self._link
        try:
            coupling = link.host.couple.remote(spec)
        except TypeError as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"rollouter class and tools run in the {ROLE} and must be picklable: {why}") from error
        validates, counters = await link.ask("couple", coupling)
        link.update(counters)
        return RemoteSide(
            queue=QueueClient(link),
            rollouter=RollouterClient(link),
            synchronizer=SynchronizerClient(link),
            validate=ValidateClient(link) if validates else None,
        )

    async def close(self) -> None:
        """End engines and rewards, then the process."""
        await wait_ended([self._link.host.close.remote()], timeout_s=30)
        ray.kill(self._link.host)
