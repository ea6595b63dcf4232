"""Transport between roles that share GPUs: CUDA IPC where the receiver is on the sender's device, NCCL elsewhere.

In a colocated run the engine rank on a trainer rank's device keeps a part of what that holds, and engine ranks on other
devices keep the rest, so that both ways are needed.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roll_async.weight_sync.bucket import Block, TensorSlot, UpdatePlan
from roll_async.weight_sync.transfer import BlockReader, PlannedBlock, unpack
from roll_async.weight_sync.transport.links import LinkReader, LinkWriter
from roll_async.weight_sync.transport.nccl import DeviceMedium

_DEVICE_ARGUMENT = 6
"""Position of the device index in what `reduce_tensor` returns for a CUDA tensor."""


def device_name() -> str:
    """An identifier of this process's GPU that is the same in every process, whatever device index it has there."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def handle_of(data: Tensor) -> str:
    """Base64 of the pickled memory handle of a CUDA tensor."""
    _, arguments = reduce_tensor(data)
    return base64.b64encode(pickle.dumps(arguments)).decode()


class DeviceWriter:
    """Fills a block once and publishes it both ways. `location`: JSON of device, memory handle and link."""

    def __init__(self, links: LinkWriter, *, device: str, handle: Callable[[Tensor], str]) -> None:
        self._links, self._device, self._handle = links, device, handle

    def write(self, index: int, planned: PlannedBlock, num_bytes: int) -> tuple[str, Tensor]:
        link, data = self._links.write(index, planned, num_bytes)
        return json.dumps({"device": self._device, "handle": self._handle(data), "link": link}), data

    def close(self) -> None:
        self._links.close()


class DeviceReader:
    """Reads each block the way its device allows."""

    def __init__(self, links: BlockReader, same_device: BlockReader, *, device: str) -> None:
        self._links, self._same_device, self._device = links, same_device, device

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        places = json.loads(block.location)
        if places["device"] == self._device:
            yield from self._same_device.read(replace(block, location=places["handle"]), rank)
        else:
            yield from self._links.read(replace(block, location=places["link"]), rank)

    def close(self) -> None:
        self._links.close()
        self._same_device.close()


class IpcReader:
    """Views of the sender's device memory, valid until the block after next is written. `location`: its handle."""

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        arguments = list(pickle.loads(base64.b64decode(block.location)))
        # Each process numbers its visible devices from 0, so the sender's device index is not valid here.
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        yield from unpack(block, rebuild_cuda_tensor(*arguments), rank)
        # The sender fills this memory again after the answer: copies out of it must have run.
        torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing to do: the mapping ends with the last view."""


def writer() -> DeviceWriter:
    """Serves from the memory of this process's GPU."""
    return DeviceWriter(LinkWriter(DeviceMedium()), device=device_name(), handle=handle_of)


def reader(plan: UpdatePlan, rank: int) -> DeviceReader:
    """Reads in place from, or into, the memory of this process's GPU."""
    return DeviceReader(LinkReader(DeviceMedium(), plan, rank), IpcReader(), device=device_name())
