"""Rows shared by decoder families with rotary embeddings, RMSNorm and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import LayerRange, ParameterRow, Transform

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

FINAL_NORM = ParameterRow(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",))

EMBEDDING = (
    ParameterRow(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), tp_dim=0),
    ParameterRow(megatron="output_layer.weight", hf=("lm_head.weight",), tp_dim=0, optional=True),
    FINAL_NORM,
)

INPUT_NORM = (
    ParameterRow(
        megatron=f"{_L}.input_layernorm.weight",
        te=f"{_L}.self_attention.linear_qkv.layer_norm_weight",
        hf=(f"{_H}.input_layernorm.weight",),
    ),
)

DENSE_MLP_NORM = (
    ParameterRow(
        megatron=f"{_L}.pre_mlp_layernorm.weight",
        te=f"{_L}.mlp.linear_fc1.layer_norm_weight",
        hf=(f"{_H}.post_attention_layernorm.weight",),
        layers=LayerRange.DENSE,
    ),
)

NORMS = (*INPUT_NORM, *DENSE_MLP_NORM)

_QKV = tuple(f"{_H}.self_attn.{x}_proj" for x in "qkv")

OUTPUT_PROJECTION = (
    ParameterRow(megatron=f"{_L}.self_attention.linear_proj.weight", hf=(f"{_H}.self_attn.o_proj.weight",), tp_dim=1),
)

ATTENTION = (
    ParameterRow(
        megatron=f"{_L}.self_attention.linear_qkv.weight",
        hf=tuple(f"{name}.weight" for name in _QKV),
        transform=Transform.QKV,
        tp_dim=0,
    ),
    *OUTPUT_PROJECTION,
)

QKV_BIAS = (
    ParameterRow(
        megatron=f"{_L}.self_attention.linear_qkv.bias",
        hf=tuple(f"{name}.bias" for name in _QKV),
        transform=Transform.QKV,
        tp_dim=0,
        optional=True,
        needed_by="add_qkv_bias",
    ),
)

QK_NORM = (
    ParameterRow(megatron=f"{_L}.self_attention.q_layernorm.weight", hf=(f"{_H}.self_attn.q_norm.weight",)),
    ParameterRow(megatron=f"{_L}.self_attention.k_layernorm.weight", hf=(f"{_H}.self_attn.k_norm.weight",)),
)

# Of models in which most layers have a gated delta net in the place of attention, which has a gate of its output.

GATED_ATTENTION = tuple(
    replace(row, layers=LayerRange.ATTENTION)
    for row in (*INPUT_NORM, replace(ATTENTION[0], transform=Transform.GATED_QKV), *OUTPUT_PROJECTION, *QK_NORM)
)

_DELTA = f"{_L}.self_attention"

DELTA_NET = tuple(
    replace(row, layers=LayerRange.DELTA)
    for row in (
        replace(INPUT_NORM[0], te=f"{_DELTA}.in_proj.layer_norm_weight"),
        ParameterRow(
            megatron=f"{_DELTA}.in_proj.weight",
            hf=tuple(f"{_H}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            transform=Transform.DELTA_INPUT,
            tp_dim=0,
        ),
        ParameterRow(
            megatron=f"{_DELTA}.conv_weight",
            hf=(f"{_H}.linear_attn.conv1d.weight",),
            transform=Transform.DELTA_QKV,
            tp_dim=0,
        ),
        ParameterRow(megatron=f"{_DELTA}.A_log", hf=(f"{_H}.linear_attn.A_log",), tp_dim=0),
        ParameterRow(megatron=f"{_DELTA}.dt_bias", hf=(f"{_H}.linear_attn.dt_bias",), tp_dim=0),
        ParameterRow(megatron=f"{_DELTA}.norm_weight", hf=(f"{_H}.linear_attn.norm.weight",)),
        ParameterRow(megatron=f"{_DELTA}.out_proj.weight", hf=(f"{_H}.linear_attn.out_proj.weight",), tp_dim=1),
    )
)

OPTIONAL_QK_NORM = tuple(replace(row, optional=True, needed_by="qk_layernorm") for row in QK_NORM)

_FC2 = (
    ParameterRow(
        megatron=f"{_L}.mlp.linear_fc2.weight",
        hf=(f"{_H}.mlp.down_proj.weight",),
        tp_dim=1,
        layers=LayerRange.DENSE,
    ),
)

MLP = (
    ParameterRow(
        megatron=f"{_L}.mlp.linear_fc1.weight",
        hf=(f"{_H}.mlp.gate_proj.weight", f"{_H}.mlp.up_proj.weight"),
        transform=Transform.GATE_UP,
        tp_dim=0,
        layers=LayerRange.DENSE,
    ),
    *_FC2,
)

FUSED_MLP = (
    ParameterRow(
        megatron=f"{_L}.mlp.linear_fc1.weight",
        hf=(f"{_H}.mlp.gate_up_proj.weight",),
        transform=Transform.GATE_UP,
        tp_dim=0,
        layers=LayerRange.DENSE,
    ),
    *_FC2,
)

OLD_BUFFERS = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)
"""Files of old transformers releases hold these; they follow from the config."""


def window_fields(config: HfConfig, *, but_every: int = 0) -> dict[str, object]:
    """Sliding-window attention, in all layers or in those that config.json says. `but_every`: without a list of layers
    (of older files) each so-many-th has none.

    A window of w positions lets a token attend to itself and the w - 1 before it.
    """
    if not config.integer("sliding_window", default=0):
        return {}
    # Qwen's configs name a window even where it is off; Mistral's have no such switch.
    if not config.flag("use_sliding_window", default=True):
        return {}
    kinds, first = config.values.get("layer_types"), config.integer("max_window_layers", default=0)
    windowed = [
        i >= first if not but_every else (i + 1) % but_every != 0 for i in range(config.integer("num_hidden_layers"))
    ]
    if isinstance(kinds, list):
        windowed = [kind == "sliding_attention" for kind in kinds]
    if not any(windowed):
        return {}
    some = {} if all(windowed) else {"window_attn_skip_freq": [int(seen) for seen in windowed]}
    return {"window_size": (config.integer("sliding_window") - 1, 0), **some}


def delta_fields(config: HfConfig) -> dict[str, object]:
    """A gated delta net in the layers that config.json says, else in all but every `full_attention_interval`-th."""
    config.require(attention_bias=False)
    layers, every = config.integer("num_hidden_layers"), config.integer("full_attention_interval", default=4)
    kinds = config.values.get("layer_types")
    delta = [bool((i + 1) % every) for i in range(layers)]
    if isinstance(kinds, list):
        delta = [kind == "linear_attention" for kind in kinds[:layers]]
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "linear_attention_freq": [int(x) for x in delta],
        "linear_conv_kernel_dim": config.integer("linear_conv_kernel_dim"),
        **{name: config.integer(name) for name in ("linear_num_key_heads", "linear_num_value_heads")},
        **{name: config.integer(name) for name in ("linear_key_head_dim", "linear_value_head_dim")},
    }


TINY_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
