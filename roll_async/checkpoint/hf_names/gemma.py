"""Gemma 3, text alone: four norms a layer, whose weights are stored as what they add to 1; most layers see a window and
rotate faster; embeddings are scaled.
"""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    INPUT_NORM,
    MLP,
    QK_NORM,
    window_fields,
)
from roll_async.checkpoint.hf_names.table import Family, ParameterRow

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

_NORMS = (
    *INPUT_NORM,
    ParameterRow(megatron=f"{_L}.post_self_attn_layernorm.weight", hf=(f"{_H}.post_attention_layernorm.weight",)),
    replace(DENSE_MLP_NORM[0], hf=(f"{_H}.pre_feedforward_layernorm.weight",)),
    ParameterRow(megatron=f"{_L}.post_mlp_layernorm.weight", hf=(f"{_H}.post_feedforward_layernorm.weight",)),
)


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, use_bidirectional_attention=False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            raise ValueError(f"{config.source}: {key}={config.values[key]!r} is not supported, only null is")
    every, layers = config.integer("sliding_window_pattern", default=6), config.integer("num_hidden_layers")
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    # Older files give the pattern alone.
    told = config if "layer_types" in config else HfConfig({**config.values, "layer_types": kinds}, config.source)
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config.number("query_pre_attn_scalar", default=256) ** -0.5,
        **window_fields(told),
    }


FAMILIES = (
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM",),
        rows=(*EMBEDDING, *_NORMS, *ATTENTION, *QK_NORM, *MLP),
        fields=_fields,
        sandwich_norms=True,
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        tiny={
            "gemma 3": {
                "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12, "tie_word_embeddings": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            },
        },
    ),
)  # fmt: skip
