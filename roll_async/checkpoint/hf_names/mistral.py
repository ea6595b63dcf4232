"""Mistral, dense; the first release attends within a sliding window."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, OLD_BUFFERS, window_fields
from roll_async.checkpoint.hf_names.table import Family

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *MLP),
    fields=window_fields,
    unused=OLD_BUFFERS,
)
