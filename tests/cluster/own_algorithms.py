"""A loss and an estimator of a user's own (imported by dotted path in other processes)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """`pg_options` and `adv_options`."""

    scale: float = 1.0


def weighted(inputs, options: Options):
    """The importance-weighted policy gradient."""
    ratio = torch.exp(inputs.logprobs - inputs.behaviour_logprobs)
    return -options.scale * ratio * inputs.advantages, {"taken": torch.ones_like(ratio)}


def lead(inputs, options: Options):
    """The score's distance to the group's mean."""
    same = (inputs.group_index[:, None] == inputs.group_index[None]).to(inputs.scores.dtype)
    advantage = options.scale * (inputs.scores - same @ inputs.scores / same.sum(1))
    return advantage[:, None] * inputs.mask, inputs.scores[:, None] * inputs.mask
