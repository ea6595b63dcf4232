"""GLM-4-0414 (9B, 32B), dense: GLM-4 with a norm behind attention and MLP too."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, FUSED_MLP, NORMS, OLD_BUFFERS, QKV_BIAS
from roll_async.checkpoint.hf_names.glm import glm_fields
from roll_async.checkpoint.hf_names.table import Family, ParameterRow

_L, _H = "decoder.layers.{i}", "model.layers.{i}"

_POST_NORMS = (
    ParameterRow(megatron=f"{_L}.post_self_attn_layernorm.weight", hf=(f"{_H}.post_self_attn_layernorm.weight",)),
    ParameterRow(megatron=f"{_L}.post_mlp_layernorm.weight", hf=(f"{_H}.post_mlp_layernorm.weight",)),
)

FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *_POST_NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP),
    fields=glm_fields,
    sandwich_norms=True,
    rotary_fraction=0.5,
    unused=OLD_BUFFERS,
)
