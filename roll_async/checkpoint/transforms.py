"""Tensor by tensor between Hugging Face and Megatron layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import ParameterRow, Transform


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Attention heads of a model, for the QKV transform."""

    num_groups: int
    """Key-value heads."""
    heads_per_group: int
    """Query heads per key-value head."""
    head_size: int

    def rows(self) -> list[int]:
        """First dimension of the query, key and value projections."""
        return [heads * self.num_groups * self.head_size for heads in (self.heads_per_group, 1, 1)]

    @classmethod
    def of(cls, config: HfConfig) -> HeadLayout:
        """The layout of a Hugging Face config."""
        heads = config.integer("num_attention_heads")
        groups = config.integer("num_key_value_heads", default=heads)
        size = config.integer("head_dim", default=config.integer("hidden_size") // heads)
        return cls(num_groups=groups, heads_per_group=heads // groups, head_size=size)


def to_megatron(row: ParameterRow, tensors: Sequence[Tensor], heads: HeadLayout) -> Tensor:
    """One full (not sharded) Megatron tensor from its HF tensors."""
    if row.transform is Transform.QKV:
        if len(tensors) == 1:
            tensors = tensors[0].split(heads.rows())
        groups, tail = heads.num_groups, tensors[0].shape[1:]
        # [groups, rows of one group, ...]: the three lie side by side within each group.
        return torch.cat([t.reshape(groups, -1, *tail) for t in tensors], 1).reshape(-1, *tail)
    if row.transform is Transform.GATE_UP and len(tensors) == 2:
        return torch.cat(list(tensors))
    if row.transform.transposes:
        matrix = tensors[0].t()
        return torch.cat((matrix[::2], matrix[1::2])) if row.transform is Transform.IN_TURN else matrix.contiguous()
    return tensors[0]


def to_hf(row: ParameterRow, tensor: Tensor, heads: HeadLayout) -> tuple[Tensor, ...]:
    """The HF tensors of one full Megatron tensor; inverse of `to_megatron`, bit for bit."""
    if row.transform is Transform.QKV:
        tail = tensor.shape[1:]
        parts = tensor.reshape(heads.num_groups, -1, *tail)
        sizes = (heads.heads_per_group * heads.head_size, heads.head_size, heads.head_size)
        split = tuple(part.reshape(-1, *tail) for part in parts.split(sizes, dim=1))
        return split if len(row.hf) == len(split) else (torch.cat(split),)
    if row.transform is Transform.GATE_UP and len(row.hf) == 2:
        return tuple(tensor.chunk(2))
    if row.transform.transposes:
        whole = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if row.transform is Transform.IN_TURN else tensor
        return (whole.t().contiguous(),)
    return (tensor,)


def shard(row: ParameterRow, full: Tensor, *, rank: int, size: int) -> Tensor:
    """This tensor-parallel rank's part of a full Megatron tensor."""
    if row.tp_dim is None or size == 1:
        return full
    if row.transform is Transform.GATE_UP:
        return torch.cat([half.chunk(size, row.tp_dim)[rank] for half in full.chunk(2)])
    return full.chunk(size, row.tp_dim)[rank]


def unshard(row: ParameterRow, parts: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor of all ranks' parts; inverse of `shard`."""
    if row.tp_dim is None or len(parts) == 1:
        return parts[0]
    if row.transform is Transform.GATE_UP:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([torch.cat([h[i] for h in halves], row.tp_dim) for i in range(2)])
    return torch.cat(list(parts), row.tp_dim)
