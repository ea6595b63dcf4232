"""Transport from device memory to device memory, for engines on other GPUs than the trainer's (NCCL refuses two ranks
on one GPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from roll_async.weight_sync.bucket import UpdatePlan
from roll_async.weight_sync.transport.links import LinkReader, LinkWriter


class DeviceMedium:
    """`links.py: Medium` of this process's GPU.

    `wait()` of an NCCL operation does not block the thread, it makes the thread's current stream wait. Each transfer
    has a stream of its own, so the default stream, on which the trainer computes, never waits for another process.
    """

    keeps_memory = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def group(self, store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroup:
        # Not `new_group`: all ranks of the process's default group would have to take part.
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)  # type: ignore[return-value]

    @contextmanager
    def transfer_stream(self) -> Iterator[None]:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def writer() -> LinkWriter:
    """Serves from the memory of this process's GPU."""
    return LinkWriter(DeviceMedium())


def reader(plan: UpdatePlan, rank: int) -> LinkReader:
    """Pulls into the memory of this process's GPU."""
    return LinkReader(DeviceMedium(), plan, rank)
