"""Engine replicas as Ray actors, and their client for the scheduler and the synchronizer.

EnginePool -- RayEngineClient.submit / collect --> EngineReplica (EngineHost over one Engine)
ParameterSynchronizer -- RayEngineClient.begin_update ... commit -->      "

A replica that spans nodes has an EngineReplica on each of them: on the first one it runs the engine, on the others the
ranks that follow it.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import ray
from ray.actor import ActorHandle

from roll_async.cluster.folders import require_model
from roll_async.cluster.gc_policy import defer_gc_during_startup
from roll_async.cluster.network import held_port, use_node_address
from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.ray_channel import RayChannel, wait_ended
from roll_async.cluster.remote import CallRules, Proxy, remote, served
from roll_async.cluster.role_log import open_role_log
from roll_async.inference.processes import ProcessId, process_ids, until_gone
from roll_async.inference.protocol import EngineCapabilities, EngineMemory, EngineReport
from roll_async.inference.settings import EngineSettings, NodeSpan
from roll_async.observe.trace import starting
from roll_async.rollout.protocol import Replica, RequestTraffic
from roll_async.weight_sync.protocol import TakesWeights

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


class EngineStart(Protocol):
    """Calls that start a replica, or what a node holds of it."""

    async def node_address(self) -> str: ...

    async def hold_port(self, host: str) -> int: ...

    async def imports(self, after: Sequence[ProcessId], span: NodeSpan | None) -> None: ...

    async def start(self) -> tuple[EngineCapabilities, tuple[ProcessId, ...]]: ...

    async def follow(self, after: Sequence[ProcessId], span: NodeSpan) -> tuple[ProcessId, ...]: ...

    async def wait_ended(self) -> None: ...


class EngineCalls(Replica, Protocol):
    """Calls of a replica that runs."""

    async def sleep(self, level: int) -> EngineMemory: ...

    async def wake(self, tags: Sequence[str]) -> EngineMemory: ...

    async def memory(self) -> EngineMemory: ...


# Ray would restart an actor without its model; the supervisor starts replicas again itself.
@ray.remote(max_restarts=0)
@served({"_host": RequestTraffic, "_engine": TakesWeights})
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

    async def imports(self, after: Sequence[ProcessId], span: NodeSpan | None) -> None:
        """Import the library once the processes of `after` have ended and freed their memory."""
        await self._prepare(after, span)
        with defer_gc_during_startup():
            # Imported here: the modules of a library are most of what a collection would go over.
            from roll_async.inference.backends import create_engine

            self._engine = create_engine(self._strategy, self._settings)
            self._engine.import_library()

    async def start(self) -> tuple[EngineCapabilities, tuple[ProcessId, ...]]:
        """Load the model. Returns also the processes of this replica on this node."""
        from roll_async.inference.backends import create_engine, started
        from roll_async.inference.engine_host import EngineHost

        with defer_gc_during_startup():
            self._engine = await started(self._engine, partial(create_engine, self._strategy, self._settings))
        self._host = EngineHost(self._engine)
        return self._engine.capabilities, process_ids()

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
            os.nice(_CPU_NICENESS)  # before the library's threads and processes, which inherit it

    async def wait_ended(self) -> None:
        """Return when a rank that follows on this node has ended."""
        await asyncio.to_thread(self._follower.wait)

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

    async def score(self, rows: Sequence[Sequence[int]]) -> list[array]:
        return list(await asyncio.gather(*(self._engine.score(row) for row in rows)))

    async def close(self) -> None:
        await self._engine.close()


def replica_name(index: int) -> str:
    """Name of a replica in logs, errors and metrics; it stays the same after a restart."""
    return f"actor_infer-{index}"


class RayEngineClient(Proxy, EngineCalls):
    """A replica seen from the driver. Implements `rollout/protocol.py: Replica`."""

    capabilities: EngineCapabilities

    def __init__(self, name: str, actors: Sequence[ActorHandle], hosts: Sequence[str], *, rpc_timeout_s: float) -> None:
        self._actor, *self._followers = actors
        rules = CallRules(
            role=name,
            deadline_s=rpc_timeout_s,
            waits={EngineCalls.collect},  # its deadline is the manager's (generation_timeout)
            own=(Exception,),  # the manager says which of them are the loss of a replica
            late=ConnectionError,  # a replica that does not answer in time is treated as dead
        )
        super().__init__(RayChannel(self._actor), rules)
        self.name, self.hosts = name, tuple(hosts)
        self.processes: tuple[tuple[ProcessId, ...], ...] = ()
        """By node, the actor's process and those of its engine."""
        self._broken: asyncio.Future[None] | None = None
        """Ends when a node after the first has lost a rank."""

    @classmethod
    async def start(
        cls, spec: EngineSpec, placement: ProcessPlacement, pool: NodePool, number: int = 0
    ) -> RayEngineClient:
        """Start the process and load the model. `number`: earlier starts of this replica. Raises ValueError for what
        the user can fix, StallError when it is not up in time, RoleFailed for what a library says.
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
            nodes = [_start_of(name, actor, spec.rpc_timeout_s) for actor in actors]
            with starting(name, "process"):
                hosts = await asyncio.gather(*(node.node_address() for node in nodes))
            client = cls(name, actors, hosts, rpc_timeout_s=spec.rpc_timeout_s)
            await client._load(spec.after)
        except BaseException:  # also when cancelled: the processes must not be left
            for actor in actors:
                ray.kill(actor)
            raise
        return client

    async def _load(self, after: Sequence[Sequence[ProcessId]]) -> None:
        """Load the model, on all nodes at the same time."""
        limit_s, gone = self._rules.deadline_s, after or [()] * len(self.hosts)
        first = _start_of(self.name, self._actor, limit_s)
        if not self._followers:
            self.capabilities, processes = await self._start(first, gone[0], None)
            self.processes = (processes,)
            return
        host = self.hosts[0]
        port = await first.hold_port(host)
        spans = [
            NodeSpan(num_nodes=len(self.hosts), node_rank=rank, master_addr=host, master_port=port)
            for rank in range(len(self.hosts))
        ]
        others = [
            _start_of(f"{self.name} on {host}", actor, limit_s)
            for actor, host in zip(self._followers, self.hosts[1:], strict=True)
        ]
        follow = (node.follow(gone[rank], spans[rank]) for rank, node in enumerate(others, 1))
        # Together: in their start the ranks of all nodes wait for each other.
        own_start = self._start(first, gone[0], spans[0])
        (self.capabilities, own), theirs = await asyncio.gather(own_start, asyncio.gather(*follow))
        self.processes = (own, *theirs)
        self._broken = asyncio.ensure_future(self._watch(others))

    async def _start(
        self, first: EngineStart, after: Sequence[ProcessId], span: NodeSpan | None
    ) -> tuple[EngineCapabilities, tuple[ProcessId, ...]]:
        with starting(self.name, "imports"):
            await first.imports(after, span)
        with starting(self.name, "load"):
            return await first.start()

    async def _watch(self, others: Sequence[EngineStart]) -> None:
        """Raises ConnectionError when a follower node has lost a rank: the others would hang in collectives."""

        async def watch(node: EngineStart, host: str) -> None:
            await node.wait_ended()
            raise ConnectionError(f"{self.name}: a rank on {host} has ended")

        await asyncio.gather(*(watch(*part) for part in zip(others, self.hosts[1:], strict=True)))

    async def collect(self) -> EngineReport:
        """Waits for a report, or for the end of a rank on another node."""
        collecting = asyncio.ensure_future(self._call("collect"))
        try:
            if self._broken is not None:
                await asyncio.wait((collecting, self._broken), return_when=asyncio.FIRST_COMPLETED)
                if not (collecting.done() or self._broken.cancelled()):  # a report that came first is not lost
                    await self._broken
            return await collecting
        finally:
            collecting.cancel()

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


def _start_of(role: str, actor: ActorHandle, deadline_s: float | None) -> EngineStart:
    rules = CallRules(
        role=role,
        deadline_s=deadline_s,
        waits={EngineStart.wait_ended},
        starts={
            EngineStart.node_address,
            EngineStart.hold_port,
            EngineStart.imports,
            EngineStart.start,
            EngineStart.follow,
        },
    )
    return remote(EngineStart, RayChannel(actor), rules)
