"""HF-named tensors to the tables of contents of flat buckets, and bytes back to tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot

_ALIGNMENT = 16


def plan_buckets(tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[TensorSlot, Tensor]]]:
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


def unpack(bucket: Bucket, data: Tensor) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
    """(slot, bytes, tensor) of every tensor in a bucket. `data`: uint8 [>= bucket.num_bytes]; results are views of it.
    """
    for slot in bucket.slots:
        raw = data[slot.offset : slot.offset + slot.num_bytes]
        yield slot, raw, raw.view(getattr(torch, slot.dtype)).view(slot.shape)


def size_of(slots: list[tuple[TensorSlot, Tensor]]) -> int:
    """Bytes of a planned bucket."""
    last = slots[-1][0]
    return last.offset + last.num_bytes
