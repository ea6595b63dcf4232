"""GLM's families. Half of each head rotates. GLM-4-9B and GLM-4-0414 (9B, 32B) are dense, with interleaved pairs and
gate and up in one tensor; GLM-4.5 to 4.7 are mixtures of experts with DeepSeek-V3's routing, as is Solar Open without
dense layers and norms of queries and keys.
"""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    FUSED_MLP,
    MLP,
    NORMS,
    OLD_BUFFERS,
    OPTIONAL_QK_NORM,
    QKV_BIAS,
)
from roll_async.checkpoint.hf_names.moe import (
    CORRECTION_BIAS,
    MOE_NORMS,
    NEXT_TOKENS,
    TINY_GROUPED,
    experts,
    first_dense,
    grouped_routing_fields,
    router,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import Family, ParameterRow

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

_POST_NORMS = (
    ParameterRow(megatron=f"{_L}.post_self_attn_layernorm.weight", hf=(f"{_H}.post_self_attn_layernorm.weight",)),
    ParameterRow(megatron=f"{_L}.post_mlp_layernorm.weight", hf=(f"{_H}.post_mlp_layernorm.weight",)),
)

_EXPERTS = (*router("mlp.gate"), CORRECTION_BIAS, *experts("mlp.experts"), *shared_experts("mlp.shared_experts"))


def _dense_fields(config: HfConfig) -> dict[str, object]:
    return {"add_qkv_bias": config.flag("attention_bias", default=True), "rotary_interleaved": True}


def _moe_fields(config: HfConfig) -> dict[str, object]:
    return {
        **grouped_routing_fields(config, first_dense(config)),
        "add_qkv_bias": config.flag("attention_bias"),
        "qk_layernorm": config.flag("use_qk_norm"),
    }


def _solar_fields(config: HfConfig) -> dict[str, object]:
    return {
        **grouped_routing_fields(config, [True] * config.integer("num_hidden_layers")),
        "add_qkv_bias": config.flag("attention_bias"),
    }


FAMILIES = (
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP),
        fields=_dense_fields,
        rotary_fraction=0.5,
        unused=OLD_BUFFERS,
        tiny={"glm": {"head_dim": 16}},
    ),
    Family(
        name="glm4",  # with a norm behind attention and MLP too
        architectures=("Glm4ForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *_POST_NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP),
        fields=_dense_fields,
        output_norms=True,
        rotary_fraction=0.5,
        unused=OLD_BUFFERS,
        tiny={"glm 4": {"head_dim": 16}},
    ),
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        rows=(*EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QKV_BIAS, *OPTIONAL_QK_NORM, *MLP, *_EXPERTS),
        fields=_moe_fields,
        rotary_fraction=0.5,
        unused=(NEXT_TOKENS,),
        tiny={
            "glm 4.5": {**TINY_GROUPED, "attention_bias": True, "first_k_dense_replace": 1, "use_qk_norm": True},
        },
    ),
    Family(
        name="solar_open",
        architectures=("SolarOpenForCausalLM",),
        rows=(*EMBEDDING, *MOE_NORMS, *ATTENTION, *QKV_BIAS, *_EXPERTS),
        fields=_solar_fields,
        tiny={"solar open": {**TINY_GROUPED, "head_dim": 32, "routed_scaling_factor": 1.5}},
    ),
)
