"""Engine replicas as Ray actors, and their client for the scheduler and the synchronizer.

AsyncLLMServerManager -- RayEngineClient.submit / collect --> EngineReplica (EngineHost over one Engine)
ParameterSynchronizer -- RayEngineClient.begin_update ... commit -->      "

A replica that spans nodes has an EngineReplica on each of them: on the first one it runs the engine, on the others the
ranks that follow it.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from roll_async.buffer.errors import StallError
from roll_async.cluster.errors import call, told, wait_ended
from roll_async.cluster.folders import require_model
from roll_async.cluster.garbage import start_without_collections
from roll_async.cluster.network import held_port, use_node_address
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.role_log import open_role_log
from roll_async.inference.processes import ProcessId, process_ids, until_gone
from roll_async.inference.protocol import EngineCapabilities, EngineLoad, EngineMemory, EngineReport, PauseMode
from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.schema import GenerateRequest, WeightVersion
from roll_async.weight_sync.bucket import Bucket, UpdatePlan

T = TypeVar("T")

_CONCURRENT_CALLS = 64
"""Concurrent calls on one replica: one collect, a few submits and aborts, never one per request."""

_GONE_WITHIN_S = 60.0

_CPU_NICENESS = 5
"""Niceness of engines on CPU: where trainer and engines share cores, the trainer comes first, because the engines
generate ahead and a step must not wait for them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """All that is needed to start a replica."""

    strategy: str
    """vllm, sglang or hf_infer."""
    settings: EngineSettings
    env: Mapping[str, str]
    rpc_timeout_s: float
    """Seconds of one call, the start included."""
    after: tuple[tuple[ProcessId, ...], ...] = ()
    """By node, processes of the lost replica that it replaces: it starts when they have ended."""


@ray.remote(max_restarts=0)
@told
class EngineReplica:
    """One replica, or what a node holds of it, in its own process, plain asyncio inside."""

    def __init__(self, strategy: str, settings: EngineSettings) -> None:
        open_role_log()
        self._strategy, self._settings, self._held = strategy, settings, ExitStack()

    async def node_address(self) -> str:
        return use_node_address()

    async def hold_port(self, host: str) -> int:
        """A port for the processes of the engine, which this one keeps for them as long as it lives."""
        return self._held.enter_context(held_port(host))

    async def start(
        self, after: Sequence[ProcessId], span: NodeSpan | None
    ) -> tuple[EngineCapabilities, tuple[ProcessId, ...]]:
        """Load the model once the processes of `after` have ended and freed their memory. Returns also the processes
        of this replica on this node.
        """
        await self._prepare(after, span)
        with start_without_collections():
            from roll_async.inference.backends import create_engine
            from roll_async.inference.engine_host import EngineHost

            engine = create_engine(self._strategy, self._settings)
            await engine.start()
        self._engine, self._host = engine, EngineHost(engine)
        return engine.capabilities, process_ids()

    async def follow(self, after: Sequence[ProcessId], span: NodeSpan) -> tuple[ProcessId, ...]:
        """`start` on a node after the first: the ranks here join those of the engine, which starts meanwhile."""
        await self._prepare(after, span)
        from roll_async.inference.backends import create_follower

        self._follower = create_follower(self._strategy, self._settings)
        await asyncio.to_thread(self._follower.start)
        return process_ids()

    async def _prepare(self, after: Sequence[ProcessId], span: NodeSpan | None) -> None:
        await until_gone(after, _GONE_WITHIN_S)
        require_model(self._settings.model_folder)
        self._settings = replace(self._settings, span=span)
        if self._settings.device == "cpu":
            os.nice(_CPU_NICENESS)

    async def wait_ended(self) -> None:
        """Return when a rank that follows on this node has ended."""
        await asyncio.to_thread(self._follower.wait)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._host.submit(requests)

    async def collect(self) -> EngineReport:
        return await self._host.collect()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._host.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._host.pause(mode)

    async def resume(self) -> None:
        await self._host.resume()

    async def sleep(self, level: int) -> EngineMemory:
        """Returns the memory that it still holds."""
        await self._engine.sleep(level)
        memory = self._engine.memory()
        if level == 1 and self._settings.device == "cpu":  # the weights are in host memory already
            memory = replace(memory, weights_bytes=0, host_weights_bytes=memory.weights_bytes)
        return memory

    async def wake(self, tags: Sequence[str]) -> EngineMemory:
        """Returns the memory that it then holds."""
        await self._engine.wake(tags)
        return self._engine.memory()

    async def memory(self) -> EngineMemory:
        return self._engine.memory()

    async def load(self) -> EngineLoad:
        return await self._host.load()

    async def begin_update(self, plan: UpdatePlan) -> None:
        await self._engine.begin_update(plan)

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._engine.load_bucket(bucket)

    async def finish_update(self) -> str:
        return await self._engine.finish_update()

    async def commit(self, version: WeightVersion) -> None:
        await self._engine.commit(version)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        return list(await asyncio.gather(*(self._engine.score(row) for row in rows)))

    async def close(self) -> None:
        await self._engine.close()


