"""Host memory to host memory over TCP, for engines on other hosts than the trainer."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from roll_async.weight_sync.pairs import PairReader, PairWriter

_HOST = torch.device("cpu")


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[return-value]


def writer() -> PairWriter:
    """Serves from host memory."""
    return PairWriter(_group, _HOST)


def reader() -> PairReader:
    """Pulls into host memory."""
    return PairReader(_group, _HOST)
