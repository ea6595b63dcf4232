"""DeepSeek-V3 (and R1): latent attention, a shared expert, sigmoid routing within the best groups of experts.

The router chooses by score plus a correction bias and weighs by score alone. The bias is not a parameter: it is loaded,
kept in float32 and exported, and changes only with `extra.moe_router_bias_update_rate`. The layer for multi-token
prediction after the last one is left out: neither scoring nor the policy loss uses it.
"""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import DENSE_MLP_NORM, EMBEDDING, MLP, OLD_BUFFERS, OUTPUT_PROJECTION
from roll_async.checkpoint.hf_names.moe import MOE_MLP_NORM, experts, router, routing_fields, shared_experts
from roll_async.checkpoint.hf_names.table import Family, LayerRange, ParameterRow, moe_layers
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

_CORRECTION_BIAS = ParameterRow(
    megatron="decoder.layers.{i}.mlp.router.expert_bias",
    hf=("model.layers.{i}.mlp.gate.e_score_correction_bias",),
    layers=LayerRange.MOE,
    float32=True,
)


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, rope_interleave=True, scoring_func="sigmoid", topk_method="noaux_tc",
                  norm_topk_prob=True, moe_layer_freq=1)  # fmt: skip
    layers, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace")
    expert_size = config.integer("moe_intermediate_size")
    return {
        **_attention_fields(config),
        **_rotary_fields(config),
        **routing_fields(
            config,
            num_experts=config.integer("n_routed_experts", "num_local_experts"),
            expert_size=expert_size,
            normalised=True,
        ),
        "moe_layer_freq": moe_layers(layers, [i >= dense for i in range(layers)]),
        "moe_shared_expert_intermediate_size": config.integer("n_shared_experts") * expert_size,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor"),
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        **_group_fields(config),
    }


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


def _group_fields(config: HfConfig) -> dict[str, object]:
    """A token's experts lie in its best groups, which bounds the nodes it is sent to."""
    groups, chosen = config.integer("n_group", default=1), config.integer("topk_group", default=1)
    if groups == 1:
        return {}
    if config.integer("num_experts_per_tok") // chosen != 2:
        # transformers ranks groups by their two best experts, Megatron by their (experts per token / groups) best.
        raise ValueError(f"{config.source}: num_experts_per_tok must be twice topk_group for Megatron to route alike")
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    rows=(
        *EMBEDDING, *_LATENT_ATTENTION, *MOE_MLP_NORM, *DENSE_MLP_NORM, *MLP, *router("mlp.gate"), _CORRECTION_BIAS,
        *experts("mlp.experts"), *shared_experts("mlp.shared_experts"),
    ),
    fields=_fields,
    unused=(*OLD_BUFFERS, "model.layers.{n}.*"),  # the layer for multi-token prediction
)  # fmt: skip
