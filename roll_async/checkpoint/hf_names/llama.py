"""Llama 2 and 3."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.dense import ATTENTION, EMBEDDING, MLP, NORMS, OLD_BUFFERS
from roll_async.checkpoint.hf_names.table import Family


def _fields(config: HfConfig) -> dict[str, object]:
    config.require(attention_bias=False, mlp_bias=False)
    return {}


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *MLP),
    fields=_fields,
    unused=OLD_BUFFERS,
)
