"""Families with latent attention: DeepSeek-V3 (and R1, Kimi-K2) and GLM-4.7-Flash, mixtures of experts with a shared
one; Youtu-LLM, dense.
"""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import DENSE_MLP_NORM, EMBEDDING, MLP, OLD_BUFFERS, OUTPUT_PROJECTION
from roll_async.checkpoint.hf_names.moe import (
    CORRECTION_BIAS,
    MOE_MLP_NORM,
    NEXT_TOKENS,
    TINY_GROUPED,
    experts,
    first_dense,
    grouped_routing_fields,
    router,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import YARN, Family, ParameterRow
from roll_async.checkpoint.rotary import Rotary

_L, _H = "decoder.layers.{i}.self_attention", "model.layers.{i}.self_attn"

_LATENT_ATTENTION = (
    # The input norm is not fused into a projection: two of them read it.
    ParameterRow(megatron="decoder.layers.{i}.input_layernorm.weight", hf=("model.layers.{i}.input_layernorm.weight",)),
    ParameterRow(
        megatron=f"{_L}.linear_q_proj.weight",
        hf=(f"{_H}.q_proj.weight",),
        tp_dim=0,
        optional=True,
        needed_by="not q_lora_rank",
    ),
    ParameterRow(
        megatron=f"{_L}.linear_q_down_proj.weight",
        hf=(f"{_H}.q_a_proj.weight",),
        optional=True,
        needed_by="q_lora_rank",
    ),
    ParameterRow(
        megatron=f"{_L}.q_layernorm.weight",
        te=f"{_L}.linear_q_up_proj.layer_norm_weight",
        hf=(f"{_H}.q_a_layernorm.weight",),
        optional=True,
        needed_by="q_lora_rank",
    ),
    ParameterRow(
        megatron=f"{_L}.linear_q_up_proj.weight",
        hf=(f"{_H}.q_b_proj.weight",),
        tp_dim=0,
        optional=True,
        needed_by="q_lora_rank",
    ),
    ParameterRow(megatron=f"{_L}.linear_kv_down_proj.weight", hf=(f"{_H}.kv_a_proj_with_mqa.weight",)),
    ParameterRow(
        megatron=f"{_L}.kv_layernorm.weight",
        te=f"{_L}.linear_kv_up_proj.layer_norm_weight",
        hf=(f"{_H}.kv_a_layernorm.weight",),
    ),
    ParameterRow(megatron=f"{_L}.linear_kv_up_proj.weight", hf=(f"{_H}.kv_b_proj.weight",), tp_dim=0),
    *OUTPUT_PROJECTION,
)


def _fields(config: HfConfig) -> dict[str, object]:
    # first_k_dense_replace says which layers have experts, and no other key may.
    config.require(moe_layer_freq=1)
    return {**_latent_fields(config), **grouped_routing_fields(config, first_dense(config))}


def _lite_fields(config: HfConfig) -> dict[str, object]:
    layers = config.integer("num_hidden_layers")
    kinds = config.values.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    return {**_latent_fields(config), **grouped_routing_fields(config, [kind == "sparse" for kind in kinds])}


def _latent_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, rope_interleave=True)
    return {**_attention_fields(config), **_rotary_fields(config)}


def _attention_fields(config: HfConfig) -> dict[str, object]:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        # After the up projection each head has its own key and value.
        "num_query_groups": config.integer("num_attention_heads"),
        "q_lora_rank": config.integer("q_lora_rank") if "q_lora_rank" in config else None,
        "kv_lora_rank": config.integer("kv_lora_rank"),
        "qk_head_dim": config.integer("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
        "kv_channels": config.integer("v_head_dim"),
    }


def _rotary_fields(config: HfConfig) -> dict[str, object]:
    rotary = Rotary.of(config)
    if rotary.kind == "default":
        # Megatron's defaults for latent attention are those of a scaled model: yarn, factor 40.
        return {"rope_type": "rope", "rotary_base": rotary.base, "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    given = rotary.parameters
    if rotary.kind != "yarn" or "attention_factor" in given or ("mscale" in given) != ("mscale_all_dim" in given):
        raise ValueError(f"{given.source}: latent attention knows rope_type default, and yarn with mscale or without")
    return {
        "rope_type": "yarn",
        "rotary_base": rotary.base,
        "rotary_scaling_factor": given.number("factor"),
        "original_max_position_embeddings": given.integer("original_max_position_embeddings"),
        "beta_fast": given.number("beta_fast", default=32.0),
        "beta_slow": given.number("beta_slow", default=1.0),
        "mscale": given.number("mscale", default=1.0),
        "mscale_all_dim": given.number("mscale_all_dim", default=0.0),
    }


_TINY = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip
_TINY_V3 = {**TINY_GROUPED, **_TINY, "first_k_dense_replace": 1}
_ROWS = (
    *EMBEDDING, *_LATENT_ATTENTION, *MOE_MLP_NORM, *DENSE_MLP_NORM, *MLP, *router("mlp.gate"), CORRECTION_BIAS,
    *experts("mlp.experts"), *shared_experts("mlp.shared_experts"),
)  # fmt: skip

FAMILIES = (
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        rows=_ROWS,
        fields=_fields,
        unused=(*OLD_BUFFERS, NEXT_TOKENS),
        tiny={
            "deepseek v3": _TINY_V3,
            "deepseek v3 yarn": {
                **_TINY_V3, "q_lora_rank": None,
                "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
            },
        },
    ),
    Family(
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        rows=_ROWS,
        fields=_lite_fields,
        unused=(NEXT_TOKENS,),
        tiny={"glm 4.7 flash": {**TINY_GROUPED, **_TINY}},
    ),
    Family(
        name="youtu",
        architectures=("YoutuForCausalLM",),
        rows=(*EMBEDDING, *_LATENT_ATTENTION, *DENSE_MLP_NORM, *MLP),
        fields=_latent_fields,
        tied_by_default=True,
        tiny={"youtu": {**_TINY, "tie_word_embeddings": True}},
    ),
)  # fmt: skip
