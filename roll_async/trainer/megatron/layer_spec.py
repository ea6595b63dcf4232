"""Layers without Transformer Engine: RMSNorm that works under sequence parallelism, attention by torch's SDPA.

Shape letters: S positions, B rows, H heads, D head size, N packed tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor


class TorchRMSNorm(torch.nn.RMSNorm):
    """Megatron's own wrapper refuses sequence parallelism; its gradient only needs the all-reduce this attribute asks
    for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _GatherSequence(torch.autograd.Function):
    """All-gather along positions; torch's own differentiable all_gather gives wrong gradients on gloo."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN001
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class SdpaAttention(MegatronModule):
    """Causal core attention: padded [S,B,H,D], packed [N,H,D], and context parallel by gathering keys and values
    (zigzag).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
    ) -> None:
        super().__init__(config)
        self._scale = softmax_scale
        self._context_group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        mask = None
        positions = query.shape[0]
        if self._context_group.size() > 1:
            mask = self._zigzag_mask(positions).to(query.device)
            key, value = _GatherSequence.apply(key, self._context_group), _GatherSequence.apply(value, self._context_group)
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), mask=mask)
        return out.permute(2, 0, 1, 3).reshape(positions, query.shape[1], -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """Sequences one after another along the first axis, each attending to itself only."""
        bounds = packed.cu_seqlens_q.tolist()
        parts = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            heads = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(self._attend(*heads, mask=None)[0].transpose(0, 1))
        out = torch.cat(parts)
        return out.reshape(out.shape[0], -1)

    def _zigzag_mask(self, positions: int) -> Tensor:
        """[S, S * ranks] bool: rank r holds blocks r and 2n - 1 - r, so that causal work is even."""
        ranks, half = self._context_group.size(), positions // 2

        def of(rank: int) -> Tensor:
            late = 2 * ranks - 1 - rank
            return torch.cat([torch.arange(rank * half, (rank + 1) * half), torch.arange(late * half, (late + 1) * half)])

        keys = torch.cat([of(rank) for rank in range(ranks)])
        return of(self._context_group.rank())[:, None] >= keys[None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=grouped
        )


def local_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The decoder's layers; the block form is needed because Megatron picks the final norm itself otherwise."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=TorchRMSNorm)
