"""Further mixtures of experts. OLMoE and MiniMax-M2 normalise queries, and keys, of all heads together; dots.llm1 has
Qwen3's attention and DeepSeek-V3's experts.
"""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    MLP,
    QK_NORM,
    window_fields,
)
from roll_async.checkpoint.hf_names.moe import (
    CORRECTION_BIAS,
    MOE_NORMS,
    SIGMOID_ROUTING,
    TINY_GROUPED,
    experts,
    first_dense,
    grouped_routing_fields,
    router,
    routing_fields,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import Family

_CORRECTION_BIAS = replace(CORRECTION_BIAS, hf=("model.layers.{i}.block_sparse_moe.e_score_correction_bias",))


def _dots_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {**grouped_routing_fields(config, first_dense(config)), "qk_layernorm": True, **window_fields(config)}


def _olmoe_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    if config.values.get("clip_qkv") is not None:
        raise ValueError(f"{config.source}: clip_qkv={config.values['clip_qkv']!r} is not supported, only null is")
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_experts", "num_local_experts"),
            expert_size=config.integer("intermediate_size"),  # config.json has no size of experts alone
            normalised=config.flag("norm_topk_prob"),
        ),
        "qk_layernorm": True,
    }


def _minimax_fields(config: HfConfig) -> dict[str, object]:
    config.require(scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True,
                   shared_intermediate_size=0, rotary_dim=config.integer("head_dim") // 2)  # fmt: skip
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_local_experts", "num_experts"),
            expert_size=config.integer("intermediate_size"),
            normalised=True,
        ),
        **SIGMOID_ROUTING,
        "qk_layernorm": True,
    }


FAMILIES = (
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *ATTENTION, *QK_NORM, *router("mlp.gate"), *experts("mlp.experts"),
        ),
        fields=_olmoe_fields,
        projection_norms=True,
        tiny={"olmoe": {"num_experts": 4, "num_experts_per_tok": 2}},
    ),
    Family(
        name="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *ATTENTION, *QK_NORM, *router("block_sparse_moe.gate"), _CORRECTION_BIAS,
            *experts("block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
        ),
        fields=_minimax_fields,
        projection_norms=True,
        rotary_fraction=0.5,
        tiny={"minimax m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16}},
    ),
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QK_NORM, *MLP, *router("mlp.gate"), CORRECTION_BIAS,
            *experts("mlp.experts"), *shared_experts("mlp.shared_experts"),
        ),
        fields=_dots_fields,
        tiny={"dots": {**TINY_GROUPED, "head_dim": 32, "first_k_dense_replace": 1, "max_window_layers": 4}},
    ),
)  # fmt: skip
