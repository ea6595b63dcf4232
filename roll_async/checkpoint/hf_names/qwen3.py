"""Qwen3, dense: normalised queries and keys, no biases."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, QK_NORM
from roll_async.checkpoint.hf_names.table import Family

FAMILY = Family(
    "qwen3", ("Qwen3ForCausalLM",), (*EMBEDDING, *NORMS, *ATTENTION, *QK_NORM, *MLP), {"qk_layernorm": True}
)
