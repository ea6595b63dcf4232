"""Rows to micro-batches. Shape letters: B rows, T positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.trainer.megatron.settings import MegatronSettings

_PAD_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Some rows, cut to the longest of them."""

    rows: Tensor  # [b] int64 row numbers in the rank's part
    tokens: Tensor  # [b,t] int64
    positions: Tensor  # [b,t] int64
    mask: Tensor  # [b,t] bool
    fields: Mapping[str, Tensor]  # [b,t] or [b], whatever the loss reads


def split_rows(lengths: Sequence[int], settings: MegatronSettings, *, rows_per_batch: int) -> list[list[int]]:
    """Row numbers of each micro-batch; rows of like length go together, so padding is small. Any split gives the same
    loss.

    fixed: `rows_per_batch` rows each. dynamic: as many rows as fit `max_tokens_per_microbatch` with padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if settings.micro_batching == "fixed":
        return [order[i : i + rows_per_batch] for i in range(0, len(order), rows_per_batch)]
    budget = settings.max_tokens_per_microbatch
    assert budget is not None, "config refuses dynamic micro-batches without max_tokens_per_microbatch"
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * padded_length(lengths[batches[-1][0]], settings) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded_length(length: int, settings: MegatronSettings) -> int:
    """Length after padding: a multiple of 8, and of what sequence and context parallelism cut it into."""
    parallel = settings.parallel
    multiple = math.lcm(
        _PAD_MULTIPLE,
        parallel.tensor if parallel.sequence_parallel else 1,
        2 * parallel.context if parallel.context > 1 else 1,
    )
    return -(-length // multiple) * multiple


def cut(
    rows: Sequence[int],
    *,
    tokens: Tensor,
    lengths: Tensor,
    mask: Tensor,
    fields: Mapping[str, Tensor | None],
    settings: MegatronSettings,
    device: torch.device,
) -> MicroBatch:
    """The micro-batch of these rows, on the device."""
    index = torch.tensor(rows)
    width = padded_length(int(lengths[index].max()), settings)

    def take(x: Tensor) -> Tensor:
        part = x[index]
        if x.dim() > 1:
            part = torch.nn.functional.pad(part[:, :width], (0, max(0, width - x.shape[1])))
        return part.to(device)

    return MicroBatch(
        rows=index,
        tokens=take(tokens),
        positions=torch.arange(width, device=device).expand(len(rows), -1),
        mask=take(mask),
        fields={name: take(x) for name, x in fields.items() if x is not None},
    )
