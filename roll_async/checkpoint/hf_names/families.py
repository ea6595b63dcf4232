"""Model families by Hugging Face architecture."""

from __future__ import annotations

from roll_async.checkpoint.hf_names import deepseek, experts, glm, llama, mistral, norms, phi3, qwen, qwen_moe
from roll_async.checkpoint.hf_names.table import Family

FAMILIES: tuple[Family, ...] = (
    *qwen.FAMILIES,
    *llama.FAMILIES,
    *mistral.FAMILIES,
    *qwen_moe.FAMILIES,
    *deepseek.FAMILIES,
    *glm.FAMILIES,
    *phi3.FAMILIES,
    *norms.FAMILIES,
    *experts.FAMILIES,
)


def family_of(architecture: str) -> Family:
    """The family that describes an architecture. Raises ValueError naming the known ones."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise ValueError(f"architecture {architecture} has no entry in checkpoint/hf_names; known: {known}")
