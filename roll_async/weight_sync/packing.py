"""HF-named tensors to flat buckets, and bytes back to tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot
from roll_async.weight_sync.digest import flat_bytes

_ALIGNMENT = 16

PlannedBucket = Sequence[tuple[TensorSlot, Tensor]]
"""The tensors of one bucket beside their places in it."""


def plan_buckets(tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[PlannedBucket]:
    """Group a stream of tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Holds at most one bucket of tensors at a time, so a model is never copied as a whole.
    """
    pending: list[tuple[TensorSlot, Tensor]] = []
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and offset + num_bytes > bucket_bytes:
            yield pending
            pending, offset = [], 0
        slot = TensorSlot(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
            num_bytes=num_bytes,
        )
        pending.append((slot, tensor))
        offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    if pending:
        yield pending


def size_of(planned: PlannedBucket) -> int:
    """Bytes of a planned bucket."""
    last = planned[-1][0]
    return last.offset + last.num_bytes


def pack(planned: PlannedBucket, target: Tensor) -> None:
    """Copy the tensors to their places. `target`: uint8 [>= size_of(planned)], on any device."""
    for slot, tensor in planned:
        target[slot.offset : slot.offset + slot.num_bytes].copy_(flat_bytes(tensor))


def unpack(bucket: Bucket, data: Tensor) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
    """(slot, bytes, tensor) of every tensor in a bucket: views of `data`, uint8 [>= bucket.num_bytes]."""
    for slot in bucket.slots:
        raw = data[slot.offset : slot.offset + slot.num_bytes]
        yield slot, raw, raw.view(getattr(torch, slot.dtype)).view(slot.shape)
