"""Layers without Transformer Engine: norms that work under sequence parallelism, attention of attention.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TEDotProductAttention
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from roll_async.checkpoint.hf_names.table import Family
from roll_async.trainer.megatron import ranks
from roll_async.trainer.megatron.model.attention import Rotation, SdpaAttention
from roll_async.trainer.megatron.model.delta_net import DeltaNet
from roll_async.trainer.megatron.state import engine_import

logger = logging.getLogger(__name__)

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


class LocalNorm(torch.nn.Module):
    """RMSNorm, or LayerNorm with a bias where Megatron's config says so. Megatron's own wrapper refuses sequence
    parallelism; its gradient only needs the all-reduce that the attribute asks for.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        biased = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight)) if biased else None
        for part in self.parameters():
            part.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._fused, self._epsilon = None if biased else fused_norm(), eps
        # The stored weight is that much less than the factor (Gemma, Nemotron).
        self._offset = float(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.bias is not None:
            # The factor is rounded to the model's dtype, as Transformers and vLLM have it.
            return torch.nn.functional.layer_norm(x, shape, self.weight + self._offset, self.bias, self._epsilon)
        if self._offset:
            weight = self.weight.float() + self._offset
            return torch.nn.functional.rms_norm(x.float(), shape, weight, self._epsilon).to(x.dtype)
        if self._fused is None:
            return torch.nn.functional.rms_norm(x, shape, self.weight, self._epsilon)
        return self._fused(x, self.weight, shape, self._epsilon)


class LatentRMSNorm(LocalNorm):
    """The norms inside latent attention: transformers fixes their epsilon, whatever rms_norm_eps says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: object) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class ProjectionRMSNorm(torch.nn.Module):
    """Normalises the queries (or keys) of all heads together, of which a tensor-parallel rank has a part (OLMoE,
    MiniMax-M2). Takes and gives [..., heads of the rank, size].

    Every rank holds the whole weight: Megatron sums the gradients of what is called q_layernorm and k_layernorm over
    tensor-parallel ranks, and each of them has those of its own part.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, num_heads: int, eps: float = 1e-5, **_: object
    ) -> None:
        """`hidden_size` of a head; `num_heads` of the whole model."""
        super().__init__()
        self._group, self._epsilon = ranks.tensor_group(), eps
        self.weight = torch.nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        squares = _SumOfRanks.apply(exact.square().sum((-2, -1), keepdim=True), self._group)
        normed = exact * torch.rsqrt(squares / len(self.weight) + self._epsilon)
        own = self.weight.chunk(self._group.size())[self._group.rank()]
        return own.view(x.shape[-2:]) * normed.to(x.dtype)


class _SumOfRanks(torch.autograd.Function):
    """All-reduce whose result every rank goes on with: gradients of all of them are summed as well."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ANN001
        ctx.group = group
        if group.size() > 1:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        if ctx.group.size() > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class NormedOutputLayer(TransformerLayer):
    """Normalises the outputs of attention and MLP before they join the residual (GLM-4, OLMo-2)."""

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
    config: TransformerConfig,
    family: Family,
    *,
    layers: LayerChoice,
    rotation: Rotation | None,
    local_rotation: Rotation | None = None,
    stage: int | None = None,
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers. `rotation` of local attention; None: Megatron rotates. `local_rotation`: that of
    windowed layers, where it is another. `stage` counts the chunks of an interleaved pipeline.
    """
    whole = layers.all_engine
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=whole, normalization="RMSNorm", vp_stage=stage)
    if not whole:
        # Megatron's choice for the final norm refuses sequence parallelism. Its annotation means a class.
        block.layer_norm = LocalNorm  # pyright: ignore[reportAttributeAccessIssue]
    assert block.layer_specs is not None
    # Layers of one kind share a spec: each is changed once.
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        if not whole:
            core = (
                TEDotProductAttention
                if layers.engine_attention
                else ModuleSpec(module=SdpaAttention, params={"rotation": rotation, "local_rotation": local_rotation})
            )
            _make_local(layer, config, core)
        parts = layer.submodules
        assert isinstance(parts, TransformerLayerSubmodules)
        assert isinstance(parts.self_attention, ModuleSpec)
        attention = parts.self_attention.submodules
        if family.projection_norms:
            assert isinstance(attention, SelfAttentionSubmodules)
            queries, keys = {"num_heads": config.num_attention_heads}, {"num_heads": config.num_query_groups}
            attention.q_layernorm = ModuleSpec(module=ProjectionRMSNorm, params=queries)
            attention.k_layernorm = ModuleSpec(module=ProjectionRMSNorm, params=keys)
        if not family.input_norms:
            assert isinstance(attention, SelfAttentionSubmodules)
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
            if whole:  # there a norm is part of the layer behind it
                attention.linear_qkv = _parts_of_mlp(parts.mlp).linear_fc1 = TEColumnParallelLinear
        if family.output_norms:
            layer.module, layer.params = NormedOutputLayer, {**layer.params, "norm": block.layer_norm}
    if config.linear_attention_freq is not None:
        first = get_transformer_layer_offset(config, vp_stage=stage)
        block.layer_specs = [
            _delta_layer(layer) if is_delta else layer
            for layer, is_delta in zip(block.layer_specs, config.linear_attention_freq[first:], strict=False)
        ]
    return block


