"""Model families by Hugging Face architecture."""

from __future__ import annotations

from roll_async.checkpoint.hf_names import (
    deepseek_v3,
    glm,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from roll_async.checkpoint.hf_names.table import Family

FAMILIES = (
    qwen2.FAMILY,
    qwen3.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    deepseek_v3.FAMILY,
    glm.FAMILY,
    glm.FAMILY_0414,
)


def family_of(architecture: str) -> Family:
    """The family that describes an architecture. Raises ValueError naming the known ones."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise ValueError(f"architecture {architecture} has no entry in checkpoint/hf_names; known: {known}")
