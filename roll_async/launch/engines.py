"""Starts, restarts and ends the engine replicas of a run: those of the config, and those that join later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import ProcessPlacement
from roll_async.cluster.roles.engine_group import EngineSpec, RayEngineClient, replica_name
from roll_async.config.schema import PipelineConfig, roles_on_engine_devices
from roll_async.inference.settings import EngineSettings


class ReplicaStarter:
    """`rollout/dispatch/engine_supervisor.py: Starter`. What it started is closed when the stack closes."""

    def __init__(
        self, config: PipelineConfig, placements: Sequence[ProcessPlacement], pool: NodePool, stack: AsyncExitStack
    ) -> None:
        """`pool`: of the run; its devices stay reserved for the replicas of the config while those are gone."""
        self._config, self._pool = config, pool
        stack.push_async_callback(self._close)  # before the first start: one that fails leaves others to be closed
        self._of_config = list(placements)
        self._num_training = len(placements) - config.num_validation_replicas  # those of the validation are the last
        self._places = {replica_name(p.index): (p, pool) for p in placements}
        self._clients: dict[str, RayEngineClient] = {}
        self.one_host: str | None = None
        """The only host that weights reach; None = they reach every node."""

    async def start_all(self) -> list[RayEngineClient]:
        """The replicas of the config."""
        return await asyncio.gather(*(self.start(name, 0) for name in self._places))

    def refuse(self, num_replicas: int) -> None:
        """Raises ValueError for a number of replicas that this run will never have."""
        if num_replicas < 1:
            raise ValueError(f"--replicas {num_replicas}: a run needs at least 1")
        if roles := roles_on_engine_devices(self._config):
            raise ValueError(
                f"{', '.join(roles)} and actor_infer share devices: the number of replicas is fixed; give them "
                "separate devices in device_mapping"
            )
        if (more := num_replicas - self._num_training) > 0:
            self._pool.refuse_more(more, self._of_config[0])

    def name(self, index: int) -> str:
        """Of the replica of this number; the last ones of the config may belong to the validation."""
        own = self._config.num_validation_replicas
        return replica_name(index if index < self._num_training else index + own)

    async def reserve(self, name: str) -> None:
        """Devices like those of a replica of the config, on as many nodes, wherever Ray has them or its autoscaler
        starts them.
        """
        if name in self._places:
            return
        first, index = self._of_config[0], int(name.rpartition("-")[2])
        own, *further = [
            # Ids within a pool of its own: they need not differ from those of the run's.
            replace(part, index=index, node=node, gpu_ids=tuple(range(len(part.gpu_ids))), further=())
            for node, part in enumerate(first.parts)
        ]
        place = replace(own, further=tuple(further))
        pool = NodePool([place], joins=True)
        await pool.reserve(None)
        self._places[name] = place, pool

    async def start(self, name: str, number: int) -> RayEngineClient:
        """A new process; what is left of the one before goes first. Raises ValueError where weights do not reach."""
        (place, pool), role, after = self._places[name], self._config.actor_infer, ()
        if (before := self._clients.get(name)) is not None:
            before.kill()  # it may hang and hold its devices, though it counts as lost
            after = before.processes
        spec = EngineSpec(
            strategy=role.strategy_args.strategy_name,
            settings=EngineSettings.of(self._config, replica=place.index, restart=number),
            env={**self._config.system_envs, **role.system_envs},
            rpc_timeout_s=self._config.fault.rpc_timeout,
            after=after,
        )
        client = await RayEngineClient.start(spec, place, pool, number)
        if self.one_host is not None and client.hosts != (self.one_host,):
            client.kill()
            raise ValueError(
                f"{name} is on host {', '.join(client.hosts)}, and the weights travel in memory of {self.one_host}; "
                "start the run with weight_sync.transport: gloo"
            )
        self._clients[name] = client
        return client

    async def stop(self, name: str) -> None:
        """End its process; devices beyond those of the config go back to Ray."""
        if (client := self._clients.get(name)) is not None:
            await client.close()
        place, pool = self._places.get(name, (None, self._pool))
        if pool is not self._pool:
            pool.release()
            del self._places[name]  # it is reserved anew, maybe elsewhere, if it is asked for again
            self._clients.pop(name, None)

    async def _close(self) -> None:
        """All replicas, those that were started late too: nobody uses them any more."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        for _, pool in self._places.values():
            if pool is not self._pool:
                pool.release()
