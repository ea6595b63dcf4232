"""Rows shared by dense decoder families with rotary embeddings, RMSNorm and a gated MLP."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.table import Row, Transform

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

EMBEDDING = (
    Row(megatron="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), tp_dim=0),
    Row(megatron="output_layer.weight", hf=("lm_head.weight",), tp_dim=0),
    Row(megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",)),
)

NORMS = (
    Row(megatron=f"{_L}.input_layernorm.weight", hf=(f"{_H}.input_layernorm.weight",)),
    Row(megatron=f"{_L}.self_attention.linear_qkv.layer_norm_weight", hf=(f"{_H}.input_layernorm.weight",)),
    Row(megatron=f"{_L}.pre_mlp_layernorm.weight", hf=(f"{_H}.post_attention_layernorm.weight",)),
    Row(megatron=f"{_L}.mlp.linear_fc1.layer_norm_weight", hf=(f"{_H}.post_attention_layernorm.weight",)),
)

_QKV = tuple(f"{_H}.self_attn.{x}_proj" for x in "qkv")

ATTENTION = (
    Row(
        megatron=f"{_L}.self_attention.linear_qkv.weight",
        hf=tuple(f"{name}.weight" for name in _QKV),
        transform=Transform.QKV,
        tp_dim=0,
    ),
    Row(megatron=f"{_L}.self_attention.linear_proj.weight", hf=(f"{_H}.self_attn.o_proj.weight",), tp_dim=1),
)

QKV_BIAS = (
    Row(
        megatron=f"{_L}.self_attention.linear_qkv.bias",
        hf=tuple(f"{name}.bias" for name in _QKV),
        transform=Transform.QKV,
        tp_dim=0,
    ),
)

QK_NORM = (
    Row(megatron=f"{_L}.self_attention.q_layernorm.weight", hf=(f"{_H}.self_attn.q_norm.weight",)),
    Row(megatron=f"{_L}.self_attention.k_layernorm.weight", hf=(f"{_H}.self_attn.k_norm.weight",)),
)

MLP = (
    Row(
        megatron=f"{_L}.mlp.linear_fc1.weight",
        hf=(f"{_H}.mlp.gate_proj.weight", f"{_H}.mlp.up_proj.weight"),
        transform=Transform.GATE_UP,
        tp_dim=0,
    ),
    Row(megatron=f"{_L}.mlp.linear_fc2.weight", hf=(f"{_H}.mlp.down_proj.weight",), tp_dim=1),
)
