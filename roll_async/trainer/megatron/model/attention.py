"""Core attention of local layers: queries and keys are rotated, then all packed rows are attended to in one call.

Shape letters: S positions, B rows, H heads, D head size, N packed positions, R packed rows.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from roll_async.trainer.megatron.compiled import compiled
from roll_async.trainer.megatron.ranks import context_group, tensor_group

logger = logging.getLogger(__name__)

LONGEST_SHARED_ROW = 16384
"""Positions of a row under context parallelism without Transformer Engine: a mask of S * S / ranks is formed."""

_SINK_CHANNELS = 8
"""Added to a head for the score of a sink: one, and zeros up to what kernels want a head to be a multiple of."""

LARGEST_FLASH_HEAD = 256
"""Head size that FlashAttention's backward pass takes; a multiple of 8."""


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """Megatron's bounds of packed rows, and what local layers read of them, which must not wait for the device."""

    lengths: tuple[int, ...]
    """Of the rows, on this context rank."""
    positions: Tensor
    """[N] int64: of each token in its row; [3,N] in time, height and width."""

    @classmethod
    def of(cls, bounds: Sequence[int], starts: Tensor, positions: Tensor, *, ranks: int, on_device: bool) -> PackedRows:
        """`bounds` of the rows over all context ranks, `starts` [R+1] the same on the device. `on_device`: rotary
        embeddings read them there, as Transformer Engine's do; Megatron's own read them as numbers, in every layer.
        """
        lengths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
        read = starts if on_device else torch.tensor(bounds, dtype=torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=read,
            cu_seqlens_kv_padded=read,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=tuple(length // ranks for length in lengths),
            positions=positions,
        )


PackedAttention = Callable[[Tensor, Tensor, Tensor, PackedRows, float | None, int | None], Tensor]
"""(query [N,H,D], key, value, rows, scale, window) to [N,H,D]: causal, every row for itself. A window counts the
positions that a query sees, itself among them.
"""


def row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """By SDPA, which knows no bounds: neighbours of one length in one call. `sinks`: see `_attend`."""
    parts = []
    counts = [(length, len(list(same))) for length, same in groupby(rows.lengths)]
    # The gradient of a slice is as long as the whole, once for each length; that of a split is one concatenation.
    pieces = (x.split([length * count for length, count in counts]) for x in (query, key, value))
    for (length, _), *piece in zip(counts, *pieces, strict=True):
        heads = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in piece)
        out = _attend(*heads, mask=_window_mask(length, window, query.device), scale=scale, sinks=sinks)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def by_torch(varlen_attn: Callable[..., Tensor]) -> PackedAttention:
    """In one call of `torch.nn.attention.varlen.varlen_attn`."""
    # Some versions take fewer heads of keys only when told, others have no such argument and take them.
    takes = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None, window: int | None
    ) -> Tensor:
        bounds, longest = rows.cu_seqlens_q, rows.max_seqlen_q
        seen = (_before(window), 0)
        return varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=seen, **takes)

    return attend


