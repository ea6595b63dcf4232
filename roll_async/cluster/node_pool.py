"""The nodes and GPUs of a run, reserved in Ray before any process starts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state as cluster_state
from ray.autoscaler._private.util import format_readonly_node_type
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_async.buffer.deadline import within
from roll_async.buffer.errors import RoleFailed, StallError
from roll_async.cluster.placement import GrantedNode, NodeNeed, ProcessPlacement, gpu_nodes, process_env, shortage
from roll_async.cluster.ray_channel import last_line

logger = logging.getLogger(__name__)

_GPU_SHARE = 0.001
"""Ray accounts GPUs per process. Roles may share a device, so each process requests a small share, and
CUDA_VISIBLE_DEVICES names its devices.
"""
_POLL_S = 0.2
_SAY_EVERY_S = 10.0
_JOIN_S = 300.0
"""So long a process on granted devices may take to start, where nothing else says so."""


class NodePool:
    """Placement group with one bundle per GPU node of the device mappings, each on a machine of its own; CPU roles are
    placed on any node. Pickled after `reserve`, it can be used in other processes of the run.
    """

    def __init__(self, placements: Sequence[ProcessPlacement], *, joins: bool = False) -> None:
        """`joins`: of one process that joins the run later, on CPU in a bundle of its own, too."""
        self._needs = gpu_nodes(placements)
        self._own_core = joins and not self._needs
        self._num_cpu_processes = sum(1 for p in placements if not p.gpu_ids)
        self._bundle_of = {need.node: i for i, need in enumerate(self._needs)}
        self._granted: dict[int, GrantedNode] = {}
        self._machines: dict[int, str] = {}
        """Ray's id of the machine of each node."""
        self._settling = asyncio.Lock()
        self._group: PlacementGroup | None = None

    async def reserve(self, timeout_s: float | None) -> None:
        """Wait until the nodes are reserved. Raises ValueError at once for nodes that this cluster never has. Nodes
        that are in use, or that an autoscaler may start, are waited for, with log lines; StallError after `timeout_s`.
        None: without a limit, and without the refusal, which is `refuse_more`.
        """
        if timeout_s is not None:
            self._refuse_impossible()
        bundles = [{"GPU": float(len(n.gpu_ids)), "CPU": float(n.num_processes)} for n in self._needs]
        if self._own_core:
            bundles = [{"CPU": 1.0}]
        if not bundles:
            return
        self._group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        try:
            await self._wait_created(self._group, timeout_s)
            if self._own_core:
                return
            views = [self._view(self._group, i, b["GPU"]) for i, b in enumerate(bundles)]
            granted = await within(
                timeout_s or _JOIN_S, asyncio.gather(*views), "nodes: no process started on one of them"
            )
        except BaseException:  # also when cancelled: the nodes must not stay reserved
            self.release()
            raise
        machines = _machines(self._group)
        for need, view in zip(self._needs, granted, strict=True):
            self._grant(need, view, machines[self._bundle_of[need.node]])

    async def settle(self, placement: ProcessPlacement) -> None:
        """Before a process is started again: Ray puts the node of one that died with its machine on another machine, as
        soon as there is one. Waits for it without a limit, with log lines.
        """
        if self._group is None or not placement.gpu_ids:
            return
        async with self._settling:
            await self._wait_created(self._group, None)
            machines, nodes = _machines(self._group), {part.node for part in placement.parts}
            for need in self._needs:
                bundle = self._bundle_of[need.node]
                if need.node in nodes and self._machines[need.node] != machines[bundle]:
                    # Whatever ran on the machine before is gone, so all GPUs of the bundle are free for a look.
                    view = await self._view(self._group, bundle, float(len(need.gpu_ids)))
                    self._grant(need, view, machines[bundle])

    def _grant(self, need: NodeNeed, view: tuple[str, list[str], int], machine: str) -> None:
        node = self._granted[need.node] = need.granted(*view)
        self._machines[need.node] = machine
        logger.info("node %d is %s: GPUs %s", need.node, node.address, dict(node.devices))

    def release(self) -> None:
        """Release the nodes."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def refuse_more(self, num_processes: int, like: ProcessPlacement) -> None:
        """Raises ValueError when so many processes beyond those of the run will never find a place."""
        most, there = _resources()
        kind, each = ("GPU", sum(len(part.gpu_ids) for part in like.parts)) if like.gpu_ids else ("CPU", 1)
        used = sum(len(need.gpu_ids) for need in self._needs) if like.gpu_ids else self._num_cpu_processes
        # What there is, or what an autoscaler may bring it to.
        have = max(sum(resources.get(kind, 0) for resources in there), most.get(kind, 0))
        if used + num_processes * each > have:
            raise ValueError(
                f"the run has {used} {kind}s, {num_processes} replicas more need {num_processes * each}, and Ray has "
                f"{have:.0f} {kind}s"
            )

    def _refuse_impossible(self) -> None:
        """Raises ValueError for nodes that neither this cluster nor its autoscaler has."""
        most, there = _resources()
        cpus = sum(resources.get("CPU", 0) for resources in there)
        if self._num_cpu_processes > cpus:
            problem = f"the roles on CPU are {self._num_cpu_processes} processes, and Ray has {cpus:.0f} CPUs"
            if self._num_cpu_processes > most.get("CPU", 0):
                raise ValueError(f"{problem}; lower their world_size or add nodes")
            _say_waiting(problem, most["CPU"], "CPUs")
        problem = shortage(self._needs, [int(resources.get("GPU", 0)) for resources in there])
        if problem is None:
            return
        if most.get("GPU", 0) >= sum(len(need.gpu_ids) for need in self._needs):
            _say_waiting(problem, most["GPU"], "GPUs")
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES={visible} here)" if visible is not None else ""
        raise ValueError(
            f"{problem}{seen}; change device_mapping or num_gpus_per_node, or start Ray on more nodes and set "
            "RAY_ADDRESS"
        )

    async def _wait_created(self, group: PlacementGroup, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        began = said = loop.time()
        kind, every_s = "GPU" if self._needs else "CPU", _SAY_EVERY_S
        while placement_group_table(group)["state"] != "CREATED":
            waited_s = loop.time() - began
            wanted = " + ".join(str(len(need.gpu_ids)) for need in self._needs) or "1"
            free = ray.available_resources().get(kind, 0)
            line = f"nodes with {wanted} {kind}s are not free yet: {free:g} {kind}s are"
            if timeout_s is not None and waited_s > timeout_s:
                raise StallError(f"{line}, after {waited_s:.0f} s (fault.stall_timeout)")
            if loop.time() - said >= every_s:
                said = loop.time()
                if timeout_s is None:
                    every_s *= 2  # there is no limit here, so the lines become rarer
                    logger.warning("%s; a replica that joins waits for them since %.0f s", line, waited_s)
                else:
                    logger.warning("%s; waiting for %.0f s of %.0f s (fault.stall_timeout)", line, waited_s, timeout_s)
            await asyncio.sleep(_POLL_S)

    async def _view(self, group: PlacementGroup, bundle: int, num_gpus: float) -> tuple[str, list[str], int]:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        # All GPUs of the bundle at once: Ray tells a task its own ones only.
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_retries": 0, "scheduling_strategy": strategy}
        view = _inspect.options(**options).remote().future()  # type: ignore[attr-defined]
        try:
            return await asyncio.wrap_future(view)
        except RayError as error:  # of a task: its node is gone again, or what it called there raised
            raise RoleFailed(f"nodes: look at the GPUs: {last_line(error)}") from error

    def options(self, placement: ProcessPlacement, env: dict[str, str]) -> dict[str, object]:
        """Ray actor options of one process."""
        granted = self._granted[placement.node] if placement.gpu_ids else None
        env_vars = {**process_env(placement, granted), **env}
        options: dict[str, object] = {"num_cpus": 1, "runtime_env": {"env_vars": env_vars}}
        if granted is not None:
            options["num_gpus"] = _GPU_SHARE * len(placement.gpu_ids)  # the bundle has the GPUs, process_env says which
        if granted is not None or self._own_core:
            assert self._group is not None
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=0 if granted is None else self._bundle_of[placement.node],
            )
        return options


def _machines(group: PlacementGroup) -> Mapping[int, str]:
    """Ray's id of the machine of every bundle."""
    return placement_group_table(group)["bundles_to_node_id"]


