"""Qwen's mixtures of experts: Qwen2-MoE has a shared expert behind a gate of its own, Qwen3-MoE routed experts only and
normalised queries and keys. Some layers of either may be dense.
"""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    MLP,
    QK_NORM,
    QKV_BIAS,
    window_fields,
)
from roll_async.checkpoint.hf_names.moe import (
    MOE_NORMS,
    TINY_EXPERTS,
    experts,
    qwen_routing_fields,
    router,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import Family, LayerRange, ParameterRow

_SHARED_GATE = ParameterRow(
    megatron="decoder.layers.{i}.mlp.shared_experts.gate_weight",
    hf=("model.layers.{i}.mlp.shared_expert_gate.weight",),
    layers=LayerRange.MOE,
)


def _qwen2_fields(config: HfConfig) -> dict[str, object]:
    config.require(use_sliding_window=False)
    return {
        **qwen_routing_fields(config),
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        "add_qkv_bias": config.flag("qkv_bias", default=True),
    }


def _qwen3_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {**qwen_routing_fields(config), "qk_layernorm": True, **window_fields(config)}


FAMILIES = (
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QKV_BIAS, *MLP, *router("mlp.gate"),
            *experts("mlp.experts"), *shared_experts("mlp.shared_expert"), _SHARED_GATE,
        ),
        fields=_qwen2_fields,
        tiny={"qwen2 moe": {**TINY_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}},
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QK_NORM, *MLP, *router("mlp.gate"),
            *experts("mlp.experts"),
        ),
        fields=_qwen3_fields,
        tiny={"qwen3 moe": {**TINY_EXPERTS, "head_dim": 16, "norm_topk_prob": True}},
    ),
)  # fmt: skip
