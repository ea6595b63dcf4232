"""Dense families whose norms are not Llama's.

Gemma 3, text alone: four norms a layer, whose weights are stored as what they add to 1; most layers see a window and
rotate faster; embeddings are scaled. OLMo-2 and 3: norms of the outputs of attention and MLP alone, and of queries, and
keys, of all heads together; most layers of OLMo-3 see a window, and the scaling of the rotation is that of the others.
Nemotron: LayerNorm with biases, weights stored as Gemma's are; an MLP without gate.
"""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    DENSE_MLP_NORM,
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    MLP,
    NORMS,
    QK_NORM,
    window_fields,
)
from roll_async.checkpoint.hf_names.table import YARN, Family, ParameterRow, Transform

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

_OUTPUT_NORMS = (
    ParameterRow(megatron=f"{_L}.post_self_attn_layernorm.weight", hf=(f"{_H}.post_attention_layernorm.weight",)),
    ParameterRow(megatron=f"{_L}.post_mlp_layernorm.weight", hf=(f"{_H}.post_feedforward_layernorm.weight",)),
)
_GEMMA_NORMS = (
    *INPUT_NORM,
    replace(DENSE_MLP_NORM[0], hf=(f"{_H}.pre_feedforward_layernorm.weight",)),
    *_OUTPUT_NORMS,
)
_OLMO_ROWS = (*EMBEDDING, *_OUTPUT_NORMS, *ATTENTION, *QK_NORM, *MLP)

_NORM_BIASES = tuple(
    replace(
        row,
        megatron=row.megatron.replace(".weight", ".bias"),
        te=row.te and row.te.replace("norm_weight", "norm_bias"),
        hf=(row.hf[0].replace(".weight", ".bias"),),
    )
    for row in (*NORMS, FINAL_NORM)
)
_PLAIN_MLP = (replace(MLP[0], hf=(f"{_H}.mlp.up_proj.weight",), transform=Transform.COPY), *MLP[1:])


def _nemotron_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, mlp_bias=False)
    return {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "gated_linear_unit": False}


def _gemma_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, use_bidirectional_attention=False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            raise ValueError(f"{config.source}: {key}={config.values[key]!r} is not supported, only null is")
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config.number("query_pre_attn_scalar", default=256) ** -0.5,
        **window_fields(config, but_every=config.integer("sliding_window_pattern", default=6)),
    }


def _olmo_fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {"qk_layernorm": True}


def _olmo3_fields(config: HfConfig) -> dict[str, object]:
    return {**_olmo_fields(config), **window_fields(config, but_every=4)}


FAMILIES = (
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM",),
        rows=(*EMBEDDING, *_GEMMA_NORMS, *ATTENTION, *QK_NORM, *MLP),
        fields=_gemma_fields,
        output_norms=True,
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        tied_by_default=True,
        tiny={
            "gemma 3": {
                "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12, "tie_word_embeddings": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            },
        },
    ),
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        rows=_OLMO_ROWS,
        fields=_olmo_fields,
        input_norms=False,
        output_norms=True,
        projection_norms=True,
        tiny={"olmo 2": {}},
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        rows=_OLMO_ROWS,
        fields=_olmo3_fields,
        input_norms=False,
        output_norms=True,
        projection_norms=True,
        scaled_windows=False,
        tiny={
            "olmo 3": {
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        },
    ),
    Family(
        name="nemotron",
        architectures=("NemotronForCausalLM",),
        rows=(*EMBEDDING, *NORMS, *_NORM_BIASES, *ATTENTION, *_PLAIN_MLP),
        fields=_nemotron_fields,
        activation="relu2",
        rotary_fraction=0.5,
        tiny={"nemotron": {"head_dim": 32}},
    ),
)  # fmt: skip
