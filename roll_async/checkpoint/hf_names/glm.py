"""GLM-4-9B and GLM-4-0414 (9B, 32B), dense: half of each head rotates, in interleaved pairs; gate and up are one."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, FUSED_MLP, NORMS, OLD_BUFFERS, QKV_BIAS
from roll_async.checkpoint.hf_names.table import Family, ParameterRow

_L, _H = "decoder.layers.{i}", "model.layers.{i}"


def glm_fields(config: HfConfig) -> dict[str, object]:
    """Fields of both GLM families."""
    return {"add_qkv_bias": config.flag("attention_bias", default=True), "rotary_interleaved": True}


FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP),
    fields=glm_fields,
    rotary_fraction=0.5,
    unused=OLD_BUFFERS,
)

_POST_NORMS = (
    ParameterRow(megatron=f"{_L}.post_self_attn_layernorm.weight", hf=(f"{_H}.post_self_attn_layernorm.weight",)),
    ParameterRow(megatron=f"{_L}.post_mlp_layernorm.weight", hf=(f"{_H}.post_mlp_layernorm.weight",)),
)

FAMILY_0414 = Family(  # with a norm behind attention and MLP too
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *_POST_NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP),
    fields=glm_fields,
    sandwich_norms=True,
    rotary_fraction=0.5,
    unused=OLD_BUFFERS,
)
