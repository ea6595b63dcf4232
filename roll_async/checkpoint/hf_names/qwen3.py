"""Qwen3, dense: normalised queries and keys, no biases."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, QK_NORM, window_fields
from roll_async.checkpoint.hf_names.table import Family


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False)
    return {"qk_layernorm": True, **window_fields(config)}


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORM, *MLP),
    fields=_fields,
)
