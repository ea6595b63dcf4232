"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, DENSE_MLP_NORM, EMBEDDING, MLP, QK_NORM
from roll_async.checkpoint.hf_names.moe import (
    CORRECTION_BIAS,
    MOE_NORMS,
    TINY_GROUPED,
    experts,
    first_dense,
    grouped_routing_fields,
    router,
    shared_experts,
)
from roll_async.checkpoint.hf_names.table import Family


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    layers = config.integer("num_hidden_layers")
    if config.integer("sliding_window", default=0) and config.integer("max_window_layers", default=layers) < layers:
        raise ValueError(f"{config.source}: sliding windows in some layers only (max_window_layers) are not supported")
    return {**grouped_routing_fields(config, first_dense(config)), "qk_layernorm": True}


FAMILIES = (
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        rows=(
            *EMBEDDING, *MOE_NORMS, *DENSE_MLP_NORM, *ATTENTION, *QK_NORM, *MLP, *router("mlp.gate"), CORRECTION_BIAS,
            *experts("mlp.experts"), *shared_experts("mlp.shared_experts"),
        ),
        fields=_fields,
        tiny={"dots": {**TINY_GROUPED, "head_dim": 32, "first_k_dense_replace": 1, "max_window_layers": 4}},
    ),
)  # fmt: skip
