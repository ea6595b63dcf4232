"""How weights travel: each trainer rank packs its tensors into flat blocks, which a transport's writer publishes; each
engine rank reads its pieces out of the blocks and assembles tensors. No rank needs another one of its side for that.

    parts --plan_blocks--> blocks --BlockWriter--> transport --BlockReader--> pieces --Receiver--> tensors, digest

An engine's loader expects whole tensors and takes its own part out of each. A tensor of which only that part was
received is therefore passed in its whole shape, and the rest of its memory is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import FILES, STAGED, Block, Bucket, Content, TensorSlot, UpdatePlan
from roll_async.weight_sync.changes import LastExport
from roll_async.weight_sync.digest import Digest, flat_bytes
from roll_async.weight_sync.layout import Cut, EngineLayout, Fragment, fragments, needed_elements
from roll_async.weight_sync.transport.transports import RECEIVERS, SENDERS

# A view of bytes as a dtype must begin at a multiple of its size; 16 is one for every dtype.
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

_Pieces = list[tuple[TensorSlot, Tensor]]


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


class BlockReader(Protocol):
    """One transport's receiving end, for one weight update."""

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        """(slot, bytes uint8 [num_bytes]) of each piece that engine rank `rank` keeps, as views. Those of host
        transports stay valid, those of device transports until the block after next.
        """
        ...

    def close(self) -> None: ...


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
            # A fragment's cut counts from the whole tensor, this rank's memory from its own part.
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
    last = planned[-1][0]  # slots are in the order of their offsets
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
            self.kept.complete(self.plan)  # only now: nothing may build on an export that broke off
            return None
        index, self._index = self._index, self._index + 1
        num_bytes = size_of(planned)
        location, data = self.writer.write(index, planned, num_bytes)
        pieces = [  # the digest is over what receivers will hold: the written bytes, or what they change
            (slot, data[slot.offset : slot.offset + slot.num_bytes] if slot.num_values is None else self.kept[slot])
            for slot, _ in planned
        ]
        for (slot, _), piece in zip(pieces, self._digest.of_block(pieces), strict=True):
            for rank in slot.ranks:
                self.sent[rank] += piece  # `of_trainer` takes the modulus of the sum
                self.kept.frozen.add(slot, piece, rank)
        return Block(
            source=self._source, slots=tuple(slot for slot, _ in planned), num_bytes=num_bytes, location=location
        )

    def close(self) -> None:
        """Close the writers: nothing more is sent."""
        for writer in (self.writer, *self.aside):
            writer.close()


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
        # Changes on top of another base would give a wrong model, and only the digest would tell.
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
            taken = []
            for slot, raw in self._reader.read(block, self._rank):  # copied in here: afterwards it may be overwritten
                whole = self._kept.whole(slot, raw, owned=self._owns_memory)
                taken.append((slot, raw.clone() if whole is raw and not self._keeps_memory else whole))
            for (slot, whole), piece in zip(taken, self._digest.of_block(taken), strict=True):
                self._digest.add(piece)
                self._kept.frozen.add(slot, piece)
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
    # Not zeros: host memory that is never touched takes no pages.
    whole = torch.empty(slot.shape, dtype=tensor.dtype, device=tensor.device)
    for part, values in pieces:
        assert part.cut is not None
        whole.narrow(part.cut.dim, part.cut.start, part.cut.stop - part.cut.start).copy_(values)
    return whole


def open_sender(
    plan: UpdatePlan,
    parts: Iterable[TensorPart],
    *,
    source: int = 0,
    block_bytes: int,
    previous: BlockSender | None = None,
    folder: str | None = None,
) -> BlockSender:
    """Start sending the part of a weight version that trainer rank `source` holds.

    `previous`: the sender of the previous version, or attempt, whose memory, files, connections and copy of what was
    sent are reused; files that other replicas still map are left aside until the next version. `folder`: for the files
    of the transport `filesystem`.
    """
    if previous is None:
        return BlockSender(parts, plan, block_bytes, _open_writer(plan.transport, folder), LastExport(), source=source)
    writer, aside = previous.writer, previous.aside
    if plan.others_proved and plan.transport in FILES:  # a mapping shows what is written to its file
        writer, aside = _open_writer(plan.transport, folder), (*aside, writer)
    elif not plan.others_proved:
        for old in aside:
            old.close()
        aside = ()
    return BlockSender(parts, plan, block_bytes, writer, previous.kept, source=source, aside=aside)


def _open_writer(transport: str, folder: str | None) -> BlockWriter:
    make = _named(SENDERS[transport])
    if transport != "filesystem":
        return make()
    if folder is None:
        raise ValueError("weight_sync.transport filesystem needs a folder that every host sees")
    return make(folder)


def open_receiver(plan: UpdatePlan, kept: LastExport, *, rank: int = 0) -> Receiver:
    """Start receiving one weight version as tensor-parallel rank `rank` of an engine, which owns `kept`."""
    reader = _named(RECEIVERS[plan.transport])(plan, rank)
    return Receiver(
        plan,
        reader,
        kept,
        rank=rank,
        keeps_memory=plan.transport in STAGED,  # a device's buffer is filled again by the block after next
        owns_memory=plan.transport == "gloo",  # received here; a mapped file belongs to the sender
    )


def _named(path: str):  # noqa: ANN202 (a class or function of a transport module)
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)
