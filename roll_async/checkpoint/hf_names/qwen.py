"""Qwen's dense families: Qwen2 and Qwen2.5 have biases on queries, keys and values, Qwen3 normalises queries and keys
instead. Qwen2.5-VL is Qwen2 with a tower for images. Qwen3.5, text alone: a gated delta net in most layers,
attention with a gate in the others, norms whose weights are stored as what they add to 1.
"""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DELTA_NET,
    DENSE_MLP_NORM,
    EMBEDDING,
    GATED_ATTENTION,
    MLP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    TINY_DELTA,
    delta_fields,
    window_fields,
)
from roll_async.checkpoint.hf_names.table import YARN, Family


def _qwen2_fields(config: HfConfig) -> dict[str, object]:
    return {"add_qkv_bias": True, **window_fields(config)}


def _qwen3_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {"qk_layernorm": True, **window_fields(config)}


FAMILIES = (
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *MLP),
        fields=_qwen2_fields,
        tiny={"qwen2 tied": {"tie_word_embeddings": True}, "qwen2.5 yarn": {"rope_parameters": YARN}},
    ),
    Family(
        name="qwen2_5_vl",
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *MLP),
        fields=_qwen2_fields,
        reads_images=True,
        tiny={"qwen2.5-vl": {}, "qwen2.5-vl tied": {"tie_word_embeddings": True}},
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORM, *MLP),
        fields=_qwen3_fields,
        tiny={"qwen3": {"head_dim": 32, "tie_word_embeddings": True}},
    ),
    Family(
        name="qwen3_5",
        architectures=("Qwen3_5ForCausalLM",),
        rows=(*EMBEDDING, *GATED_ATTENTION, *DELTA_NET, *DENSE_MLP_NORM, *MLP),
        fields=delta_fields,
        rotary_fraction=0.25,
        unused=("mtp.*",),
        tiny={"qwen3.5": {**TINY_DELTA, "tie_word_embeddings": True}},
    ),
)