def _delta_layer(layer: ModuleSpec) -> ModuleSpec:
    """The same layer with a gated delta net in the place of attention."""
    parts = layer.submodules
    assert isinstance(parts, TransformerLayerSubmodules)
    stored = {**parts.sharded_state_dict_keys_map, "input_layernorm.": "self_attention.in_proj.layer_norm_"}
    parts = replace(parts, self_attention=ModuleSpec(module=DeltaNet), sharded_state_dict_keys_map=stored)
    return replace(layer, submodules=parts)


def _make_local(layer: ModuleSpec, config: TransformerConfig, core_attention: ModuleSpec | type) -> None:
    """Replace norms and core attention, and store parameters under the names that Transformer Engine layers use, so
    that checkpoints do not depend on the implementation.
    """
    parts = layer.submodules
    assert isinstance(parts, TransformerLayerSubmodules)
    assert isinstance(parts.self_attention, ModuleSpec)
    parts.input_layernorm = parts.pre_mlp_layernorm = LocalNorm
    attention = parts.self_attention.submodules
    assert isinstance(attention, SelfAttentionSubmodules | MLASelfAttentionSubmodules)
    attention.core_attention = core_attention
    stored = {}
    if isinstance(attention, MLASelfAttentionSubmodules):
        if not HAVE_TE:
            # 0.16 takes the names being importable for Transformer Engine being there, and then fails on None. Later
            # ones know whether it is there, and take Megatron's own Linear for a part of it.
            multi_latent_attention.HAVE_TE, multi_latent_attention.Linear = False, Linear
        attention.kv_layernorm = LatentRMSNorm
        # Whole queries have no norm, and Megatron refuses one.
        attention.q_layernorm = LatentRMSNorm if config.q_lora_rank is not None else IdentityOp
        # Whole on every rank, as in Transformer Engine's layers. Split over ranks, as Megatron's own local layers have
        # it, the part of the gradient that other ranks' heads send to the shared rotary key is lost.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        stored["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        stored["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        stored["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = LocalNorm
    if not isinstance(_parts_of_mlp(parts.mlp), MLPSubmodules):
        # Transformer Engine's product, for the routers. Without that package, 0.16.1 asks for it and never names it.
        moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]
    else:
        stored["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    parts.sharded_state_dict_keys_map = stored


def _parts_of_mlp(mlp: Any) -> Any:
    """`MLPSubmodules`, or those of experts, of a layer's MLP: a spec, or (megatron-core >= 0.17) what builds it."""
    if isinstance(mlp, ModuleSpec):
        return mlp.submodules
    assert isinstance(mlp, partial)
    return mlp.keywords["submodules"]


@cache
def choose_layers(implementation: str, *, adapters: bool = False, local_only: str | None = None) -> LayerChoice:
    """What `transformer_impl` (local, transformer_engine or auto) comes to on this machine for a model with or without
    LoRA adapters; logged once with its reason. `local_only`: why the model has local layers alone, if it has. Raises
    ValueError where Transformer Engine is asked for and cannot be.
    """
    if implementation == "local":
        logger.info("layers: local (transformer_impl: local)")
        return LayerChoice.LOCAL
    missing = engine_import.problem()
    if implementation == "transformer_engine" and missing:
        raise ValueError(f"transformer_impl=transformer_engine: {missing}; install it, or use auto")
    if implementation == "transformer_engine" and local_only:
        raise ValueError(f"transformer_impl=transformer_engine: {local_only}; use auto, or local")
    if implementation == "auto" and missing is None and not torch.cuda.is_available():
        missing = "no CUDA device"
    if missing or local_only:
        layers, reason = LayerChoice.LOCAL, missing or local_only
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
