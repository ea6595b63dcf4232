"""This process among the ranks of its role: joining and leaving the process groups."""

from __future__ import annotations

import gc
import os
import resource
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from roll_async.trainer.megatron.micro_batches import ContextShare
from roll_async.trainer.megatron.settings import ParallelSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """This process among the ranks of its role."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    device: str
    """cpu (gloo) or cuda (nccl)."""
    timeout_s: float = 600.0
    listener: socket.socket | None = None
    """Of rank 0: its server at that address, from before the others were told. None: it begins to listen in `join`."""

    @classmethod
    def alone(cls, device: str = "cpu") -> RankSpec:
        """The only rank of a role; the system picks the port, so that two such processes never meet at one."""
        return cls(rank=0, world_size=1, master_addr="127.0.0.1", master_port=0, device=device)


def join(spec: RankSpec, parallel: ParallelSizes, seed: int) -> None:
    """Join the process group and form Megatron's groups. Blocks until all ranks are there."""
    # Kernels of communication and computation must start in the order they were enqueued in: Megatron overlaps them by
    # it. CUDA reads this when its context is made, below.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if spec.device == "cpu":
        # torch would take every core in each of the ranks that share them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(0)  # CUDA_VISIBLE_DEVICES shows this process its own device only
    dist.init_process_group(
        "gloo" if spec.device == "cpu" else "nccl",
        store=_store(spec),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=False,  # nothing of ours gathers on the host
    )
    # After the groups: it reads this rank's place in them.
    model_parallel_cuda_manual_seed(seed)


def _store(spec: RankSpec) -> dist.TCPStore:
    """Where the ranks find each other. Torch's own would listen on every interface of the machine."""
    address, timeout = (spec.master_addr, spec.master_port), timedelta(seconds=spec.timeout_s)
    if spec.rank:
        return dist.TCPStore(*address, spec.world_size, False, timeout)
    family = socket.AF_INET6 if ":" in spec.master_addr else socket.AF_INET
    server = spec.listener or socket.create_server(address, family=family, backlog=spec.world_size)
    # Port 0 has become a real one here.
    host, port = server.getsockname()[:2]
    # detach: Python would close the socket with its object, and the store listens on it.
    return dist.TCPStore(host, port, spec.world_size, True, timeout, master_listen_fd=server.detach())


def leave() -> None:
    """Take the groups of this process down; another layout may be joined afterwards.

    A group ends with its last reference, and models, optimizers and Megatron's modules hold references in cycles. Each
    gloo group that lingers keeps threads that wake a hundred times a second: after fifty layouts, thousands of them.
    """
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()


def tensor_group() -> dist.ProcessGroup:
    """The ranks that hold the parts of the same dense layers."""
    return _joined(parallel_state.get_tensor_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    """The ranks that hold the parts of the same experts."""
    return _joined(parallel_state.get_expert_tensor_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """The ranks that hold different experts of the same layers."""
    return _joined(parallel_state.get_expert_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks that hold the stages of one replica."""
    return _joined(parallel_state.get_pipeline_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    """The ranks that share the positions of a row."""
    return _joined(parallel_state.get_context_parallel_group())


def _joined(group: object) -> dist.ProcessGroup:
    """Megatron's variables begin as None and have no type."""
    assert isinstance(group, dist.ProcessGroup), "no process groups: `join` comes first"
    return group


def context_share() -> ContextShare:
    """This rank among those that share the positions of a row."""
    return ContextShare(
        rank=parallel_state.get_context_parallel_rank(), size=parallel_state.get_context_parallel_world_size()
    )


def data_parallel_place() -> tuple[int, int]:
    """(data-parallel rank, their number). Tensor, pipeline and context ranks of the same one compute the same rows."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def is_reporting_rank() -> bool:
    """Whether this rank returns the results of its rows: of all ranks that hold the same rows, one does."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )


def peak_bytes(device: torch.device) -> float:
    """Most memory that this process has had at one time: of its device what torch allocated, on a CPU all that was
    resident.
    """
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # Linux counts it in KiB.
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def is_export_rank(parallel: ParallelSizes) -> bool:
    """Whether this rank belongs to the replica whose weights are gathered: together they hold every parameter once.
    With experts spread further than tensors, a replica of the experts spans several of the dense parameters.
    """
    dense, experts = parallel.tensor, parallel.expert * parallel.expert_tensor
    if max(dense, experts) % min(dense, experts):
        return True  # the replicas of the two do not nest: all ranks gather
    if experts > dense:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


@dataclass(frozen=True, slots=True)
class HolderKind:
    """Parameters that the same ranks hold."""

    expert: bool
    sharded: bool
    """Split by tensor parallelism; otherwise every tensor-parallel rank holds the same, too."""


def holders(kind: HolderKind) -> tuple[int, int]:
    """(this rank among the ranks that hold the same values of such parameters, their number)."""
    if kind.expert:
        number, count = (
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
        )
        group = expert_tensor_group()
    else:
        number = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        count = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        group = tensor_group()
    if kind.sharded:
        return number, count
    return number * group.size() + group.rank(), count * group.size()


def rng_tracker() -> CudaRNGStatesTracker:
    """Megatron's generator, which the ranks of a tensor-parallel group seed apart."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "made by its first use"
    return tracker


def random_state() -> dict[str, object]:
    """Every generator of this rank."""
    state: dict[str, object] = {"cpu": torch.get_rng_state(), "tracker": rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
