"""Layers without Transformer Engine: RMSNorm that works under sequence parallelism, attention by torch's SDPA.

Shape letters: S positions, B rows, H heads, D head size, N packed tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from roll_async.trainer.megatron.ranks import context_group
from roll_async.trainer.megatron.state import engine_import

logger = logging.getLogger(__name__)

LONGEST_SHARED_ROW = 16384
"""Positions of a row under context parallelism without Transformer Engine: a mask of S * S / ranks is formed."""


FusedNorm = Callable[[Tensor, Tensor, Sequence[int], float], Tensor]
"""(input, weight, normalized shape, epsilon)."""


@cache
def fused_norm() -> FusedNorm | None:
    """Apex's RMSNorm in one kernel, forward and backward; None: torch's own."""
    if (missing := engine_import.apex_problem(cuda=torch.cuda.is_available())) is not None:
        logger.info("norms of local layers: torch's (Apex: %s)", missing)
        return None
    logger.info("norms of local layers: Apex's (NVIDIA Apex is installed)")
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine


class TorchRMSNorm(torch.nn.RMSNorm):
    """Megatron's own wrapper refuses sequence parallelism; its gradient only needs the all-reduce this attribute asks
    for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._fused, self._epsilon = fused_norm(), eps

    def forward(self, x: Tensor) -> Tensor:
        if self._fused is None:
            return super().forward(x)
        return self._fused(x, self.weight, self.normalized_shape, self._epsilon)


class LatentRMSNorm(TorchRMSNorm):
    """The norms inside latent attention: transformers fixes their epsilon, whatever rms_norm_eps says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


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
        **_: object,  # head sizes of latent attention: they are read off the tensors
    ) -> None:
        super().__init__(config)
        self._scale = softmax_scale
        # Megatron's number is of positions before the query, without itself.
        self._window = config.window_size[0] + 1 if config.window_size else None
        self._context_group = context_group()

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
        positions = query.shape[0]
        mask = self._window_mask(positions, query.device)
        if self._context_group.size() > 1:
            mask = self._zigzag_mask(positions).to(query.device)
            key, value = (
                _GatherSequence.apply(key, self._context_group),
                _GatherSequence.apply(value, self._context_group),
            )
        # SDPA takes [B,H,S,D].
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), mask=mask)
        return out.permute(2, 0, 1, 3).reshape(positions, query.shape[1], -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """Sequences one after another along the first axis, each attending to itself only."""
        ranks = self._context_group.size()
        bounds = [bound // ranks for bound in packed.cu_seqlens_q.tolist()]  # this rank's share of each sequence
        attend = self._packed_alone if ranks == 1 else self._packed_shared
        out = torch.cat(attend(query, key, value, bounds))
        return out.reshape(out.shape[0], -1)

    def _packed_alone(self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Neighbours of one length in one call."""
        lengths, parts = (end - begin for begin, end in zip(bounds, bounds[1:], strict=False)), []
        counts = [(length, len(list(same))) for length, same in groupby(lengths)]
        # The gradient of a slice is as long as the whole, once for each length; that of a split is one concatenation.
        pieces = (x.split([length * count for length, count in counts]) for x in (query, key, value))
        for (length, _), *piece in zip(counts, *pieces, strict=True):
            heads = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in piece)
            out = self._attend(*heads, mask=self._window_mask(length, query.device))
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return parts

    def _packed_shared(self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Each context rank holds its share of every sequence."""
        ranks, held, parts = self._context_group.size(), query.shape[0], []
        key, value = (_GatherSequence.apply(x, self._context_group) for x in (key, value))
        for start, end in zip(bounds, bounds[1:], strict=False):
            # Gathered rank after rank: the keys of one sequence lie in as many places as there are ranks.
            seen = torch.cat([torch.arange(r * held + start, r * held + end) for r in range(ranks)]).to(key.device)
            heads = (x.transpose(0, 1)[None] for x in (query[start:end], key[seen], value[seen]))
            out = self._attend(*heads, mask=self._zigzag_mask(end - start).to(query.device))
            parts.append(out[0].transpose(0, 1))
        return parts

    def _zigzag_mask(self, positions: int) -> Tensor:
        """[S, S * ranks] bool: rank r holds blocks r and 2n - 1 - r, so that causal work is even."""
        ranks, half = self._context_group.size(), positions // 2

        def of(rank: int) -> Tensor:
            late = 2 * ranks - 1 - rank
            return torch.cat(
                [torch.arange(rank * half, (rank + 1) * half), torch.arange(late * half, (late + 1) * half)]
            )

        keys = torch.cat([of(rank) for rank in range(ranks)])
        return self._visible(of(self._context_group.rank()), keys)

    def _window_mask(self, positions: int, device: torch.device) -> Tensor | None:
        """[S, S] bool where a sliding window hides something; None = plain causal attention."""
        if self._window is None or positions <= self._window:
            return None
        order = torch.arange(positions, device=device)
        return self._visible(order, order)

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[Q, K] bool: a query sees itself and what is before it, inside the window."""
        distance = queries[:, None] - keys[None]
        visible = distance >= 0
        return visible if self._window is None else visible & (distance < self._window)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        grouped, dtype = query.shape[1] != key.shape[1], query.dtype
        if not query.is_cuda:  # the backward pass of torch's CPU kernel takes nine times as long in bfloat16
            query, key, value = query.float(), key.float(), value.float()
        # SDPA refuses a mask beside is_causal.
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=grouped
        ).to(dtype)


