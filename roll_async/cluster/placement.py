"""Device mappings to processes: which node, which GPUs, how many threads. Nothing here touches Ray or a device.

`device_mapping` null: `world_size` CPU processes. Otherwise device id d is GPU d % num_gpus_per_node of node d //
num_gpus_per_node. These are logical ids: the cluster decides which machine is node 0, and which of its GPUs are used
(`node_pool.py`).
A process of a training role owns one device; a replica of an engine owns tensor * pipeline devices, on one node or as
many on each of several.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roll_async.config.schema import PipelineConfig, RunConfig, WorkerConfig, reference_is_actor

_MOST_THREADS = 8
"""Threads of a process with a GPU: its computations on the host do not gain from more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlacement:
    """One role process."""

    index: int
    """Rank of a training role, number of an engine replica."""
    node: int
    gpu_ids: tuple[int, ...]
    """Ids on its node; empty on CPU."""
    num_threads: int
    pretended: bool = False
    """The GPUs exist in Ray's accounting only, and the process computes on the CPU. For tests of layouts."""
    further: tuple[ProcessPlacement, ...] = ()
    """Of an engine replica that spans nodes: a process on every node after the first, with as many GPUs."""

    @property
    def parts(self) -> tuple[ProcessPlacement, ...]:
        """One process for each node."""
        return (self, *self.further)

    @property
    def device(self) -> str:
        """torch device type."""
        return "cuda" if self.gpu_ids and not self.pretended else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedNode:
    """The machine and GPUs that the cluster gave for one node of the device mappings."""

    address: str
    devices: Mapping[int, str]
    """GPU id of the device mappings on this node -> value for CUDA_VISIBLE_DEVICES: an index or a UUID."""
    num_threads: int
    """Threads of each process there."""


_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
"""For glibc, of processes that compute on the CPU: the tensors of a step are as large as those of the one before, and
memory that goes back to the system in between is fetched and zeroed again, page by page. The first is glibc's maximum.
"""
_YIELD_CORES = {"GOMP_SPINCOUNT": "1000"}
"""For libgomp, of the same processes: turns that a thread waits for the others of its process before it sleeps. This is
its own count where it knows of more threads than cores, but it knows of its process alone. With its 300,000 a step of
two threads beside other work takes four times as long and four times the core-seconds (docs_roll/benchmarks.md).
"""


def process_env(placement: ProcessPlacement, granted: GrantedNode | None) -> dict[str, str]:
    """Environment that confines a process to its devices and threads, set before any library is imported."""
    if granted is None:
        threads, devices = placement.num_threads, {"CUDA_VISIBLE_DEVICES": "", **_KEEP_FREED_MEMORY, **_YIELD_CORES}
    else:
        visible = ",".join(granted.devices[gpu] for gpu in placement.gpu_ids)
        threads = granted.num_threads
        # NOSET: Ray would name devices anew by the shares it accounts, which roles on one device split.
        devices = {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **devices}


def pretended_gpus() -> int:
    """Number of GPUs that the embedded Ray is told to have (`ROLL_ASYNC_PRETENDED_GPUS`), so that layouts with devices
    run on a machine without: placement, visible devices and turns are real, processes compute on the CPU. 0 = the real
    GPUs are used.
    """
    return int(os.environ.get("ROLL_ASYNC_PRETENDED_GPUS", "0"))


def training_roles(config: RunConfig) -> dict[str, WorkerConfig]:
    """Roles with Megatron ranks of their own."""
    roles = {name: worker for name, worker in config.roles() if name != "actor_infer"}
    if isinstance(config, PipelineConfig) and reference_is_actor(config):
        roles.pop("reference")
    return roles


def place_roles(config: RunConfig) -> dict[str, tuple[ProcessPlacement, ...]]:
    """Device mappings to the processes of each role: of actor_train, reference, critic, teacher as configured, and last
    the engines, actor_infer. Raises ValueError for a mapping that spans nodes where it cannot.
    """
    roles = training_roles(config)
    cpu = sum(w.num_ranks for w in roles.values() if w.device_mapping is None)
    engines = config.actor_infer if isinstance(config, PipelineConfig) else None
    cpu += engines.num_servers if engines is not None and engines.device_mapping is None else 0
    threads = threads_per_process(cpu)  # of processes on CPU; those with a GPU have theirs from the granted node

    def put(worker: WorkerConfig, count: int) -> tuple[ProcessPlacement, ...]:
        return place(
            worker.device_mapping,
            num_processes=count,
            num_gpus_per_node=config.num_gpus_per_node,
            num_threads=threads,
            pretended=pretended_gpus() > 0,
        )

    training = {name: put(w, w.num_ranks) for name, w in roles.items()}
    return training if engines is None else {**training, "actor_infer": put(engines, engines.num_servers)}


def processes_of(config: RunConfig) -> list[ProcessPlacement]:
    """The processes of all roles."""
    return list(itertools.chain.from_iterable(place_roles(config).values()))


