"""Within one GPU that trainer and engine share: the receiver maps the sender's device memory, nothing crosses a bus."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot
from roll_async.weight_sync.packing import PlannedBucket, pack, unpack

_NUM_BUFFERS = 2
_DEVICE_ARGUMENT = 6
"""Position of the device index in what `reduce_tensor` returns for a CUDA tensor."""


class IpcWriter:
    """Two device buffers in turn. `location`: base64 of the pickled memory handle."""

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * _NUM_BUFFERS

    def write(self, index: int, planned: PlannedBucket, num_bytes: int) -> tuple[str, Tensor]:
        slot = index % _NUM_BUFFERS
        data = self._buffers[slot]
        if data is None or len(data) < num_bytes:
            data = self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        pack(planned, data)
        torch.cuda.synchronize()  # the receiver reads without our stream's knowledge
        _, arguments = reduce_tensor(data)
        return base64.b64encode(pickle.dumps(arguments)).decode(), data

    def close(self) -> None:
        self._buffers = [None] * _NUM_BUFFERS


class IpcReader:
    """Views of the sender's device memory, valid until the bucket after next is written."""

    def read(self, bucket: Bucket) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
        arguments = list(pickle.loads(base64.b64decode(bucket.location)))
        # Each process numbers the devices it may see from 0, so the sender's number means nothing here.
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        yield from unpack(bucket, rebuild_cuda_tensor(*arguments))
        torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing to do: the mapping goes with the last view."""
