"""The nodes and GPUs of a run, reserved in Ray before any process starts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import ray
from ray._private.state import state as cluster_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import StallError
from roll_async.cluster.placement import GrantedNode, ProcessPlacement, gpu_nodes, process_env, shortage

logger = logging.getLogger(__name__)

_GPU_SHARE = 0.001
"""Ray accounts GPUs per process. Roles may share a device, so each process requests a small share, and
CUDA_VISIBLE_DEVICES names its devices.
"""
_POLL_S = 0.2
_SAY_EVERY_S = 10.0


class NodePool:
    """Placement group with one bundle per GPU node of the device mappings, each on a machine of its own; CPU roles are
    placed on any node. Pickled after `reserve`, it can be used in other processes of the run.
    """

    def __init__(self, placements: Sequence[ProcessPlacement]) -> None:
        self._needs = gpu_nodes(placements)
        self._num_cpu_processes = sum(1 for p in placements if not p.gpu_ids)
        self._bundle_of = {need.node: i for i, need in enumerate(self._needs)}
        self._granted: dict[int, GrantedNode] = {}
        self._group: PlacementGroup | None = None

    async def reserve(self, timeout_s: float) -> None:
        """Wait until the nodes are reserved. Raises ValueError at once for nodes that this cluster never has. Nodes
        that are in use, or that an autoscaler may start, are waited for, with log lines; StallError after `timeout_s`.
        """
        self._refuse_impossible()
        if not self._needs:
            return
        bundles = [{"GPU": float(len(n.gpu_ids)), "CPU": float(n.num_processes)} for n in self._needs]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        try:
            await self._wait_created(self._group, timeout_s)
            views = [self._view(self._group, i, b["GPU"]) for i, b in enumerate(bundles)]
            granted = await within(timeout_s, asyncio.gather(*views), "nodes: no process started on one of them")
        except BaseException:  # also when cancelled: the nodes must not stay reserved
            self.release()
            raise
        for need, (address, visible, num_cores) in zip(self._needs, granted, strict=True):
            node = self._granted[need.node] = need.granted(address, visible, num_cores)
            logger.info("node %d is %s: GPUs %s", need.node, address, dict(node.devices))

    def release(self) -> None:
        """Release the nodes."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _refuse_impossible(self) -> None:
        """Raises ValueError for nodes that neither this cluster nor its autoscaler has."""
        most = cluster_state.get_max_resources_from_cluster_config() or {}
        there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = sum(resources.get("CPU", 0) for resources in there)
        if self._num_cpu_processes > max(cpus, most.get("CPU", 0)):
            raise ValueError(
                f"the roles on CPU are {self._num_cpu_processes} processes, and Ray has {cpus:.0f} CPUs; lower their "
                "world_size or add nodes"
            )
        problem = shortage(self._needs, [int(resources.get("GPU", 0)) for resources in there])
        if problem is None:
            return
        if most.get("GPU", 0) >= sum(len(need.gpu_ids) for need in self._needs):
            logger.warning("%s: waiting for the autoscaler (at most %d GPUs)", problem, most["GPU"])
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES={visible} here)" if visible is not None else ""
        raise ValueError(
            f"{problem}{seen}; change device_mapping or num_gpus_per_node, or start Ray on more nodes and set "
            "RAY_ADDRESS"
        )

    async def _wait_created(self, group: PlacementGroup, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        began = said = loop.time()
        while placement_group_table(group)["state"] != "CREATED":
            waited_s = loop.time() - began
            wanted = " + ".join(str(len(need.gpu_ids)) for need in self._needs)
            free = ray.available_resources().get("GPU", 0)
            line = f"nodes with {wanted} GPUs are not free yet: {free:g} GPUs are"
            if waited_s > timeout_s:
                raise StallError(f"{line}, after {waited_s:.0f} s (fault.stall_timeout)")
            if loop.time() - said >= _SAY_EVERY_S:
                said = loop.time()
                logger.warning("%s; waiting for %.0f s of %.0f s (fault.stall_timeout)", line, waited_s, timeout_s)
            await asyncio.sleep(_POLL_S)

    def _view(self, group: PlacementGroup, bundle: int, num_gpus: float) -> asyncio.Future[tuple[str, list[str], int]]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": strategy}
        return asyncio.wrap_future(_inspect.options(**options).remote().future())  # type: ignore[attr-defined]

    def options(self, placement: ProcessPlacement, env: dict[str, str]) -> dict[str, object]:
        """Ray actor options of one process."""
        granted = self._granted[placement.node] if placement.gpu_ids else None
        env_vars = {**process_env(placement, granted), **env}
        options: dict[str, object] = {"num_cpus": 1, "runtime_env": {"env_vars": env_vars}}
        if granted is not None:
            assert self._group is not None
            options["num_gpus"] = _GPU_SHARE * len(placement.gpu_ids)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._bundle_of[placement.node]
            )
        return options


@ray.remote
def _inspect() -> tuple[str, list[str], int]:
    """(address, GPUs that Ray gave to this task, cores it may use) of a node."""
    visible = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ray.util.get_node_ip_address(), list(visible), len(os.sched_getaffinity(0))
