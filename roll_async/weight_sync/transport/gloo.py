"""Transport from host memory to host memory over TCP, for engines on other hosts than the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from roll_async.weight_sync.bucket import UpdatePlan
from roll_async.weight_sync.transport.links import LinkReader, LinkWriter


class HostMedium:
    """`links.py: Medium` of host memory."""

    device = torch.device("cpu")
    keeps_memory = True

    def group(self, store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroup:
        # Not `new_group`: all ranks of the process's default group would have to take part.
        return dist.ProcessGroupGloo(store, rank, 2, timeout)  # type: ignore[return-value]

    @contextmanager
    def transfer_stream(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        """Nothing to do: host memory is written synchronously."""


def writer() -> LinkWriter:
    """Serves from host memory."""
    return LinkWriter(HostMedium())


def reader(plan: UpdatePlan, rank: int) -> LinkReader:
    """Pulls into host memory."""
    return LinkReader(HostMedium(), plan, rank)
