"""Flat blocks of HF-named tensors: what a trainer exports and an engine loads.

A block is one contiguous piece of memory of one trainer rank with a table of contents; the blocks that all ranks
publish at the same time are a bucket. Each transport says where the bytes of a block are: its `location` names a file
in shared memory, an address to pull from, or a device handle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half
from roll_async.schema import WeightVersion
from roll_async.weight_sync.layout import Cut, EngineLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlot:
    """One tensor, or a part of one, inside a block."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """torch name without the module: float32, bfloat16, float16."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cut: Cut | None = None
    """Which part of it this slot holds; None = all of it."""
    ranks: tuple[int, ...] = (0,)
    """Tensor-parallel ranks of an engine that keep it."""
    offset: int
    """Bytes from the start of the block; a multiple of 16."""
    num_bytes: int
    """In the block."""
    num_values: int | None = None
    """Only that many values are here, those that changed, see `changes.py`; None = all bytes."""

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that this slot holds."""
        return self.shape if self.cut is None else self.cut.of(self.shape)

    @property
    def num_elements(self) -> int:
        """Elements of that part, changed or not."""
        return math.prod(self.part_shape)

    @property
    def num_sent(self) -> int:
        """Values in the block."""
        return self.num_elements if self.num_values is None else self.num_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The bytes that one trainer rank publishes at a time, and their table of contents."""

    source: int
    """Trainer rank that publishes it."""
    slots: tuple[TensorSlot, ...]
    num_bytes: int
    location: str
    """Where a receiver finds the bytes, in a format of the transport."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What all trainer ranks publish at the same time."""

    index: int
    blocks: tuple[Block, ...]

    @property
    def num_bytes(self) -> int:
        """Total of all blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def slots(self) -> Iterator[TensorSlot]:
        """Of all blocks."""
        return chain.from_iterable(block.slots for block in self.blocks)


STAGED = frozenset({"shm", "filesystem", "gloo"})
"""Transports into host memory beside the served weights: engines generate meanwhile, and pause only for the swap."""

FILES = frozenset({"shm", "filesystem"})
"""Those of them by files of the trainer that replicas map. Over every other transport replicas relay to one another."""


class Content(str, Enum):
    """Which tensors of a model with low-rank adapters travel."""

    MERGED = "merged"  # the weights, adapters merged into them; of a model without adapters everything
    WHOLE = "whole"  # the frozen weights, and the adapters beside them
    ADAPTERS = "adapters"  # the adapters, to receivers that hold the frozen weights


def is_adapter(name: str) -> bool:
    """Whether a tensor is half of an adapter."""
    return name.endswith(tuple(adapter_half("", half) for half in ADAPTER_HALVES))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """Describes one weight version; it is sent before the buckets."""

    version: WeightVersion
    transport: str
    verify: str
    """full, sample or none: how much of each tensor the digest reads."""
    layout: EngineLayout = EngineLayout()
    """Which rank keeps which part, the same in every replica."""
    export: int = 0
    """Number of this export; 0 = no later export builds on it, so nobody keeps a copy."""
    base: int | None = None
    """Number of the export that every receiver holds: only what changed since need be sent; None = send everything."""
    content: Content = Content.MERGED
    """Which tensors are sent."""
    attempt: int = 1
    """Number of the attempt of the push, from 1."""
    replica: str = ""
    """Name of the replica that gets this copy of the plan; empty = the trainer's own copy."""
    upstream: str | None = None
    """Name of the replica that relays the weights to this one; None = it pulls from the trainer."""
    others_proved: bool = False
    """Other replicas have proved an earlier attempt and swap it in later: what they map must not change."""

    def chained(self, replicas: Sequence[str], attempt: int) -> dict[str, UpdatePlan]:
        """The plan for each replica: in a chain, in which each may relay the weights to the next."""
        return {
            name: replace(self, attempt=attempt, replica=name, upstream=upstream)
            for upstream, name in zip([None, *replicas], replicas, strict=False)  # the last relays to nobody
        }
