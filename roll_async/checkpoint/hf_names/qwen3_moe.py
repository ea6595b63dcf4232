"""Qwen3-MoE: normalised queries and keys, routed experts only; some layers may be dense."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, DENSE_MLP_NORM, EMBEDDING, MLP, QK_NORM, window_fields
from roll_async.checkpoint.hf_names.moe import MOE_NORMS, experts, qwen_routing_fields, router
from roll_async.checkpoint.hf_names.table import Family


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {
        **qwen_routing_fields(config),
        "qk_layernorm": True,
        **window_fields(config),
    }


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    rows=(
        *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QK_NORM, *MLP, *router("mlp.gate"),
        *experts("mlp.experts"),
    ),
    fields=_fields,
)  # fmt: skip
