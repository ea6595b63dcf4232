"""Flat buckets of HF-named tensors: what a trainer exports and an engine loads.

A bucket is one contiguous block of bytes with a table of contents. Where the bytes are is the transport's business:
`location` names a shared-memory file, an address to pull from, or a device handle.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.schema import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """One tensor inside a bucket."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch name without the module: float32, bfloat16, float16."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket; a multiple of 16."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One block of bytes and its table of contents."""

    index: int
    slots: tuple[TensorSlot, ...]
    num_bytes: int
    location: str
    """Where a receiver finds the bytes; each transport says what it writes here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """Announces one weight version before its buckets come."""

    version: WeightVersion
    transport: str
    verify: str
    """full, sample or none: how much of each tensor the digest reads."""
