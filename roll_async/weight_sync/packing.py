"""HF-named tensors to flat blocks, and bytes back to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from roll_async.weight_sync.bucket import Block, TensorSlot
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import flat_bytes
from roll_async.weight_sync.layout import Cut, EngineLayout, Fragment, fragments

ALIGNMENT = 16
"""Bytes: every tensor of a block begins at a multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The part of an HF tensor that one trainer rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cut: Cut | None
    """Which part of it this rank holds; None = all of it."""
    tensor: Tensor
    """The part itself."""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> TensorPart:
        """A tensor that is not cut."""
        return cls(name=name, shape=tuple(tensor.shape), cut=None, tensor=tensor)


def joined(parts: Iterable[TensorPart]) -> dict[str, Tensor]:
    """Whole tensors, in the order of their names, of all ranks' parts."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        place = whole.setdefault(part.name, part.tensor.new_empty(part.shape))
        if (cut := part.cut) is not None:
            place = place.narrow(cut.dim, cut.start, cut.stop - cut.start)
        place.copy_(part.tensor)
    return dict(sorted(whole.items()))


PlannedBlock = Sequence[tuple[TensorSlot, Tensor]]
"""The tensors of one block with their slots in it."""


def plan_blocks(
    parts: Iterable[TensorPart], layout: EngineLayout, block_bytes: int, kept: LastExport | None = None
) -> Iterator[PlannedBlock]:
    """Cut a stream of parts where the engine's ranks need it and group the pieces into blocks of at most `block_bytes`.
    A larger piece is cut further; only a single row, or a scalar, can be larger than a block. Where `kept` finds that
    few values of a piece changed, these take its place.

    Holds references to at most one block of tensors at a time.
    """
    pending: list[tuple[TensorSlot, Tensor]] = []
    filled = 0
    for part in parts:
        for fragment, tensor in _pieces(part, layout, block_bytes):
            slot = TensorSlot(
                name=part.name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=part.shape,
                cut=fragment.cut,
                ranks=fragment.ranks,
                offset=0,
                num_bytes=tensor.numel() * tensor.element_size(),
            )
            if kept is not None and (changes := kept.changes(slot, tensor)) is not None:
                num_values = changes.numel() // (tensor.element_size() + 1)
                slot, tensor = replace(slot, num_bytes=changes.numel(), num_values=num_values), changes
            if pending and filled + slot.num_bytes > block_bytes:
                yield _placed(pending)
                pending, filled = [], 0
            pending.append((slot, tensor))
            filled += _aligned(slot.num_bytes)
    if pending:
        yield _placed(pending)


def _placed(pending: PlannedBlock) -> PlannedBlock:
    """Assign offsets. Tensors that the same engine ranks keep are adjacent, so that one transfer reads them."""
    placed, offset = [], 0
    for slot, tensor in sorted(pending, key=lambda piece: piece[0].ranks):
        placed.append((replace(slot, offset=offset), tensor))
        offset += _aligned(slot.num_bytes)
    return placed


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _pieces(part: TensorPart, layout: EngineLayout, block_bytes: int) -> Iterator[tuple[Fragment, Tensor]]:
    """The fragments of a part with their tensors, none larger than a block."""
    for fragment in fragments(layout, part.name, part.shape, part.cut):
        tensor, cut = part.tensor, fragment.cut
        if cut is not None and cut != part.cut:
            begin = 0 if part.cut is None else part.cut.start
            tensor = tensor.narrow(cut.dim, cut.start - begin, cut.stop - cut.start)
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes <= block_bytes or not tensor.dim():
            yield fragment, tensor
            continue
        dim, start = (0, 0) if cut is None else (cut.dim, cut.start)
        rows = max(1, block_bytes * tensor.shape[dim] // num_bytes)
        for piece in tensor.split(rows, dim):
            stop = start + piece.shape[dim]
            yield Fragment(cut=Cut(dim=dim, start=start, stop=stop), ranks=fragment.ranks), piece
            start = stop


def size_of(planned: PlannedBlock) -> int:
    """Bytes of a planned block."""
    last = planned[-1][0]
    return last.offset + last.num_bytes


def pack(planned: PlannedBlock, target: Tensor) -> None:
    """Copy the tensors to their slots. `target`: uint8 [>= size_of(planned)], on any device."""
    for slot, tensor in planned:
        place = target[slot.offset : slot.offset + slot.num_bytes]
        if tensor.is_contiguous() or not slot.num_bytes:
            place.copy_(flat_bytes(tensor))
        else:  # directly to its slot, without a contiguous copy in between
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def unpack(block: Block, data: Tensor, rank: int = 0) -> Iterator[tuple[TensorSlot, Tensor]]:
    """(slot, bytes) of what engine rank `rank` keeps of a block: views of `data`, uint8 [>= num_bytes]."""
    for slot in block.slots:
        if rank in slot.ranks:
            yield slot, data[slot.offset : slot.offset + slot.num_bytes]
