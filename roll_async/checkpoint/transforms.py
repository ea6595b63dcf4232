"""Tensor by tensor between Hugging Face and Megatron layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import ParameterRow, Transform


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """Heads of a gated delta net. Each key head has a query head, and some value heads."""

    num_keys: int
    values_per_key: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, config: HfConfig) -> DeltaHeads:
        """Those of a Hugging Face config."""
        keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
        if values % keys:
            raise ValueError(
                f"{config.source}: linear_num_value_heads={values} is no multiple of linear_num_key_heads={keys}"
            )
        return cls(
            num_keys=keys,
            values_per_key=values // keys,
            key_size=config.integer("linear_key_head_dim"),
            value_size=config.integer("linear_value_head_dim"),
        )

    @property
    def num_values(self) -> int:
        """Value heads."""
        return self.num_keys * self.values_per_key

    @property
    def keys(self) -> int:
        """Channels of all keys, or queries."""
        return self.num_keys * self.key_size

    @property
    def values(self) -> int:
        """Channels of all values, or gates of the output."""
        return self.num_values * self.value_size


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Attention heads of a model, for the transforms that put heads side by side."""

    num_groups: int
    """Key-value heads."""
    heads_per_group: int
    """Query heads per key-value head."""
    head_size: int
    delta: DeltaHeads | None = None

    def rows(self, transform: Transform = Transform.QKV) -> list[int]:
        """First dimension of the projections that a transform puts side by side."""
        if transform in (Transform.QKV, Transform.GATED_QKV):
            queries = self.heads_per_group * (2 if transform is Transform.GATED_QKV else 1)
            return [heads * self.num_groups * self.head_size for heads in (queries, 1, 1)]
        delta = self.delta
        assert delta is not None, transform
        if transform is Transform.DELTA_QKV:
            return [delta.keys, delta.keys, delta.values]
        if transform is Transform.DELTA_GROUPED:
            return [2 * (delta.keys + delta.values), 2 * delta.num_values]
        assert transform is Transform.DELTA_INPUT
        return [delta.keys, delta.keys, delta.values, delta.values, delta.num_values, delta.num_values]

    def groups(self, transform: Transform) -> int:
        """How many times they stand side by side."""
        if transform in (Transform.QKV, Transform.GATED_QKV):
            return self.num_groups
        assert self.delta is not None, transform
        return self.delta.num_keys

    def of_rank(self, size: int) -> HeadLayout:
        """Those of one of `size` tensor-parallel ranks."""
        delta = self.delta and replace(self.delta, num_keys=self.delta.num_keys // size)
        return replace(self, num_groups=self.num_groups // size, delta=delta)

    @classmethod
    def of(cls, config: HfConfig) -> HeadLayout:
        """The layout of a Hugging Face config."""
        heads = config.integer("num_attention_heads")
        groups = config.integer("num_key_value_heads", default=heads)
        size = config.integer("head_dim", default=config.integer("hidden_size") // heads)
        delta = DeltaHeads.of(config) if "linear_num_key_heads" in config else None
        return cls(num_groups=groups, heads_per_group=heads // groups, head_size=size, delta=delta)


def to_megatron(row: ParameterRow, tensors: Sequence[Tensor], heads: HeadLayout) -> Tensor:
    """One full (not sharded) Megatron tensor from its HF tensors."""
    if row.transform.groups_heads:
        sizes, tail = heads.rows(row.transform), tensors[0].shape[1:]
        if len(tensors) < len(sizes):
            tensors = torch.cat(list(tensors)).split(sizes)
        # [groups, rows of one group, ...]: they lie side by side within each group.
        parts = [t.reshape(heads.groups(row.transform), -1, *tail) for t in tensors]
        if row.transform is Transform.GATED_QKV:
            parts[0] = parts[0].unflatten(1, (-1, 2, heads.head_size)).transpose(1, 2).flatten(1, 3)
        return torch.cat(parts, 1).reshape(-1, *tail)
    if row.transform is Transform.GATE_UP and len(tensors) == 2:
        return torch.cat(list(tensors))
    if row.transform.transposes:
        matrix = tensors[0].t()
        return torch.cat((matrix[::2], matrix[1::2])) if row.transform is Transform.IN_TURN else matrix.contiguous()
    return tensors[0]


def to_hf(row: ParameterRow, tensor: Tensor, heads: HeadLayout) -> tuple[Tensor, ...]:
    """The HF tensors of one full Megatron tensor; inverse of `to_megatron`, bit for bit."""
    if row.transform.groups_heads:
        groups, tail = heads.groups(row.transform), tensor.shape[1:]
        sizes = [rows // groups for rows in heads.rows(row.transform)]
        parts = list(tensor.reshape(groups, -1, *tail).split(sizes, dim=1))
        if row.transform is Transform.GATED_QKV:
            parts[0] = parts[0].unflatten(1, (2, -1, heads.head_size)).transpose(1, 2)
        parts = [part.reshape(-1, *tail) for part in parts]
        fused = len(parts) - len(row.hf) + 1
        return (torch.cat(parts[:fused]) if fused > 1 else parts[0], *parts[fused:])
    if row.transform is Transform.GATE_UP and len(row.hf) == 2:
        return tuple(tensor.chunk(2))
    if row.transform.transposes:
        whole = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if row.transform is Transform.IN_TURN else tensor
        return (whole.t().contiguous(),)
    return (tensor,)


def rows_of_hf(row: ParameterRow, heads: HeadLayout) -> list[list[int]]:
    """For each HF tensor of a transform that groups heads: first dimensions of what it has one after another. The first
    has all that the others do not.
    """
    sizes = heads.rows(row.transform)
    fused = len(sizes) - len(row.hf) + 1
    return [sizes[:fused], *([size] for size in sizes[fused:])]


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
