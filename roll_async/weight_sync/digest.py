"""Proof that a replica holds what the trainer sent: a digest over names, types, shapes, positions and bytes.

It is a sum over the pieces, so their order does not matter: several trainer ranks send at once, and each engine rank
receives its own selection. The trainer sums over what it sent to each engine rank; the replica reports the digests of
its ranks in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from roll_async.checkpoint.folders.tensor_bytes import bytes_of
from roll_async.weight_sync.bucket import STAGED, Content, TensorSlot, UpdatePlan, is_adapter

VERIFY_LEVELS = ("full", "sample", "none")
_WINDOW_BYTES = 1024
_NUM_WINDOWS = 16
_WORD_BYTES = 8
_MODULUS = 1 << 128
_CHUNK_WORDS = 1 << 17
"""1 MiB: product and sum stay in the processor's cache."""


class Digest:
    """Running digest of what one engine rank holds of a weight version.

    full: every byte, by XXH3 where they travel through host memory, by `_fold` where they stay on devices. sample:
    names, types, shapes and 16 windows of 1 KiB spread over each piece, ends included, so that a swapped, truncated or
    stale tensor shows. none: names, types and shapes only.
    """

    def __init__(self, verify: str, transport: str) -> None:
        if verify not in VERIFY_LEVELS:
            raise ValueError(f"weight_sync.verify {verify!r} is not one of {' | '.join(VERIFY_LEVELS)}")
        self._verify, self._on_host = verify, transport in STAGED
        self.total = 0
        """Sum of everything added so far, below 2**128."""

    def add(self, value: int) -> None:
        """Add the digest of one piece, or of several."""
        self.total = (self.total + value) % _MODULUS

    def of_block(self, pieces: Sequence[tuple[TensorSlot, Tensor]]) -> list[int]:
        """Digests of the pieces of a block, each with all of its bytes, also if few of them were sent: uint8, on any
        device. Only bytes that are read leave it: the windows of all pieces in one transfer.
        """
        if self._verify != "sample" or self._on_host:
            return [self.of(slot, data) for slot, data in pieces]
        windows = [
            [data[start : start + _WINDOW_BYTES] for start in _window_starts(data.numel())] for _, data in pieces
        ]
        flat = [window for of_piece in windows for window in of_piece]
        read, begin, found = bytes_of(torch.cat(flat)) if flat else b"", 0, []
        for (slot, data), of_piece in zip(pieces, windows, strict=True):
            end = begin + sum(window.numel() for window in of_piece)
            found.append(_piece(slot, data, read[begin:end]))
            begin = end
        return found

    def of(self, slot: TensorSlot, data: Tensor) -> int:
        """Digest of one piece."""
        if self._verify == "full":
            return _piece(slot, data, xxh3_128_digest(bytes_of(data)) if self._on_host else _fold(data))
        if self._verify == "none":
            return _piece(slot, data, b"")
        if not self._on_host:
            return self.of_block([(slot, data)])[0]
        whole = bytes_of(data)  # cutting a tensor would cost more than the digest
        return _piece(slot, data, *(whole[start : start + _WINDOW_BYTES] for start in _window_starts(data.numel())))

    def hexdigest(self) -> str:
        """Digest of everything added so far."""
        return f"{self.total:032x}"


def _piece(slot: TensorSlot, data: Tensor, *content: bytes | memoryview) -> int:
    piece = hashlib.blake2b(digest_size=16)
    # With name and place: equal bytes in another tensor, or elsewhere in it, are not equal.
    piece.update(f"{slot.name}|{slot.dtype}|{slot.shape}|{slot.cut}|{data.numel()};".encode())
    for part in content:
        piece.update(part)
    return int.from_bytes(piece.digest(), "big")


class FrozenDigest:
    """Digest of the frozen weights below adapters, by engine rank: they are sent once, and a push of adapters alone is
    proved together with them. A trainer rank keeps that of what it sent, an engine rank that of what it holds.
    """

    def __init__(self) -> None:
        self._held: list[int] | None = None
        self._coming: list[int] = []

    def begin(self, plan: UpdatePlan, num_ranks: int) -> list[int]:
        """What the digest of an export begins with, by engine rank. Raises RuntimeError when only adapters come and no
        frozen weights are held.
        """
        self._coming = [0] * num_ranks
        if plan.content is not Content.ADAPTERS:
            return [0] * num_ranks
        if self._held is None:
            raise RuntimeError("only adapters are sent, and the weights that they add to are not held")
        return list(self._held)

    def add(self, slot: TensorSlot, piece: int, rank: int = 0) -> None:
        """A piece of the export that an engine rank keeps."""
        if not is_adapter(slot.name):
            self._coming[rank] = (self._coming[rank] + piece) % _MODULUS

    def complete(self, plan: UpdatePlan) -> None:
        """All of the export is there: sent by a trainer, served by an engine."""
        if plan.content is Content.WHOLE:
            self._held = self._coming

    def forget(self) -> None:
        """The weights are held no more, or are about to be overwritten."""
        self._held = None


def of_replica(ranks: Iterable[str]) -> str:
    """One text for a replica: the digests of its tensor-parallel ranks in order."""
    return ".".join(ranks)


def of_trainer(sources: Sequence[Sequence[int]]) -> str:
    """The same text from the digests of what each trainer rank sent: [trainer rank][engine rank]."""
    return of_replica(f"{sum(sent) % _MODULUS:032x}" for sent in zip(*sources, strict=True))


def _fold(data: Tensor) -> bytes:
    """8 bytes per MiB of `data`: sum of word * weight modulo 2**64, and the bytes that fill no word.

    The weights are odd, so a change within one word of a MiB is always detected; other damage is missed once in about
    2**63. A cryptographic hash would guard against forgery, which is not needed here. It is computed on the device of
    the data.
    """
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    if data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # a view as int64 needs a start at a multiple of 8
    weights = _weights(data.device)
    chunks = data[:whole].view(torch.int64).split(_CHUNK_WORDS) if whole else ()
    sums = [(chunk * weights[: len(chunk)]).sum() for chunk in chunks]
    folded = bytes(bytes_of(torch.stack(sums))) if sums else b""
    return folded + bytes(bytes_of(data[whole:]))


@cache
def _weights(device: torch.device) -> Tensor:
    """[_CHUNK_WORDS] odd int64, the same on every machine: splitmix64 of the position, in wrapping arithmetic."""
    # The constants of splitmix64 as signed numbers: torch computes no uint64.
    mixed = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed | 1).to(device)


def _window_starts(num_bytes: int) -> list[int]:
    if num_bytes <= _WINDOW_BYTES * _NUM_WINDOWS:
        return list(range(0, num_bytes, _WINDOW_BYTES))
    last = num_bytes - _WINDOW_BYTES
    return [last * i // (_NUM_WINDOWS - 1) for i in range(_NUM_WINDOWS)]


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 [num_bytes] where it is; a copy only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
