"""Model families by Hugging Face architecture."""

from __future__ import annotations

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names import deepseek, experts, glm, llama, mistral, norms, phi3, qwen, qwen_moe
from roll_async.checkpoint.hf_names.table import Family
from roll_async.checkpoint.hf_names.value_head import language_model

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


def family_for(config: HfConfig) -> Family:
    """The family of a model; of a reward model, that of its language model. Raises ValueError for one that is in none,
    and for a quantised one, whose weights are not what its files hold under their names.
    """
    if "quantization_config" in config:
        raise ValueError(f"{config.source}: the model is quantised (quantization_config); convert it to bf16 first")
    architecture = language_model(config.architecture())
    try:
        return family_of(architecture)
    except ValueError as error:
        raise ValueError(f"{config.source}: {error}; use a model of one of them") from error


def is_tied(config: HfConfig) -> bool:
    """Whether the output layer of the language model is its embedding."""
    default = family_of(language_model(config.architecture())).tied_by_default
    return config.flag("tie_word_embeddings", default=default)