def place(
    device_mapping: Sequence[int] | None,
    *,
    num_processes: int,
    num_gpus_per_node: int,
    num_threads: int,
    pretended: bool = False,
) -> tuple[ProcessPlacement, ...]:
    """Split the devices of a role evenly over its processes, in order.

    Example: devices 8..11, 2 processes, 8 per node -> process 0 on node 1 GPUs (0, 1), process 1 on node 1 GPUs (2, 3).
    Raises ValueError when a process would not have as many devices on each of its nodes.
    """
    if device_mapping is None:
        return tuple(
            ProcessPlacement(index=i, node=0, gpu_ids=(), num_threads=num_threads) for i in range(num_processes)
        )
    per_process = len(device_mapping) // num_processes
    placements = []
    for index in range(num_processes):
        devices = device_mapping[index * per_process : (index + 1) * per_process]
        by_node = of_nodes(devices, num_gpus_per_node)
        if problem := uneven(by_node):
            raise ValueError(f"devices {list(devices)} of process {index} {problem}; order device_mapping by nodes")
        first, *further = [
            ProcessPlacement(index=index, node=node, gpu_ids=gpus, num_threads=num_threads, pretended=pretended)
            for node, gpus in by_node
        ]
        placements.append(replace(first, further=tuple(further)))
    return tuple(placements)


def of_nodes(devices: Sequence[int], num_gpus_per_node: int) -> list[tuple[int, tuple[int, ...]]]:
    """[(node, GPU ids on it)] of devices in their order."""
    runs = itertools.groupby(devices, key=lambda d: d // num_gpus_per_node)
    return [(node, tuple(d % num_gpus_per_node for d in run)) for node, run in runs]


def uneven(by_node: Sequence[tuple[int, tuple[int, ...]]]) -> str | None:
    """Why one replica cannot lie on these devices; None when it can."""
    nodes = [node for node, _ in by_node]
    if len(set(nodes)) == len(nodes) and len({len(gpus) for _, gpus in by_node}) == 1:
        return None
    places = ", ".join(f"{len(gpus)} on node {node}" for node, gpus in by_node)
    return f"lie {places}, and a replica that spans nodes needs as many on each, node by node"


def devices_of(placements: Sequence[ProcessPlacement], num_gpus_per_node: int) -> tuple[int, ...]:
    """Inverse of `place`: device ids of the mappings, process by process."""
    return tuple(part.node * num_gpus_per_node + gpu for p in placements for part in p.parts for gpu in part.gpu_ids)


def threads_per_process(num_cpu_processes: int) -> int:
    """Thread budget of a CPU process: the cores this process may use shared evenly, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_cpu_processes))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNeed:
    """One node of the device mappings."""

    node: int
    """Its number in the device mappings."""
    gpu_ids: tuple[int, ...]
    """GPU ids that any role uses, ascending."""
    num_processes: int

    def granted(self, address: str, visible: Sequence[str], num_cores: int) -> GrantedNode:
        """The k-th GPU in use is the k-th that the cluster gave. `visible`: indices or UUIDs; `num_cores`: cores that
        the processes of the run share there.
        """
        # As numbers, or 10 would come before 2; UUIDs keep the order that Ray has them in.
        in_order = sorted(visible, key=lambda name: (0, int(name)) if name.isdigit() else (1, 0))
        return GrantedNode(
            address=address,
            devices=dict(zip(self.gpu_ids, in_order, strict=True)),
            num_threads=max(1, min(_MOST_THREADS, num_cores // self.num_processes)),
        )


def gpu_nodes(placements: Sequence[ProcessPlacement]) -> tuple[NodeNeed, ...]:
    """The GPUs that the processes need, by node. Processes of several roles may share a GPU."""
    needs, parts = [], [part for p in placements for part in p.parts if part.gpu_ids]
    for node in sorted({part.node for part in parts}):
        there = [part for part in parts if part.node == node]
        gpus = tuple(sorted({gpu for p in there for gpu in p.gpu_ids}))
        needs.append(NodeNeed(node=node, gpu_ids=gpus, num_processes=len(there)))
    return tuple(needs)


def shortage(needs: Sequence[NodeNeed], num_gpus_there: Sequence[int]) -> str | None:
    """Why nodes with these numbers of GPUs cannot hold the device mappings even when idle; None when they can.

    Every node of the mappings is a machine of its own: the largest is placed on the largest.
    """
    wanted = sorted((len(need.gpu_ids) for need in needs), reverse=True)
    there = sorted((count for count in num_gpus_there if count), reverse=True)  # nodes without a GPU hold none of these
    if len(wanted) <= len(there) and all(w <= t for w, t in zip(wanted, there, strict=False)):
        return None
    return f"device_mapping needs {_nodes(wanted)}, and Ray has {_nodes(there)}"


def _nodes(gpus: Sequence[int]) -> str:
    """Example: 3 nodes with 4 + 4 + 2 GPUs."""
    if not gpus:
        return "no GPU"
    plural = "s" if len(gpus) > 1 else ""
    return f"{len(gpus)} node{plural} with {' + '.join(map(str, gpus))} GPU{'s' if gpus != [1] else ''}"
