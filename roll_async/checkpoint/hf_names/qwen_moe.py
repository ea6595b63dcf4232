"""Qwen's mixtures of experts: Qwen2-MoE has a shared expert behind a gate of its own, Qwen3-MoE routed experts only and
normalised queries and keys. Some layers of either may be dense. Qwen3-Next and Qwen3.5-MoE, text alone: a gated delta
net in most layers (qwen.py), and Qwen2-MoE's experts.
"""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DELTA_NET,
    DENSE_MLP_NORM,
    EMBEDDING,
    GATED_ATTENTION,
    MLP,
    QK_NORM,
    QKV_BIAS,
    TINY_DELTA,
    delta_fields,
    window_fields,
)
from roll_async.checkpoint.hf_names.moe import (
    MOE_MLP_NORM,
    MOE_NORMS,
    TINY_EXPERTS,
    experts,
    qwen_routing_fields,
    router,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import Family, LayerRange, ParameterRow, Transform

_SHARED_GATE = ParameterRow(
    megatron="decoder.layers.{i}.mlp.shared_experts.gate_weight",
    hf=("model.layers.{i}.mlp.shared_expert_gate.weight",),
    layers=LayerRange.MOE,
)


_GROUPED_DELTA_NET = tuple(
    replace(
        row,
        hf=tuple(f"model.layers.{{i}}.linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba")),
        transform=Transform.DELTA_GROUPED,
    )
    if row.transform is Transform.DELTA_INPUT
    else row
    for row in DELTA_NET
)


def _shared_fields(config: HfConfig) -> dict[str, object]:
    return {
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _qwen2_fields(config: HfConfig) -> dict[str, object]:
    config.require(use_sliding_window=False)
    biased = config.flag("qkv_bias", default=True)
    return {**qwen_routing_fields(config), **_shared_fields(config), "add_qkv_bias": biased}


def _delta_fields(config: HfConfig) -> dict[str, object]:
    return {**qwen_routing_fields(config, normalised=True), **_shared_fields(config), **delta_fields(config)}


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
    Family(
        name="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        rows=(
            *EMBEDDING, *GATED_ATTENTION, *_GROUPED_DELTA_NET, *MOE_MLP_NORM, *DENSE_MLP_NORM, *MLP,
            *router("mlp.gate"), *experts("mlp.experts"), *shared_experts("mlp.shared_expert"), _SHARED_GATE,
        ),
        fields=_delta_fields,
        rotary_fraction=0.25,
        unused=("mtp.*",),
        tiny={
            "qwen3 next": {
                **TINY_EXPERTS, **TINY_DELTA, "shared_expert_intermediate_size": 48, "mlp_only_layers": [2],
            },
        },
    ),
    Family(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM",),
        rows=(
            *EMBEDDING, *GATED_ATTENTION, *DELTA_NET, *MOE_MLP_NORM, *router("mlp.gate"),
            *experts("mlp.experts"), *shared_experts("mlp.shared_expert"), _SHARED_GATE,
        ),
        fields=_delta_fields,
        rotary_fraction=0.25,
        unused=("mtp.*",),
        tiny={"qwen3.5 moe": {**TINY_EXPERTS, **TINY_DELTA, "shared_expert_intermediate_size": 48}},
    ),
)  # fmt: skip
