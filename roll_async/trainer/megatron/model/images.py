"""Images among the tokens of a first pipeline stage: a tower makes embeddings of their pixels.

Shape letters: q sequences of a feed, s positions, H hidden size, P patches, C values of a patch, N tokens of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.table import TOWER
from roll_async.checkpoint.tower import tower_of
from roll_async.trainer.megatron.micro_batches import ModelFeed
from roll_async.trainer.megatron.ranks import tensor_group

if TYPE_CHECKING:
    from transformers import Qwen2_5_VisionTransformerPretrainedModel as Tower


def add_tower(model: GPTModel, config: HfConfig) -> None:
    """Every tensor rank holds all of it."""
    tower = tower_of(config, model.config.params_dtype)
    for parameter in tower.parameters():
        # Each rank then has the gradients of its share of the positions: Megatron sums what is marked so.
        parameter.sequence_parallel = model.config.sequence_parallel  # type: ignore[attr-defined]
    if model.config.recompute_granularity == "full":
        tower.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
    model.add_module(TOWER.rstrip("."), tower)


def tower_to_run(model: torch.nn.Module, feed: ModelFeed) -> Tower | None:
    """The tower of a stage that has one, for feeds with images; when it trains for all: gradient buffers wait for every
    parameter, and a rank without images would let the others wait for ever.
    """
    tower = cast("Tower | None", dict(model.named_children()).get(TOWER.rstrip(".")))
    if tower is None or feed.images:
        return tower
    return tower if torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters()) else None


def blank_image(tower: Tower) -> tuple[Tensor, Tensor]:
    """Patches [P,C] of one token that no place asks for, and their grid [1,3]."""
    side = tower.spatial_merge_size
    return torch.zeros(side * side, tower.patch_embed.proj.weight[0].numel()), torch.tensor([[1, side, side]])


def embedded_with_images(model: GPTModel, tower: Tower, feed: ModelFeed, pixels: Tensor, grid: Tensor) -> Tensor:
    """[s,q,H] what the first layer reads, under sequence parallelism this rank's share of the positions. `pixels` [P,C]
    of the feed's images, one after another, `grid` [images,3] of each in patches.
    """
    embedded = model.embedding(input_ids=feed.tokens, position_ids=feed.positions)
    outputs = tower(pixels.to(embedded), grid_thw=grid.to(embedded.device)).pooler_output  # [N,H]
    slots = (torch.full_like(feed.tokens, -1) if feed.slots is None else feed.slots).t().contiguous()
    if model.config.sequence_parallel:
        slots = slots.chunk(tensor_group().size())[tensor_group().rank()]
    # Row 0 stands for no output: without it all text would add its zeros to the gradient of one image token.
    found = F.embedding(slots + 1, F.pad(outputs.to(embedded.dtype), (0, 0, 1, 0)), padding_idx=0)
    return torch.where((slots < 0)[..., None], embedded, found)
