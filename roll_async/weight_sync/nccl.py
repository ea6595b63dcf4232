"""Device memory to device memory, for engines on other GPUs than the trainer's (NCCL refuses two ranks on one)."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from roll_async.weight_sync.pairs import PairReader, PairWriter


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def writer() -> PairWriter:
    """Serves from the memory of this process's GPU."""
    return PairWriter(_group, _device())


def reader() -> PairReader:
    """Pulls into the memory of this process's GPU; one bucket at a time."""
    return PairReader(_group, _device())
