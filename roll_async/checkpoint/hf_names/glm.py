"""GLM-4-9B, dense: rotates half of each head, in interleaved pairs; gate and up are one tensor."""

from __future__ import annotations

from roll_async.checkpoint.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, FUSED_MLP, NORMS, OLD_BUFFERS, QKV_BIAS
from roll_async.checkpoint.hf_names.table import Family


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
