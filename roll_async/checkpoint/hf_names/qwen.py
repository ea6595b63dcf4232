"""Qwen2 and Qwen2.5, dense: biases on q, k and v."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, QKV_BIAS, window_fields
from roll_async.checkpoint.hf_names.table import Family


def _fields(config: HfConfig) -> dict[str, object]:
    return {"add_qkv_bias": True, **window_fields(config)}


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *MLP),
    fields=_fields,
)
