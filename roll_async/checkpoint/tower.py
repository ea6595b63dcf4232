"""The tower that makes tokens of an image's patches: Transformers' own, whatever holds the rest of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import TOWER

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2_5_VisionTransformerPretrainedModel


def tower_of(config: HfConfig, dtype: torch.dtype) -> Qwen2_5_VisionTransformerPretrainedModel:
    """On the CPU, its weights still to be filled: as they were in memory."""
    from transformers.initialization import no_init_weights
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision = Qwen2_5_VLVisionConfig.from_dict(dict(config.section("vision_config").values))
    if vision.out_hidden_size != (hidden := config.integer("hidden_size")):
        raise ValueError(
            f"{config.source}: vision_config.out_hidden_size={vision.out_hidden_size}, but hidden_size={hidden}; "
            "name a model whose tower makes embeddings of its own size"
        )
    with no_init_weights():  # every weight is loaded: drawing values first would take longer than that
        return Qwen2_5_VisionTransformerPretrainedModel._from_config(vision, dtype=dtype, attn_implementation="sdpa")


def tower_shapes(config: HfConfig) -> Mapping[str, tuple[int, ...]]:
    """Of its parameters, by their names in the whole model; without Transformers, whose defaults these are."""
    vision = config.section("vision_config")
    hidden, inner = vision.integer("hidden_size", default=3584), vision.integer("intermediate_size", default=3420)
    merged, patch = (
        hidden * vision.integer("spatial_merge_size", default=2) ** 2,
        vision.integer("patch_size", default=14),
    )
    channels = vision.integer("in_channels", default=3)
    linear = {
        "merger.mlp.0": (merged, merged),
        "merger.mlp.2": (vision.integer("out_hidden_size", default=3584), merged),
    }
    norms = ["merger.ln_q"]
    for i in range(vision.integer("depth", default=32)):
        block = f"blocks.{i}"
        linear |= {f"{block}.attn.qkv": (3 * hidden, hidden), f"{block}.attn.proj": (hidden, hidden)}
        linear |= {f"{block}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        linear |= {f"{block}.mlp.down_proj": (hidden, inner)}
        norms += [f"{block}.norm1", f"{block}.norm2"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (
            hidden, channels, vision.integer("temporal_patch_size", default=2), patch, patch,
        ),
        **{f"{name}.weight": shape for name, shape in linear.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linear.items()},
        **{f"{name}.weight": (hidden,) for name in norms},
    }  # fmt: skip
    return {TOWER + name: shape for name, shape in shapes.items()}