def _say_waiting(problem: str, most: float, kind: str) -> None:
    limit = "" if most == math.inf else f" (at most {most:.0f} {kind})"
    logger.warning("%s: waiting for the autoscaler%s", problem, limit)


def _resources() -> tuple[Mapping[str, float], list[dict[str, float]]]:
    """(the most that an autoscaler may bring it to, what each node has)."""
    most = cluster_state.get_max_resources_from_cluster_config()
    if most is None:  # Ray's open builds do not tell
        most = {"CPU": math.inf, "GPU": math.inf} if _grows() else {}
    return most, [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _grows() -> bool:
    """Whether an autoscaler starts machines of this cluster. Without one Ray reports nodes of types that it invents."""
    if is_autoscaler_v2(fetch_from_server=True):
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        types = {node.node_id or "": node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)}
        return any(name not in ("", format_readonly_node_type(node)) for node, name in types.items())
    report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("autoscaler_report") or {}
    return any(not name.startswith(format_readonly_node_type("")) for name in report.get("active_nodes", ()))


@ray.remote
def _inspect() -> tuple[str, list[str], int]:
    """(address, GPUs that Ray gave to this task, cores it may use) of a node."""
    visible = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    # Affinity: in a container the machine's cores are not all this process's.
    return ray.util.get_node_ip_address(), list(visible), len(os.sched_getaffinity(0))
