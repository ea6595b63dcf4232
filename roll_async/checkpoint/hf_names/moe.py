"""Rows shared by mixture-of-experts families, and the routing fields of Megatron's config."""

from __future__ import annotations

from collections.abc import Sequence

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import INPUT_NORM
from roll_async.checkpoint.hf_names.table import LayerRange, ParameterRow, Transform, moe_layers

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

MOE_MLP_NORM = (
    # Not fused into a linear layer in Transformer Engine: the router reads it too.
    ParameterRow(
        megatron=f"{_L}.pre_mlp_layernorm.weight",
        hf=(f"{_H}.post_attention_layernorm.weight",),
        layers=LayerRange.MOE,
    ),
)

MOE_NORMS = (*INPUT_NORM, *MOE_MLP_NORM)

CORRECTION_BIAS = ParameterRow(
    megatron=f"{_L}.mlp.router.expert_bias",
    hf=(f"{_H}.mlp.gate.e_score_correction_bias",),
    layers=LayerRange.MOE,
    float32=True,
)
"""The router chooses by score plus this bias and weighs by score alone. It is not a parameter: it is loaded, kept in
float32 and exported, and changes only with `extra.moe_router_bias_update_rate`.
"""

NEXT_TOKENS = "model.layers.{n}.*"
"""The layer for multi-token prediction after the last one is left out: neither scoring nor the policy loss uses it."""

TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY_GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "norm_topk_prob": True,
}  # fmt: skip


def router(hf: str) -> tuple[ParameterRow, ...]:
    """The router's weight [experts, hidden]."""
    return (ParameterRow(megatron=f"{_L}.mlp.router.weight", hf=(f"{_H}.{hf}.weight",), layers=LayerRange.MOE),)


def experts(
    hf: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[ParameterRow, ...]:
    """One expert's two matrices: sequential experts in local layers, grouped ones in Transformer Engine's."""
    local, grouped, expert = f"{_L}.mlp.experts.local_experts.{{e}}", f"{_L}.mlp.experts", f"{_H}.{hf}.{{e}}"
    return (
        ParameterRow(
            megatron=f"{local}.linear_fc1.weight",
            te=f"{grouped}.linear_fc1.weight{{e}}",
            hf=(f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            transform=Transform.GATE_UP,
            tp_dim=0,
            layers=LayerRange.MOE,
        ),
        ParameterRow(
            megatron=f"{local}.linear_fc2.weight",
            te=f"{grouped}.linear_fc2.weight{{e}}",
            hf=(f"{expert}.{down}.weight",),
            tp_dim=1,
            layers=LayerRange.MOE,
        ),
    )


def shared_experts(hf: str) -> tuple[ParameterRow, ...]:
    """The MLP every token passes, held by every expert-parallel rank."""
    return (
        ParameterRow(
            megatron=f"{_L}.mlp.shared_experts.linear_fc1.weight",
            hf=(f"{_H}.{hf}.gate_proj.weight", f"{_H}.{hf}.up_proj.weight"),
            transform=Transform.GATE_UP,
            tp_dim=0,
            layers=LayerRange.MOE,
        ),
        ParameterRow(
            megatron=f"{_L}.mlp.shared_experts.linear_fc2.weight",
            hf=(f"{_H}.{hf}.down_proj.weight",),
            tp_dim=1,
            layers=LayerRange.MOE,
        ),
    )


def routing_fields(config: HfConfig, *, num_experts: int, expert_size: int, normalised: bool) -> dict[str, object]:
    """Top-k softmax routing. `normalised`: the chosen weights sum to 1, which is a softmax over the chosen logits."""
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": config.integer("num_experts_per_tok"),
        "moe_ffn_hidden_size": expert_size,
        "moe_router_pre_softmax": not normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_permute_fusion": False,
    }


def qwen_routing_fields(config: HfConfig, *, normalised: bool = False) -> dict[str, object]:
    """Routing in every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`. `normalised`: see
    `routing_fields`, where config.json does not say.
    """
    step, dense = config.integer("decoder_sparse_step", default=1), config.layers("mlp_only_layers")
    # transformers counts layers from 1 here.
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(config.integer("num_hidden_layers"))]
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_experts", "num_local_experts"),
            expert_size=config.integer("moe_intermediate_size"),
            normalised=config.flag("norm_topk_prob", default=normalised),
        ),
        "moe_layer_freq": moe_layers(len(sparse), sparse),
    }


SIGMOID_ROUTING = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}


def first_dense(config: HfConfig) -> list[bool]:
    """Which layers have experts, where the first few have none."""
    dense = config.integer("first_k_dense_replace", default=0)
    return [i >= dense for i in range(config.integer("num_hidden_layers"))]


def grouped_routing_fields(config: HfConfig, sparse: Sequence[bool]) -> dict[str, object]:
    """DeepSeek-V3's: sigmoid scores, experts of the best groups, a shared expert beside them. Raises ValueError for
    groups that Megatron ranks otherwise.
    """
    config.require(scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True)
    expert_size = config.integer("moe_intermediate_size")
    return {
        **routing_fields(
            config,
            num_experts=config.integer("n_routed_experts", "num_local_experts"),
            expert_size=expert_size,
            normalised=True,
        ),
        **SIGMOID_ROUTING,
        "moe_layer_freq": moe_layers(len(sparse), sparse),
        "moe_shared_expert_intermediate_size": config.integer("n_shared_experts") * expert_size,
        "moe_router_topk_scaling_factor": config.number("routed_scaling_factor"),
        **_group_fields(config),
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
