"""The output layer, put off: the model hands out what goes into it, and log-probs are made of pieces of that.

Logits of a whole micro-batch are the largest tensor of a step: 163,840 positions of 152,064 words are 50 GB in bf16.
Only positions whose log-prob is asked for are multiplied with the output layer, as many at a time as fit a budget; in
training a second pass over a piece takes the place of keeping it. Shape letters: b rows, s positions, H hidden size,
N positions asked for, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll_async.algorithms.logprobs import TokenLogprobs
from roll_async.trainer.megatron.model.logprobs import next_token_logprobs
from roll_async.trainer.megatron.settings import MegatronSettings

LOGITS_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
"""Of the logits of one piece, in the model's dtype; their gradient takes as much again."""


class OutputHead(ColumnParallelLinear):
    """Megatron's output layer. Deferred, a call returns its input, as every rank of the tensor group needs it."""

    deferred: bool = False
    multiplied_with: Tensor
    """[V,H] of the last deferred call: its own weight, or the embedding's."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[s,b,H] (under sequence parallelism this rank's positions) to [s,b,V], or deferred to [s,b,H]."""
        if not self.deferred:
            return super().forward(input_, weight, runtime_gather_output)
        # Not by assignment, which would make it one more parameter of this layer, in checkpoints too.
        self.__dict__["multiplied_with"] = self.weight if weight is None else weight
        assert isinstance(self.tp_group, dist.ProcessGroup)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        copied = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        # Its backward sums a contiguous copy of the gradient and returns the gradient: only one that is contiguous
        # itself is summed over the ranks. The model transposes what it gets; flattened here, the gradient is copied.
        return copied.flatten().view_as(copied), None


def logprobs_of_hidden(
    hidden: Tensor,
    head: OutputHead,
    targets: Tensor,
    asked: Tensor,
    settings: MegatronSettings,
    *,
    with_entropy: bool,
    with_squares: bool = False,
    budget: int | None = None,
) -> TokenLogprobs:
    """[b,s] log-prob of `targets` [b,s] where asked, 0 elsewhere. `hidden` [b,s,H]; `asked` [N] positions in the
    flattened grid; `budget` in bytes, by default LOGITS_BYTES.
    """
    weight, none = head.multiplied_with, not len(asked)
    if none:  # every parameter takes part in every step, with no gradient here
        asked = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    picked, words = hidden.flatten(0, 1)[asked], targets.flatten()[asked]
    each = weight.shape[0] * weight.element_size()
    size = max(1, (budget or LOGITS_BYTES.get(hidden.device.type, LOGITS_BYTES["cuda"])) // each)
    group = cast("dist.ProcessGroup", head.tp_group)
    piece = partial(_piece, weight, settings, group, with_entropy, with_squares)
    found: list[tuple[Tensor, ...]] = []
    for start in range(0, len(picked), size):
        part = picked[start : start + size], words[start : start + size]
        # A single piece fits the budget: its logits are kept. Nothing in a piece is drawn at random.
        again = torch.is_grad_enabled() and len(picked) > size
        found.append(checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False) if again else piece(*part))

    def scatter_to_grid(values: Tensor) -> Tensor:
        flat = values.new_zeros(targets.numel())
        return flat.index_put((asked,), values * 0 if none else values).view(targets.shape)

    logprobs, *more = (scatter_to_grid(torch.cat(parts)) for parts in zip(*found, strict=True))
    return TokenLogprobs(
        logprobs=logprobs,
        entropy=more[0] if with_entropy else None,
        squares=more[-1] if with_squares else None,
    )


def _piece(
    weight: Tensor,
    settings: MegatronSettings,
    group: dist.ProcessGroup,
    with_entropy: bool,
    with_squares: bool,
    hidden: Tensor,
    targets: Tensor,
) -> tuple[Tensor, ...]:
    """[n] each of hidden [n,H] and targets [n]: log-probs, then what else is asked for."""
    logits = torch.nn.functional.linear(hidden, weight)[None]
    wanted = torch.ones_like(targets, dtype=torch.bool)[None]
    found = next_token_logprobs(
        logits, targets[None], wanted, settings, group, with_entropy=with_entropy, with_squares=with_squares
    )
    return tuple(values[0] for values in (found.logprobs, found.entropy, found.squares) if values is not None)
