"""Masked statistics. Shape letters: B rows, T token positions."""

from __future__ import annotations

import torch
from torch import Tensor


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any floating input is float64, else float32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def check_mask(mask: Tensor) -> None:
    """Masks are boolean: an integer mask would silently scale values. Raises ValueError."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool")


def check_shape(values: object, mask_BT: Tensor, what: str) -> None:
    """Raise ValueError for what is no tensor [B,T]: a row or a number would be broadcast without a word."""
    check_mask(mask_BT)
    if not isinstance(values, Tensor):
        raise ValueError(f"{what} must be a tensor, not a {type(values).__name__}")
    if values.shape != mask_BT.shape:
        raise ValueError(
            f"{what} has shape {tuple(values.shape)}; expected {tuple(mask_BT.shape)}, a number for each token"
        )


def clean(x: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, 0 where masked, before any arithmetic: NaN times zero is NaN, also in backward."""
    return torch.where(mask, x.to(dtype), torch.zeros((), dtype=dtype, device=x.device))


def segment_ids_from_mask(*, mask_BT: Tensor) -> Tensor:
    """[B,T] int64: the k-th run of consecutive True in a row gets k (from 0); -1 where masked.

    A turn of an agent is one run: compute it before staleness masks split turns.
    """
    check_mask(mask_BT)
    before = torch.nn.functional.pad(mask_BT[:, :-1], (1, 0), value=False)
    starts = mask_BT & ~before
    return torch.where(mask_BT, starts.long().cumsum(-1) - 1, -1)


def dense_segments(*, segment_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B,T] int64: the segment ids of each row renumbered 0, 1, ... in increasing order, 0 where masked.

    Any numbering becomes an index below T: per-segment sums are a scatter of fixed size, no largest id is read.
    """
    unused = torch.iinfo(torch.int64).max  # sorts behind every id
    ordered, order = torch.where(mask_BT, segment_ids_BT.long(), unused).sort(dim=-1, stable=True)
    rank = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).long().cumsum(-1)
    return torch.where(mask_BT, torch.zeros_like(rank).scatter(1, order, rank), 0)


def masked_mean(*, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[] mean over valid tokens; 0 if there is none. Differentiable in `values_BT`."""
    check_mask(mask_BT)
    dtype = working_dtype(values_BT)
    return clean(values_BT, mask_BT, dtype).sum() / mask_BT.sum().clamp(min=1).to(dtype)


def whiten(*, values_BT: Tensor, mask_BT: Tensor, epsilon: float = 1e-8) -> Tensor:
    """[B,T] (x - mean) / sqrt(var + epsilon) over all valid tokens, unbiased var; 0 with fewer than 2; detached."""
    check_mask(mask_BT)
    dtype = working_dtype(values_BT)
    x = clean(values_BT.detach(), mask_BT, dtype)
    count = mask_BT.sum().to(dtype)
    mean = x.sum() / count.clamp(min=1)
    centred = torch.where(mask_BT, x - mean, 0)
    var = (centred * centred).sum() / (count - 1).clamp(min=1)
    return torch.where(mask_BT & (count >= 2), centred / torch.sqrt(var + epsilon), 0)


def valid_positions_first(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(order, inverse) [B,T]: a stable permutation that moves the valid tokens of each row to its front, and back."""
    order = torch.argsort((~mask_BT).to(torch.int8), dim=-1, stable=True)
    return order, torch.argsort(order, dim=-1)
