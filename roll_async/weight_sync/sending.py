"""The trainer's end of every transport: each rank packs its own tensors into blocks, and a writer publishes them to the
receivers. No rank needs another one for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from roll_async.weight_sync.bucket import Block, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import Digest
from roll_async.weight_sync.packing import PlannedBlock, TensorPart, plan_blocks, size_of


class BlockWriter(Protocol):
    """One transport's sending end. It lives as long as the process: all versions share memory and connections."""

    def write(self, index: int, planned: PlannedBlock, num_bytes: int) -> tuple[str, Tensor]:
        """Publish block `index` of a version; (location, its bytes: uint8 [>= num_bytes]).

        Files keep every block of a version readable until the next version begins; all other transports only until the
        block after next.
        """
        ...

    def close(self) -> None:
        """Release memory, files and connections."""


class BlockSender:
    """Sends one trainer rank's part of one weight version."""

    def __init__(
        self,
        parts: Iterable[TensorPart],
        plan: UpdatePlan,
        block_bytes: int,
        writer: BlockWriter,
        kept: LastExport,
        *,
        source: int,
        aside: tuple[BlockWriter, ...] = (),
    ) -> None:
        """`kept`: this rank's copy of the last export. `aside`: with files that replicas may still map."""
        self.plan, self.writer, self.kept, self.aside = plan, writer, kept, aside
        self._source = source
        kept.begin(plan)
        self._planned = plan_blocks(parts, plan.layout, block_bytes, kept)
        self._digest = Digest(plan.verify, plan.transport)
        self._index = 0
        self.sent = kept.frozen.begin(plan, plan.layout.tensor)
        """Digest of the pieces sent to each engine rank so far, with that of the frozen weights below adapters that are
        sent alone, see `digest.py: of_trainer`.
        """

    def next_block(self) -> Block | None:
        """Publish the next block; None when this rank has sent all of its own."""
        planned = next(self._planned, None)
        if planned is None:
            self.kept.complete(self.plan)
            return None
        index, self._index = self._index, self._index + 1
        num_bytes = size_of(planned)
        location, data = self.writer.write(index, planned, num_bytes)
        for slot, _ in planned:  # the digest is over what receivers will hold: the written bytes, or what they change
            whole = data[slot.offset : slot.offset + slot.num_bytes] if slot.num_values is None else self.kept[slot]
            piece = self._digest.of(slot, whole)
            for rank in slot.ranks:
                self.sent[rank] += piece
                self.kept.frozen.add(slot, piece, rank)
        return Block(
            source=self._source, slots=tuple(slot for slot, _ in planned), num_bytes=num_bytes, location=location
        )

    def close(self) -> None:
        """Close the writers: nothing more is sent."""
        for writer in (self.writer, *self.aside):
            writer.close()