def replica_name(index: int) -> str:
    """Name of a replica in logs, errors and metrics; it stays the same after a restart."""
    return f"actor_infer-{index}"


class RayEngineClient:
    """A replica seen from the driver. Implements `rollout/protocol.py: Replica`."""

    capabilities: EngineCapabilities

    def __init__(self, name: str, actors: Sequence[ActorHandle], hosts: Sequence[str], *, rpc_timeout_s: float) -> None:
        self.name, self.hosts = name, tuple(hosts)
        self.processes: tuple[tuple[ProcessId, ...], ...] = ()
        """By node, the actor's process and those of its engine."""
        self._actor, *self._followers = actors
        self._rpc_timeout_s = rpc_timeout_s
        self._broken: asyncio.Future[None] | None = None
        """Ends when a node after the first has lost a rank."""

    @classmethod
    async def start(
        cls, spec: EngineSpec, placement: ProcessPlacement, pool: NodePool, number: int = 0
    ) -> RayEngineClient:
        """Start the process and load the model. `number`: earlier starts of this replica. Raises ValueError for what
        the user can fix, StallError when it is not up in time.
        """
        name = replica_name(placement.index)
        unique = f"{name}.{number}" if number else name  # Ray may still have the dead actor under its name
        settings = replace(spec.settings, device=placement.device)
        if number:
            await pool.settle(placement)
        actors = []
        try:
            for node, part in enumerate(placement.parts):
                options = pool.options(part, dict(spec.env))
                named = EngineReplica.options(
                    **options, name=f"{unique}-node{node}" if node else unique, max_concurrency=_CONCURRENT_CALLS
                )
                actors.append(named.remote(spec.strategy, settings))
                assert isinstance(actors[-1], ActorHandle)  # Ray says "or the class itself", for the sake of editors
            limit_s = spec.rpc_timeout_s
            asked = (call(name, "node_address", actor.node_address.remote(), timeout_s=limit_s) for actor in actors)
            client = cls(name, actors, await asyncio.gather(*asked), rpc_timeout_s=limit_s)
            await client._load(spec.after)
        except BaseException:  # also when cancelled: the processes must not be left
            for actor in actors:
                ray.kill(actor)
            raise
        return client

    async def _load(self, after: Sequence[Sequence[ProcessId]]) -> None:
        """Load the model, on all nodes at the same time."""
        gone = after or [()] * len(self.hosts)
        if not self._followers:
            self.capabilities, processes = await self._ask_start(self._actor.start.remote(gone[0], None))
            self.processes = (processes,)
            return
        host = self.hosts[0]
        port = await self._ask_start(self._actor.hold_port.remote(host))
        spans = [
            NodeSpan(num_nodes=len(self.hosts), node_rank=rank, master_addr=host, master_port=port)
            for rank in range(len(self.hosts))
        ]
        (self.capabilities, own), *theirs = await asyncio.gather(
            self._ask_start(self._actor.start.remote(gone[0], spans[0])),
            *(
                self._ask_start(actor.follow.remote(gone[rank], spans[rank]), rank)
                for rank, actor in enumerate(self._followers, 1)
            ),
        )
        self.processes = (own, *theirs)
        self._broken = asyncio.ensure_future(self._watch_followers())

    async def _ask_start(self, ref: Awaitable[T], node: int = 0) -> T:
        name = f"{self.name} on {self.hosts[node]}" if node else self.name
        return await call(name, "start", ref, timeout_s=self._rpc_timeout_s)

    async def _watch_followers(self) -> None:
        """Raises ConnectionError when a node after the first has lost a rank, by which the others would wait for it."""

        async def watch(actor: ActorHandle, host: str) -> None:
            await call(f"{self.name} on {host}", "wait_ended", actor.wait_ended.remote(), timeout_s=None)
            raise ConnectionError(f"{self.name}: a rank on {host} has ended")

        watches = (watch(*part) for part in zip(self._followers, self.hosts[1:], strict=True))
        await asyncio.gather(*watches)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._ask("submit", self._actor.submit.remote(list(requests)))

    async def collect(self) -> EngineReport:
        """Waits for a report, without a deadline of its own: that is the manager's (generation_timeout)."""
        collecting = asyncio.ensure_future(call(self.name, "collect", self._actor.collect.remote(), timeout_s=None))
        try:
            if self._broken is not None:
                await asyncio.wait((collecting, self._broken), return_when=asyncio.FIRST_COMPLETED)
                if not (collecting.done() or self._broken.cancelled()):
                    await self._broken
            return await collecting
        finally:
            collecting.cancel()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._ask("abort", self._actor.abort.remote(list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        await self._ask("pause", self._actor.pause.remote(mode))

    async def resume(self) -> None:
        await self._ask("resume", self._actor.resume.remote())

    async def sleep(self, level: int) -> EngineMemory:
        """See `Engine.sleep`. Returns what the replica still holds."""
        return await self._ask("sleep", self._actor.sleep.remote(level))

    async def wake(self, tags: Sequence[str]) -> EngineMemory:
        """See `Engine.wake`. Returns what the replica then holds."""
        return await self._ask("wake", self._actor.wake.remote(list(tags)))

    async def memory(self) -> EngineMemory:
        return await self._ask("memory", self._actor.memory.remote())

    async def load(self) -> EngineLoad:
        return await self._ask("load", self._actor.load.remote())

    async def begin_update(self, plan: UpdatePlan) -> None:
        await self._ask("begin_update", self._actor.begin_update.remote(plan))

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._ask("load_bucket", self._actor.load_bucket.remote(bucket))

    async def finish_update(self) -> str:
        return await self._ask("finish_update", self._actor.finish_update.remote())

    async def commit(self, version: WeightVersion) -> None:
        await self._ask("commit", self._actor.commit.remote(version))

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        return await self._ask("score", self._actor.score.remote(rows))

    async def _ask(self, what: str, ref: Awaitable[T]) -> T:
        """A replica that does not answer in time is treated as dead: ConnectionError."""
        try:
            return await call(self.name, what, ref, timeout_s=self._rpc_timeout_s)
        except StallError as error:
            raise ConnectionError(str(error)) from error

    async def close(self) -> None:
        """End the engine's own child processes, then the actor, with which they end in any case."""
        self._stop_watching()
        if not self._followers:  # vLLM's core would wait for its ranks, and they for those of other nodes
            await wait_ended([self._actor.close.remote()], timeout_s=10)
        self.kill()

    def kill(self) -> None:
        """End the actors, dead or alive."""
        self._stop_watching()
        for actor in (self._actor, *self._followers):
            ray.kill(actor)

    def _stop_watching(self) -> None:
        if self._broken is not None:
            self._broken.cancel()
