"""Memory of tensors given back and taken again in place: every tensor and view over it stays valid."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor


class Storages:
    """The memory under some tensors, each piece once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # By address: tied weights and views share a piece. Empty tensors have none.
        pieces = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self._pieces = [(piece, piece.nbytes()) for piece in pieces.values()]
        self._copies: list[Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(piece.nbytes() for piece, _ in self._pieces)

    @property
    def host_bytes(self) -> int:
        """Of the copies in host memory."""
        return sum(copy.numel() for copy in self._copies or ())

    def release(self, *, keep_content: bool) -> None:
        """Give the memory back. With `keep_content` device memory is copied to pinned host memory first; host memory
        that is to be kept stays where it is.
        """
        if keep_content and all(piece.device.type == "cpu" for piece, _ in self._pieces):
            return
        if keep_content:
            self._copies = [_as_bytes(piece).to("cpu").pin_memory() for piece, _ in self._pieces]
        for piece, _ in self._pieces:
            # The storage object stays, with every tensor over it; only its memory goes.
            piece.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else torch's allocator keeps it, out of the other role's reach
        elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc is told to keep what is freed, see cluster/placement.py

    def restore(self, *, zero: bool = False) -> None:
        """Take the memory again, with what was kept; else its content is arbitrary, or zeros."""
        for number, (piece, size) in enumerate(self._pieces):
            if piece.nbytes() == size:  # host memory that was kept was never released
                continue
            piece.resize_(size)
            if self._copies is not None:
                _as_bytes(piece).copy_(self._copies[number])
            elif zero:
                _as_bytes(piece).zero_()
        self._copies = None


def _as_bytes(piece: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=piece.device).set_(piece)  # type: ignore[arg-type]
