"""Further mixtures of experts. OLMoE and MiniMax-M2 normalise queries, and keys, of all heads together; dots.llm1 has
Qwen3's attention and DeepSeek-V3's experts; gpt-oss has attention sinks, biases everywhere, and files in which one
tensor is all experts of a layer, transposed.
"""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    MLP,
    OUTPUT_PROJECTION,
    QK_NORM,
    QKV_BIAS,
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
from roll_async.checkpoint.hf_names.table import YARN, Family, ParameterRow, Transform

_CORRECTION_BIAS = replace(CORRECTION_BIAS, hf=("model.layers.{i}.block_sparse_moe.e_score_correction_bias",))


def _biased(row: ParameterRow, bias: str) -> tuple[ParameterRow, ParameterRow]:
    """A weight, and the bias that no rank splits. `bias`: its HF name."""
    names = {"megatron": row.megatron, "te": row.te}
    named = {key: name and name.replace("weight", "bias") for key, name in names.items()}
    return row, replace(row, **named, hf=(bias,), tp_dim=None)


def _stacked_experts() -> tuple[ParameterRow, ...]:
    """gpt-oss's: HfFolder reads the tensors of a layer as one for each expert."""
    place = "model.layers.{i}.mlp.experts.{e}"
    up, down = (replace(row, tp_dim=None) for row in experts("mlp.experts"))
    up = replace(up, hf=(f"{place}.gate_up_proj",), transform=Transform.IN_TURN)
    down = replace(down, hf=(f"{place}.down_proj",), transform=Transform.TRANSPOSED)
    return *_biased(up, f"{place}.gate_up_proj_bias"), *_biased(down, f"{place}.down_proj_bias")


_SINKS = ParameterRow(
    megatron="decoder.layers.{i}.self_attention.core_attention.softmax_offset",
    hf=("model.layers.{i}.self_attn.sinks",),
    tp_dim=0,
)


def _gpt_oss_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=True, swiglu_alpha=1.702)
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_local_experts", "num_experts"),
            expert_size=config.integer("intermediate_size"),
            normalised=True,
        ),
        **window_fields(config, but_every=2),
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        # config.json says silu: clamp(gate) * sigmoid(1.702 clamp(gate)) * (clamp(up) + 1).
        "activation_func": "quick_gelu",
        "bias_activation_fusion": False,
        "activation_func_clamp_value": config.number("swiglu_limit", default=7.0),
        "glu_linear_offset": 1.0,
    }


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
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, ATTENTION[0], *QKV_BIAS,
            *_biased(OUTPUT_PROJECTION[0], "model.layers.{i}.self_attn.o_proj.bias"), _SINKS,
            *_biased(router("mlp.router")[0], "model.layers.{i}.mlp.router.bias"), *_stacked_experts(),
        ),
        fields=_gpt_oss_fields,
        tiny={
            "gpt-oss": {
                "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 12,
                "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
    ),
)  # fmt: skip
