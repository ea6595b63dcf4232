"""Rows shared by mixture-of-experts families, and the routing fields of Megatron's config."""

from __future__ import annotations

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


def qwen_routing_fields(config: HfConfig) -> dict[str, object]:
    """Routing in every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step", default=1), config.layers("mlp_only_layers")
    # transformers counts layers from 1 here.
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(config.integer("num_hidden_layers"))]
    return {
        **routing_fields(
            config,
            num_experts=config.integer("num_experts", "num_local_experts"),
            expert_size=config.integer("moe_intermediate_size"),
            normalised=config.flag("norm_topk_prob"),
        ),
        "moe_layer_freq": moe_layers(len(sparse), sparse),
    }
