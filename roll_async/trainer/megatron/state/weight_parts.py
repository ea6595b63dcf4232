"""What this rank holds of each Hugging Face tensor, and which of the ranks that hold the same sends it.

Nothing here talks to another rank: a push gathers no tensor anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from roll_async.checkpoint.hf_names.table import Match, Transform
from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half
from roll_async.checkpoint.transforms import HeadLayout, rows_of_hf, to_hf
from roll_async.weight_sync.layout import Cut
from roll_async.weight_sync.transfer import TensorPart


def hf_parts(match: Match, local: Tensor, heads: HeadLayout, *, rank: int, size: int) -> Iterator[TensorPart]:
    """The parts of HF tensors in one Megatron tensor of tensor-parallel rank `rank` of `size`; size 1 = not split."""
    row = match.row
    if size == 1:
        for name, tensor in zip(match.hf_names, to_hf(row, local, heads), strict=True):
            yield TensorPart.whole(name, tensor)
        return
    dim = row.tp_dim
    assert dim is not None, f"{match.name} is split, but its row of hf_names says it is not"
    own = heads.of_rank(size)
    tensors = to_hf(row, local, own)
    # The HF tensor may have all gates, then all ups (or queries, keys, values): this rank holds a slice of each.
    pieces = [[tensor.shape[dim]] for tensor in tensors]
    if row.transform.groups_heads:
        pieces = rows_of_hf(row, own)
    elif row.transform is Transform.GATE_UP and len(row.hf) == 1:
        pieces = [[len(local) // 2] * 2]
    for name, tensor, lengths in zip(match.hf_names, tensors, pieces, strict=True):
        before = 0
        for piece, length in zip(tensor.split(lengths, dim), lengths, strict=True):
            start = before + rank * length
            cut = Cut(dim=dim, start=start, stop=start + length)
            yield _part(name, piece, cut, whole=size * tensor.shape[dim])
            before += size * length


def adapter_parts(
    match: Match, halves: tuple[Tensor, Tensor], heads: HeadLayout, *, columns: bool, rank: int, size: int
) -> Iterator[TensorPart]:
    """The parts of an adapter's halves, a pair for each HF tensor in the Megatron weight that it adds to: A [rank, in],
    the same for all of a fused layer, and B [out, rank]. `columns`: B is split over tensor-parallel ranks, not A. The
    first of them sends the half that all of them hold.
    """
    by_name = dict(zip(ADAPTER_HALVES, halves, strict=True))
    shared, cut = ADAPTER_HALVES if columns else ADAPTER_HALVES[::-1]
    for part in hf_parts(match, by_name[cut], heads, rank=rank, size=size):
        yield replace(part, name=adapter_half(part.name, cut))
    if rank == 0:
        for name in match.hf_names:
            yield TensorPart.whole(adapter_half(name, shared), by_name[shared])


def _part(name: str, tensor: Tensor, cut: Cut, *, whole: int) -> TensorPart:
    shape = (*tensor.shape[: cut.dim], whole, *tensor.shape[cut.dim + 1 :])
    return TensorPart(name=name, shape=shape, cut=cut, tensor=tensor)


def owners(sizes: Iterable[int], num_holders: int) -> Sequence[int]:
    """Which of `num_holders` ranks sends each of the tensors they all hold, so that they send alike many bytes: always
    the one that has least to send. Every rank computes the same.
    """
    loads, found = [0] * num_holders, []
    for size in sizes:
        holder = min(range(num_holders), key=loads.__getitem__)
        loads[holder] += size
        found.append(holder)
    return found
