"""Llama 2 and 3."""

from __future__ import annotations

from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS
from roll_async.checkpoint.hf_names.table import Family

FAMILY = Family("llama", ("LlamaForCausalLM",), (*EMBEDDING, *NORMS, *ATTENTION, *MLP), {})
