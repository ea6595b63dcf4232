"""Gated delta net in the place of attention: every head has a state, which decays, and of which each key's value is
replaced by a share of the new one. Rows are computed in chunks, and each starts from an empty state.

The rule is that of arXiv:2412.06464; chunks of positions are solved at once, as in arXiv:2406.06484. Shape letters:
S positions, B rows, N positions of all rows one after another, R rows, C chunks of L positions, G key heads of this
rank, H its value heads, K and V sizes of a key and of a value, W positions that the convolution sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from roll_async.trainer.megatron.memory_estimate import DELTA_CHUNK
from roll_async.trainer.megatron.model.attention import PackedRows
from roll_async.trainer.megatron.ranks import tensor_group

_EPSILON = 1e-6
"""Of the lengths of queries and keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChunks:
    """Where the positions of rows lie in chunks, and before the convolution. The chunks are in the order in which they
    are computed: the first of every row, from the longest row to the shortest, then the second of those that have one.
    """

    chunks: Tensor  # [C,L] int64: position in N, which is N itself where there is none
    slots: Tensor  # [N] int64: place of each position in the flattened chunks
    counts: tuple[int, ...]
    """Chunks of each round."""
    apart: Tensor  # [N] int64: place of each position where W - 1 zeros are before each row

    @classmethod
    @lru_cache(maxsize=4)  # the layers of a micro-batch ask for the same
    def of(cls, lengths: tuple[int, ...], width: int, device: torch.device) -> RowChunks:
        """`width`: W."""
        of_rows = torch.tensor(lengths)
        rounds = -(-of_rows // DELTA_CHUNK)
        order = of_rows.argsort(descending=True, stable=True)
        counts = tuple(int((rounds > i).sum()) for i in range(int(rounds.max())))
        rows = torch.cat([order[:count] for count in counts])
        first = DELTA_CHUNK * torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        offsets = first[:, None] + torch.arange(DELTA_CHUNK)
        starts, total = of_rows.cumsum(0) - of_rows, sum(lengths)
        there = offsets < of_rows[rows, None]
        chunks = torch.where(there, starts[rows, None] + offsets, total)
        slots = torch.empty(total, dtype=torch.int64)
        slots[chunks[there]] = there.flatten().nonzero()[:, 0]
        apart = torch.arange(total) + (width - 1) * torch.arange(1, len(lengths) + 1).repeat_interleave(of_rows)
        return cls(chunks=chunks.to(device), slots=slots.to(device), counts=counts, apart=apart.to(device))


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, rows: RowChunks) -> Tensor:
    """[N,H,V] float32 of query and key [N,H,K], value [N,H,V], decay [N,H] (the logarithm of what is kept of the state)
    and rate [N,H] (the share of a key's value that is replaced). At every position

        state = exp(decay) * state;  state += key x (rate * (value - state(key)));  output = state(query)
    """

    def chunked(x: Tensor) -> Tensor:
        """[N,H,...] to [C,H,L,...], zeros where there is no position: they change no state."""
        return torch.cat((x.float(), x.new_zeros((1, *x.shape[1:]), dtype=torch.float32)))[rows.chunks].transpose(1, 2)

    query, key, value, decay, rate = (chunked(x) for x in (query, key, value, decay, rate))
    decay, rate = decay.cumsum(-1), rate[..., None]
    later = torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=query.device).triu(1)
    # Masked first: the exponential of what lies ahead may be infinite.
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    since_start, to_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    # What a position writes depends on what those before it in the chunk wrote: a unit triangle of equations.
    triangle = (rate * key) @ key.transpose(-1, -2) * between
    wanted = torch.cat((rate * value, rate * key * since_start), -1)
    written, read = torch.linalg.solve_triangular(triangle, wanted, upper=False, unitriangular=True).split(
        (value.shape[-1], key.shape[-1]), -1
    )
    inside = query @ key.transpose(-1, -2) * between
    query, key, kept = query * since_start, (key * to_end).transpose(-1, -2), since_start[..., -1:, :]
    state = query.new_zeros((rows.counts[0], query.shape[1], query.shape[-1], value.shape[-1]))
    out = []
    for of_round in zip(*(x.split(rows.counts) for x in (query, key, written, read, inside, kept)), strict=True):
        query, key, written, read, inside, kept = of_round
        state = state[: len(query)]  # rows that have ended are last
        change = written - read @ state
        out.append(query @ state + inside @ change)
        state = kept * state + key @ change
    return torch.cat(out).transpose(1, 2).flatten(0, 1)[rows.slots]


