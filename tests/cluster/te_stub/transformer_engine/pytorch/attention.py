"""Causal attention: padded [S,B,H,D], packed [N,H,D], and context parallel over zigzag blocks, as the kernels take it.

Each context rank holds blocks r and 2n - 1 - r of every sequence. Here keys, values and their positions are gathered,
and what a query may see follows from positions; the kernels pass blocks from rank to rank instead.
"""

import torch
import torch.nn.functional as F
from torch import nn


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        attn_mask_type="causal",
        window_size=None,
        softmax_scale=None,
        cp_group=None,
        cp_comm_type="p2p",
        **others,
    ):
        super().__init__()
        assert attention_dropout == 0 and attn_mask_type == "causal"
        self.scale, self.cp_group, self.window = softmax_scale, cp_group, window_size and window_size[0]

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        **others,
    ):
        assert attention_mask is None and key.shape[-2] <= query.shape[-2]
        if qkv_format == "thd":
            assert attn_mask_type == "padding_causal" and query.dim() == 3
            assert cu_seqlens_q.dtype == torch.int32 and int(cu_seqlens_q[0]) == 0
            bounds = cu_seqlens_q.tolist()
            assert bounds[-1] == query.shape[0] * self._ranks()
            assert max_seqlen_q == max(end - start for start, end in zip(bounds, bounds[1:], strict=False))
            sequence, position = self._places(bounds, query.device)
            return self._attend(query[:, None], key[:, None], value[:, None], sequence, position).flatten(1)
        assert attn_mask_type in ("causal", None)
        sequence, position = self._places([0, query.shape[0] * self._ranks()], query.device)
        return self._attend(query, key, value, sequence, position)

    def _ranks(self):
        return 1 if self.cp_group is None else self.cp_group.size()

    def _places(self, bounds, device):
        """(sequence, position) of every token this rank holds."""
        sequences, positions = [], []
        for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            own = torch.arange(end - start)
            if self._ranks() > 1:
                blocks, rank = own.chunk(2 * self._ranks()), self.cp_group.rank()
                assert len({len(block) for block in blocks}) == 1, "a sequence is cut into 2 n equal blocks"
                own = torch.cat([blocks[rank], blocks[-1 - rank]])
            positions.append(own)
            sequences.append(torch.full_like(own, number))
        return torch.cat(sequences).to(device), torch.cat(positions).to(device)

    def _attend(self, query, key, value, sequence, position):
        """[S,B,H,D] -> [S,B,H*D]."""
        keys = (sequence, position)
        if self._ranks() > 1:
            key, value = (_Gather.apply(x, self.cp_group) for x in (key, value))
            keys = tuple(_Gather.apply(x, self.cp_group) for x in keys)
        distance = position[:, None] - keys[1][None]
        visible = (sequence[:, None] == keys[0][None]) & (distance >= 0)
        if self.window is not None and self.window >= 0:
            visible &= distance <= self.window
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            *heads, attn_mask=visible, scale=self.scale, enable_gqa=query.shape[2] != key.shape[2]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
