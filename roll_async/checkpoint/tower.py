"""The tower that makes tokens of an image's patches: Transformers' own, whatever holds the rest of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import TOWER

if TYPE_CHECKING:
    import torch


def tower_of(config: HfConfig, dtype: torch.dtype) -> torch.nn.Module:
    """On the CPU, its weights still to be filled: as they were in memory."""
    from transformers.initialization import no_init_weights
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision = Qwen2_5_VLVisionConfig(**config.section("vision_config").values)
    if vision.out_hidden_size != (hidden := config.integer("hidden_size")):
        raise ValueError(
            f"{config.source}: vision_config.out_hidden_size={vision.out_hidden_size}, but hidden_size={hidden}; "
            "name a model whose tower makes embeddings of its own size"
        )
    with no_init_weights():  # every weight is loaded: drawing values first would take longer than that
        return Qwen2_5_VisionTransformerPretrainedModel._from_config(vision, dtype=dtype, attn_implementation="sdpa")


def tower_shapes(config: HfConfig) -> Mapping[str, tuple[int, ...]]:
    """Of its parameters, by their names in the whole model."""
    import torch

    with torch.device("meta"):
        tower = tower_of(config, torch.float32)
    return {TOWER + name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}