class DeltaNet(MegatronModule):
    """In the place of a layer's attention. Tensor-parallel ranks share its key heads, with the value heads of each."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object) -> None:
        super().__init__(config)
        group, dtype = tensor_group(), config.params_dtype
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        assert keys and values and config.linear_key_head_dim and config.linear_value_head_dim
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        self._values_per_key, self._keys, own = values // keys, keys // group.size(), values // group.size()
        channels, inner = 2 * keys * self._key + values * self._value, values * self._value
        given = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, channels + inner + 2 * values, gather_output=False, **given
        )
        self.out_proj = RowParallelLinear(
            inner, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **given
        )
        shape = (channels // group.size(), 1, config.linear_conv_kernel_dim)
        self.conv_weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.empty(own, dtype=dtype))
        self.dt_bias = torch.nn.Parameter(torch.empty(own, dtype=dtype))
        for split in (self.conv_weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.norm_weight = torch.nn.Parameter(torch.empty(self._value, dtype=dtype))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """[S,B,hidden] to the same (under sequence parallelism this rank's positions). Rows are padded at their end, or
        packed into one.
        """
        projected, _ = self.in_proj(hidden_states)
        positions, batch, _ = projected.shape
        lengths = (positions,) * batch if packed_seq_params is None else packed_seq_params.lengths
        rows = RowChunks.of(lengths, self.conv_weight.shape[-1], projected.device)
        values = self._values_per_key * self._value
        sizes = (2 * self._key + values, values, self._values_per_key, self._values_per_key)
        of_heads = projected.transpose(0, 1).reshape(-1, self._keys, sum(sizes))
        mixed, gate, rate, decay = of_heads.split(sizes, -1)
        query, key, value = (
            self._convolved(mixed.flatten(1), rows).view_as(mixed).split((self._key, self._key, values), -1)
        )
        query, key = (self._of_value_heads(x) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(decay.flatten(1).float() + self.dt_bias)
        value = value.reshape(len(value), -1, self._value)
        scale = self._key**-0.5
        out = gated_delta_rule(scale * query, key, value, decay, rate.flatten(1).sigmoid(), rows)
        out = self._normed(out.to(value.dtype), gate.reshape(value.shape))
        return self.out_proj(out.view(batch, positions, -1).transpose(0, 1).contiguous())

    def _convolved(self, x: Tensor, rows: RowChunks) -> Tensor:
        """[N,channels]: each with the W - 1 positions before it in its row, then SiLU."""
        before = self.conv_weight.shape[-1] - 1
        padded = x.new_zeros(len(x) + before * rows.counts[0], x.shape[1]).index_copy(0, rows.apart, x)
        out = F.conv1d(padded.t()[None], self.conv_weight, groups=x.shape[1])[0].t()
        return F.silu(out[rows.apart - before])

    def _of_value_heads(self, x: Tensor) -> Tensor:
        """[N,G,K] to float32 [N,H,K] of length 1."""
        x = x.float()
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
        return x.repeat_interleave(self._values_per_key, 1)

    def _normed(self, x: Tensor, gate: Tensor) -> Tensor:
        """[N,H,V] of both: RMSNorm, then the gate."""
        # Every rank has the gradient of its own heads: summed here, whether or not positions are shared, too.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=tensor_group())
        normed = F.rms_norm(x.float(), weight.shape, eps=self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normed * F.silu(gate.float())).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, object]:
        """As Megatron makes it, but for the parameters that tensor ranks share by heads."""
        split = {"conv_weight": 0, "A_log": 0, "dt_bias": 0}
        parts = make_sharded_tensors_for_checkpoint(
            {name: x for name, x in self.named_parameters(recurse=False) if name in split},
            prefix,
            split,
            sharded_offsets,
            tp_group=tensor_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return {**super().sharded_state_dict(prefix, sharded_offsets, metadata), **parts}
