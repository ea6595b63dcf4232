"""Phi-3 and Phi-4 (14B), dense: queries, keys and values are one tensor, gate and up another."""

from __future__ import annotations

from dataclasses import replace

from roll_async.checkpoint.hf_names.dense import (
    ATTENTION,
    EMBEDDING,
    FUSED_MLP,
    NORMS,
    OUTPUT_PROJECTION,
    window_fields,
)
from roll_async.checkpoint.hf_names.table import Family

_FUSED_QKV = replace(ATTENTION[0], hf=("model.layers.{i}.self_attn.qkv_proj.weight",))

FAMILIES = (
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        rows=(*EMBEDDING, *NORMS, _FUSED_QKV, *OUTPUT_PROJECTION, *FUSED_MLP),
        fields=window_fields,
        tiny={"phi 3": {"sliding_window": 12}},
    ),
)
