"""The engine's end of every transport: one rank takes its pieces out of the blocks and assembles its tensors.

An engine's loader expects whole tensors and takes its own part out of each. A tensor of which only that part was
received is therefore passed in its whole shape, and the rest of its memory is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import Block, Bucket, Content, TensorSlot, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.layout import needed_elements

_Pieces = list[tuple[TensorSlot, Tensor]]


class BlockReader(Protocol):
    """One transport's receiving end, for one weight update."""

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        """(slot, bytes uint8 [num_bytes]) of each piece that engine rank `rank` keeps, as views. Those of host
        transports stay valid, those of device transports until the block after next.
        """
        ...

    def close(self) -> None: ...


class Receiver:
    """One weight update on one engine rank."""

    def __init__(
        self,
        plan: UpdatePlan,
        reader: BlockReader,
        kept: LastExport,
        *,
        rank: int = 0,
        keeps_memory: bool,
        owns_memory: bool = False,
    ) -> None:
        """`kept`: this rank's copy of the last export. `rank`: tensor-parallel rank of the engine. `keeps_memory`: the
        reader's views stay valid until the update is closed; otherwise pieces are copied. `owns_memory`: they stay
        valid as long as they are referenced. Raises RuntimeError when the plan builds on an export, or on frozen
        weights, that are not held.
        """
        self._plan, self._reader, self._rank, self._keeps_memory = plan, reader, rank, keeps_memory
        self._kept, self._owns_memory = kept, owns_memory
        if not kept.begin(plan) and plan.base is not None:
            raise RuntimeError(f"export {plan.export} holds what changed since export {plan.base}, which is not held")
        if plan.content is not Content.ADAPTERS:
            kept.frozen.forget()
        (frozen,) = kept.frozen.begin(plan, 1)
        self._digest = Digest(plan.verify, plan.transport)
        self._digest.add(frozen)
        self._incomplete: dict[str, _Pieces] = {}
        self._missing: dict[str, int] = {}
        self._complete: list[_Pieces] = []

    def take(self, bucket: Bucket) -> None:
        """Receive the pieces of a bucket that this rank keeps."""
        for block in bucket.blocks:
            for slot, raw in self._reader.read(block, self._rank):
                whole = self._kept.whole(slot, raw, owned=self._owns_memory)
                self._kept.frozen.add(slot, self._digest.update(slot, whole))
                if whole is raw and not self._keeps_memory:
                    whole = raw.clone()
                self._add(slot, whole.view(getattr(torch, slot.dtype)).view(slot.part_shape))

    def _add(self, slot: TensorSlot, tensor: Tensor) -> None:
        if slot.cut is None:
            self._complete.append([(slot, tensor)])
            return
        name = slot.name
        if name not in self._missing:
            self._missing[name] = needed_elements(self._plan.layout, name, slot.shape, self._rank, slot.cut.dim)
        self._incomplete.setdefault(name, []).append((slot, tensor))
        self._missing[name] -= slot.num_elements
        if self._missing[name] == 0:
            self._complete.append(self._incomplete.pop(name))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Complete tensors that were not returned before, in whole shape; assembled one at a time."""
        complete, self._complete = self._complete, []
        for pieces in complete:
            yield pieces[0][0].name, _assembled(pieces)

    @property
    def incomplete(self) -> list[str]:
        """Names of tensors of which a part was not received."""
        return sorted(self._incomplete)

    @property
    def digest(self) -> str:
        """Digest of everything received, and of the frozen weights below adapters that came alone."""
        return self._digest.hexdigest()

    def committed(self) -> None:
        """The engine serves these weights: the next export may build on them."""
        self._kept.complete(self._plan)

    def close(self) -> None:
        """Release the connection and the received pieces."""
        self._reader.close()
        self._incomplete, self._complete = {}, []


def _assembled(pieces: _Pieces) -> Tensor:
    """One tensor of the whole shape; [whole shape] of which only the pieces hold values."""
    slot, tensor = pieces[0]
    if slot.cut is None:
        return tensor
    whole = torch.empty(slot.shape, dtype=tensor.dtype, device=tensor.device)
    for part, values in pieces:
        assert part.cut is not None
        whole.narrow(part.cut.dim, part.cut.start, part.cut.stop - part.cut.start).copy_(values)
    return whole
