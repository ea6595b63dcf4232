"""Qwen2-MoE (Qwen1.5-MoE too): routed experts beside a shared one behind a sigmoid gate; some layers may be dense."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, DENSE_MLP_NORM, EMBEDDING, MLP, QKV_BIAS
from roll_async.checkpoint.hf_names.moe import MOE_NORMS, experts, qwen_routing_fields, router, shared_experts
from roll_async.checkpoint.hf_names.table import Family, LayerRange, ParameterRow

_SHARED_GATE = ParameterRow(
    megatron="decoder.layers.{i}.mlp.shared_experts.gate_weight",
    hf=("model.layers.{i}.mlp.shared_expert_gate.weight",),
    layers=LayerRange.MOE,
)


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(use_sliding_window=False)
    return {
        **qwen_routing_fields(config),
        "moe_shared_expert_intermediate_size": config.integer("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
        "add_qkv_bias": config.flag("qkv_bias", default=True),
    }


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    rows=(
        *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QKV_BIAS, *MLP, *router("mlp.gate"),
        *experts("mlp.experts"), *shared_experts("mlp.shared_expert"), _SHARED_GATE,
    ),
    fields=_fields,
)  # fmt: skip
