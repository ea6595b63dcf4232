"""Qwen2 and Qwen2.5, dense: biases on q, k and v."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, QKV_BIAS
from roll_async.checkpoint.hf_names.table import Family

FAMILY = Family(
    "qwen2", ("Qwen2ForCausalLM",), (*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *MLP), {"add_qkv_bias": True}
)
