"""Device mappings to processes: which node, which GPUs, how many threads.

`device_mapping` null: `world_size` CPU processes. Else device id d is GPU d % num_gpus_per_node of node d //
num_gpus_per_node.
A process of a training role owns one device; a replica of an engine owns tensor * pipeline devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_GPU_SHARE = 0.01
"""Ray accounts GPUs per process; roles may share a device, so each takes a sliver and CUDA_VISIBLE_DEVICES says which.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlacement:
    """One role process."""

    index: int
    """Rank of a training role, number of an engine replica."""
    node: int
    gpu_ids: tuple[int, ...]
    """Ids on its node; empty on CPU."""
    num_threads: int

    @property
    def device(self) -> str:
        """torch device type."""
        return "cuda" if self.gpu_ids else "cpu"

    @property
    def env(self) -> dict[str, str]:
        """Environment that pins the process to its devices and threads, set before any library is imported."""
        threads = {"OMP_NUM_THREADS": str(self.num_threads), "MKL_NUM_THREADS": str(self.num_threads)}
        if not self.gpu_ids:
            return {**threads, "CUDA_VISIBLE_DEVICES": ""}
        visible = ",".join(str(i) for i in self.gpu_ids)
        return {**threads, "CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def place(
    device_mapping: Sequence[int] | None, *, num_processes: int, num_gpus_per_node: int, num_threads: int
) -> tuple[ProcessPlacement, ...]:
    """Split the devices of a role evenly over its processes, in order.

    Example: devices 8..11, 2 processes, 8 per node -> process 0 on node 1 GPUs (0, 1), process 1 on node 1 GPUs (2, 3).
    Raises ValueError when a process would span two nodes: its devices share no NVLink and one process can not see both.
    """
    if device_mapping is None:
        return tuple(
            ProcessPlacement(index=i, node=0, gpu_ids=(), num_threads=num_threads) for i in range(num_processes)
        )
    per_process = len(device_mapping) // num_processes
    placements = []
    for index in range(num_processes):
        devices = device_mapping[index * per_process : (index + 1) * per_process]
        nodes = {d // num_gpus_per_node for d in devices}
        if len(nodes) != 1:
            raise ValueError(
                f"devices {list(devices)} of process {index} lie on nodes {sorted(nodes)} "
                f"(num_gpus_per_node={num_gpus_per_node}); "
                "order device_mapping so that the devices of one process share a node"
            )
        local = tuple(d % num_gpus_per_node for d in devices)
        placements.append(ProcessPlacement(index=index, node=nodes.pop(), gpu_ids=local, num_threads=num_threads))
    return tuple(placements)


def threads_per_process(num_cpu_processes: int) -> int:
    """Thread budget of a CPU process: the cores shared evenly, at least one."""
    return max(1, (os.cpu_count() or 1) // max(1, num_cpu_processes))


class NodePool:
    """Placement group with one bundle per GPU node the run uses; CPU roles go anywhere."""

    def __init__(self, placements: Sequence[ProcessPlacement], *, num_gpus_per_node: int, timeout_s: float) -> None:
        gpu_nodes = sorted({p.node for p in placements if p.gpu_ids})
        self._bundle_of = {node: i for i, node in enumerate(gpu_nodes)}
        self._group: PlacementGroup | None = None
        if not gpu_nodes:
            return
        bundles = []
        for node in gpu_nodes:
            used = {g for p in placements if p.node == node for g in p.gpu_ids}
            bundles.append({"GPU": len(used), "CPU": sum(1 for p in placements if p.node == node)})
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        if not self._group.wait(timeout_s):
            raise ValueError(
                f"device_mapping needs {len(bundles)} node(s) with {[b['GPU'] for b in bundles]} GPUs, and Ray has "
                f"{ray.cluster_resources().get('GPU', 0):.0f} GPUs on {len(ray.nodes())} node(s); "
                "shrink device_mapping or add nodes"
            )

    def options(self, placement: ProcessPlacement, env: dict[str, str]) -> dict[str, object]:
        """Ray actor options of one process."""
        options: dict[str, object] = {"num_cpus": 1, "runtime_env": {"env_vars": {**placement.env, **env}}}
        if placement.gpu_ids:
            assert self._group is not None
            options["num_gpus"] = _GPU_SHARE * len(placement.gpu_ids)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._bundle_of[placement.node]
            )
        return options