class SandwichLayer(TransformerLayer):
    """Normalises the outputs of attention and MLP before they join the residual (GLM-4)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        norm: type[torch.nn.Module],
        **kwargs: object,
    ) -> None:
        super().__init__(config, submodules, **kwargs)  # type: ignore[arg-type]
        self.post_self_attn_layernorm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        self.post_mlp_layernorm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attn_bda = _add_normed(self.post_self_attn_layernorm)
        self.mlp_bda = _add_normed(self.post_mlp_layernorm)


def _add_normed(norm: torch.nn.Module) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Megatron's bias-dropout-add with a norm before it."""

    def choose(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)
        return lambda output_with_bias, residual, dropout: add(
            (norm(output_with_bias[0]), output_with_bias[1]), residual, dropout
        )

    return choose


class LayerChoice(Enum):
    """What layers are made of; the value is for the log."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    ENGINE_ATTENTION = "local, with Transformer Engine's attention"

    @property
    def all_engine(self) -> bool:
        """Whether linear layers and experts are Transformer Engine's, too."""
        return self is LayerChoice.TRANSFORMER_ENGINE

    @property
    def engine_attention(self) -> bool:
        """Whether the kernels of attention are Transformer Engine's."""
        return self is not LayerChoice.LOCAL


def block_spec(
    config: TransformerConfig, *, layers: LayerChoice, stage: int | None = None, sandwich_norms: bool = False
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers. `stage` counts the chunks of an interleaved pipeline."""
    whole = layers.all_engine
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=whole, normalization="RMSNorm", vp_stage=stage)
    if not whole:
        # Megatron's choice for the final norm refuses sequence parallelism. Its annotation means a class.
        block.layer_norm = TorchRMSNorm  # pyright: ignore[reportAttributeAccessIssue]
    assert block.layer_specs is not None
    # Layers of one kind share a spec: each is changed once.
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        if not whole:
            _make_local(layer, config, engine_attention=layers.engine_attention)
        if sandwich_norms:
            layer.module, layer.params = SandwichLayer, {**layer.params, "norm": block.layer_norm}
    return block


def _make_local(layer: ModuleSpec, config: TransformerConfig, *, engine_attention: bool) -> None:
    """Replace norms and core attention, and store parameters under the names that Transformer Engine layers use, so
    that checkpoints do not depend on the implementation.
    """
    parts = layer.submodules
    assert isinstance(parts, TransformerLayerSubmodules)
    assert isinstance(parts.self_attention, ModuleSpec) and isinstance(parts.mlp, ModuleSpec)
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
    attention = parts.self_attention.submodules
    assert isinstance(attention, SelfAttentionSubmodules | MLASelfAttentionSubmodules)
    attention.core_attention = TEDotProductAttention if engine_attention else SdpaAttention
    stored = {}
    if isinstance(attention, MLASelfAttentionSubmodules):
        if not HAVE_TE:
            # 0.16.1 takes the names being importable for Transformer Engine being there, and then fails on None.
            multi_latent_attention.HAVE_TE = False
        attention.q_layernorm = attention.kv_layernorm = LatentRMSNorm
        # Whole on every rank, as in Transformer Engine's layers. Split over ranks, as Megatron's own local layers have
        # it, the part of the gradient that other ranks' heads send to the shared rotary key is lost.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        stored["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        stored["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        stored["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    if parts.mlp.module is MoELayer:
        # Transformer Engine's product, for the routers. Without that package, 0.16.1 asks for it and never names it.
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
    else:
        stored["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts.sharded_state_dict_keys_map = stored


@cache
def choose_layers(implementation: str, *, adapters: bool = False) -> LayerChoice:
    """What `transformer_impl` (local, transformer_engine or auto) comes to on this machine for a model with or without
    LoRA adapters; logged once with its reason. Raises ValueError where Transformer Engine is asked for and cannot be.
    """
    if implementation == "local":
        logger.info("layers: local (transformer_impl: local)")
        return LayerChoice.LOCAL
    missing = engine_import.problem()
    if implementation == "transformer_engine" and missing:
        raise ValueError(f"transformer_impl=transformer_engine: {missing}; install it, or use auto")
    if implementation == "auto" and missing is None and not torch.cuda.is_available():
        missing = "no CUDA device"
    if missing:
        layers, reason = LayerChoice.LOCAL, missing
    elif adapters:
        # A sum with the adapter's path must be rounded once, in one product, which Transformer Engine's layers keep to
        # themselves. Their product is the same cuBLAS call.
        layers, reason = LayerChoice.ENGINE_ATTENTION, "lora_rank > 0: adapters are on local linear layers"
    else:
        layers, reason = (
            LayerChoice.TRANSFORMER_ENGINE,
            f"transformer_impl: {implementation}, and Transformer Engine imports",
        )
    logger.info("layers: %s (%s)", layers.value, reason)
    return layers