def by_flash(flash_attn_varlen_func: Callable[..., Tensor]) -> PackedAttention:
    """In one call of `flash_attn.flash_attn_varlen_func`."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None, window: int | None
    ) -> Tensor:
        bounds, longest = rows.cu_seqlens_q, rows.max_seqlen_q
        # With `causal` the window's right side is 0 whatever is given.
        seen = (_before(window), -1 if window is None else 0)
        return flash_attn_varlen_func(
            query, key, value, bounds, bounds, longest, longest, softmax_scale=scale, causal=True, window_size=seen
        )

    return attend


def _before(window: int | None) -> int:
    """Positions before its own that a query sees, as kernels count them; -1 = all."""
    return -1 if window is None else window - 1


@cache
def choose_packed_attention(dtype: torch.dtype, head_size: int, device: torch.device) -> PackedAttention:
    """The kernel for packed rows on this machine; logged once with its reason."""
    found = "FlashAttention" if find_spec("flash_attn") is not None else "torch"
    if (problem := flash_problem(dtype, head_size, device)) is not None:
        logger.info("attention of packed rows: SDPA, row by row (%s)", problem)
        return row_by_row
    if found == "FlashAttention":
        logger.info("attention of packed rows: FlashAttention, one call (flash_attn is installed)")
        from flash_attn import flash_attn_varlen_func

        return by_flash(flash_attn_varlen_func)
    from torch.nn.attention.varlen import varlen_attn

    logger.info("attention of packed rows: torch's varlen_attn, one call (flash_attn is not installed)")
    return by_torch(varlen_attn)  # type: ignore[arg-type]  # newer releases take more arguments


def flash_problem(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    """Why kernels that know the bounds of rows do not run; None where they do."""
    if device.type != "cuda":
        return f"on {device.type} it is the fastest"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels that know bounds take bf16 and fp16, not {dtype}"
    if head_size % 8 or head_size > LARGEST_FLASH_HEAD:
        return f"a head of {head_size} is no multiple of 8 up to {LARGEST_FLASH_HEAD}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"kernels that know bounds need compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    return None


class Rotation:
    """Rotary embeddings of queries and keys: angles are looked up once for all layers of a micro-batch."""

    def __init__(
        self, frequencies: Tensor, factor: float, *, interleaved: bool, sections: tuple[int, ...] = ()
    ) -> None:
        """`frequencies` [D/2] angle per position; `factor` of cosines and sines; `interleaved`: neighbours are a pair,
        else the halves of a head; `sections`: how many frequencies turn with each axis of positions that have three.
        """
        self._sections = sections
        self._frequencies, self._factor, self._interleaved = frequencies, factor, interleaved
        self._span: Tensor | None = None
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def __call__(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both rotated, [N,H,D] or [S,B,H,D]. `positions` [N] or [3,N]; None: those of a padded row on this context
        rank.
        """
        if positions is None:
            if self._span is None or len(self._span) != len(query):
                self._span = _shared_positions(len(query), context_group()).to(query.device)
            positions = self._span
        if self._last is None or self._last[0] is not positions or self._last[1][0].dtype != query.dtype:
            self._last = positions, self._look_up(positions, query.dtype)
        cos, sin = (x.view(len(x), *[1] * (query.dim() - 2), -1) for x in self._last[1])
        return compiled(_rotated, query.device.type)(query, key, cos, sin, self._interleaved)

    def _look_up(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[N,D/2] cosines and sines."""
        self._frequencies = self._frequencies.to(positions.device)
        if positions.dim() == 1:
            angles = torch.outer(positions.float(), self._frequencies)
        else:
            of_axes = zip(positions.float(), self._frequencies.split(self._sections), strict=True)
            angles = torch.cat([torch.outer(*axis) for axis in of_axes], -1)
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        size = 2 * cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        one, other = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        pair = one * cos - other * sin, other * cos + one * sin
        if interleaved:
            pair = (torch.stack(pair, -1).flatten(-2),)
        return torch.cat((*pair, rest) if rest.shape[-1] else pair, -1)

    return turn(query), turn(key)


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
        # The queries of all ranks read this rank's keys and values: their gradients are summed.
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
        rotation: Rotation | None = None,
        local_rotation: Rotation | None = None,
        **_: object,  # head sizes of latent attention: they are read off the tensors
    ) -> None:
        super().__init__(config)
        turns = not config.no_rope_freq or not config.no_rope_freq[layer_number - 1]  # type: ignore[index]
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)  # type: ignore[arg-type]
        # Megatron's number is of positions before the query, without itself.
        self._window = config.window_size[0] + 1 if config.window_size and windowed else None
        if windowed and local_rotation is not None:
            rotation = local_rotation
        self._scale, self._rotation = softmax_scale, rotation if turns else None
        self._context_group = context_group()
        self.softmax_offset: torch.nn.Parameter | None = None
        """[H] of this rank, float: attention sinks (gpt-oss), as Transformer Engine calls them."""
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // tensor_group().size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: object = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        if self._rotation is not None:
            positions = None if packed_seq_params is None else packed_seq_params.positions
            query, key = self._rotation(query, key, positions)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params).flatten(1)
        positions = query.shape[0]
        mask = _window_mask(positions, self._window, query.device)
        if self._context_group.size() > 1:
            mask = self._zigzag_mask(positions).to(query.device)
            key, value = (
                _GatherSequence.apply(key, self._context_group),
                _GatherSequence.apply(value, self._context_group),
            )
        # SDPA takes [B,H,S,D].
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = _attend(*heads, mask=mask, scale=self._scale, sinks=self.softmax_offset)
        return out.permute(2, 0, 1, 3).reshape(positions, query.shape[1], -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """Sequences one after another along the first axis, each attending to itself only."""
        if self._context_group.size() > 1:
            return self._packed_shared(query, key, value, rows.lengths)
        if self.softmax_offset is not None:  # a key that windows do not hide, which kernels that know bounds lack
            return row_by_row(query, key, value, rows, self._scale, self._window, self.softmax_offset)
        attend = choose_packed_attention(query.dtype, query.shape[-1], query.device)
        missing = query.shape[-1] - value.shape[-1]
        if attend is row_by_row or not missing:
            return attend(query, key, value, rows, self._scale, self._window)
        # Latent attention has smaller values than keys, kernels that know bounds one size.
        padded = F.pad(value, (0, missing))
        return attend(query, key, padded, rows, self._scale, self._window)[..., :-missing]

    def _packed_shared(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """Each context rank holds its share of every sequence."""
        ranks, held, parts, start = self._context_group.size(), query.shape[0], [], 0
        key, value = (_GatherSequence.apply(x, self._context_group) for x in (key, value))
        for length in lengths:
            end = start + length
            # Gathered rank after rank: the keys of one sequence lie in as many places as there are ranks.
            seen = torch.cat([torch.arange(r * held + start, r * held + end) for r in range(ranks)]).to(key.device)
            heads = (x.transpose(0, 1)[None] for x in (query[start:end], key[seen], value[seen]))
            mask = self._zigzag_mask(length).to(query.device)
            out = _attend(*heads, mask=mask, scale=self._scale, sinks=self.softmax_offset)
            parts.append(out[0].transpose(0, 1))
            start = end
        return torch.cat(parts)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, object]:
        """The sinks, which tensor ranks share by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=tensor_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _zigzag_mask(self, positions: int) -> Tensor:
        """[S, S * ranks] bool."""
        ranks, own = self._context_group.size(), self._context_group.rank()
        of_ranks = [zigzag_positions(positions, rank, ranks) for rank in range(ranks)]
        return _visible(of_ranks[own], torch.cat(of_ranks), self._window)


def zigzag_positions(positions: int, rank: int, ranks: int) -> Tensor:
    """[S] positions of a row that a context rank holds: blocks r and 2n - 1 - r, so that causal work is even."""
    half, late = positions // 2, 2 * ranks - 1 - rank
    return torch.cat([torch.arange(rank * half, (rank + 1) * half), torch.arange(late * half, (late + 1) * half)])


def _shared_positions(positions: int, group: dist.ProcessGroup) -> Tensor:
    return torch.arange(positions) if group.size() == 1 else zigzag_positions(positions, group.rank(), group.size())


def _window_mask(positions: int, window: int | None, device: torch.device) -> Tensor | None:
    """[S, S] bool where a sliding window hides something; None = plain causal attention."""
    if window is None or positions <= window:
        return None
    order = torch.arange(positions, device=device)
    return _visible(order, order, window)


def _visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[Q, K] bool: a query sees itself and what is before it, inside the window."""
    distance = queries[:, None] - keys[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B,H,S,D]. `mask` [S,K] bool; None: causal. `sinks` [H]: the score of one key more, whose value is 0."""
    grouped, dtype = query.shape[1] != key.shape[1], query.dtype
    if not query.is_cuda:  # the backward pass of torch's CPU kernel takes nine times as long in bfloat16
        query, key, value = query.float(), key.float(), value.float()
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if mask is None:
            mask = _visible(*(torch.arange(x.shape[2], device=x.device) for x in (query, key)), window=None)
        # Such a key, first of all and seen by every query: 1 where the others are 0, in a channel where queries have
        # the score. So gradients of everything are SDPA's.
        mask = F.pad(mask, (1, 0), value=True)
        score = (sinks.to(query.dtype) / scale).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        query = torch.cat((query, F.pad(score, (0, _SINK_CHANNELS - 1))), -1)
        sink = torch.zeros_like(query[:, : key.shape[1], :1])
        sink[..., key.shape[-1]] = 1
        key = torch.cat((sink, F.pad(key, (0, _SINK_CHANNELS))), 2)
        value = F.pad(value, (0, 0, 1, 0))
    # SDPA refuses a mask beside is_causal.
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    ).to(dtype)
