"""The output layer, put off: the model hands out what goes into it, and log-probs are made of pieces of that.

Logits of a whole micro-batch are the largest tensor of a step: 163,840 positions of 152,064 words are 50 GB in bf16.
Only positions whose log-prob is asked for are multiplied with the output layer, as many at a time as fit a budget; in
training a second pass over a piece takes the place of keeping it. Shape letters: b rows, s positions, H hidden size,
N positions asked for, V this rank's part of the vocabulary. A critic has its value head in that place.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from roll_async.algorithms.logprobs import Sampling, TokenLogprobs
from roll_async.trainer.megatron.memory_estimate import LOGITS_BYTES
from roll_async.trainer.megatron.model.logprobs import piece_statistics, slope_in_place
from roll_async.trainer.megatron.settings import MegatronSettings


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
    each = weight.shape[0] * weight.element_size()
    size = max(1, (budget or LOGITS_BYTES.get(hidden.device.type, LOGITS_BYTES["cuda"])) // each)
    sampling = Sampling(settings.temperature, max(0, settings.top_k), settings.top_p, size, with_entropy, with_squares)
    group = cast("dist.ProcessGroup", head.tp_group)
    found = _HeadLogprobs.apply(hidden.flatten(0, 1)[asked], weight, targets.flatten()[asked], sampling, group)

    def scatter_to_grid(values: Tensor) -> Tensor:
        flat = values.new_zeros(targets.numel())
        return flat.index_put((asked,), values * 0 if none else values).view(targets.shape)

    logprobs, entropy, squares = map(scatter_to_grid, found)
    return TokenLogprobs(
        logprobs=logprobs,
        entropy=entropy if with_entropy else None,
        squares=squares if with_squares else None,
    )


class _HeadLogprobs(torch.autograd.Function):
    """(hidden [N,H], weight [V,H], words [N]) to log-probs, entropy, squares [N], in pieces of `sampling.chunk_tokens`.

    Forward keeps [N] numbers. Backward multiplies a piece again (a single one fits the budget, and is kept), writes the
    gradient over its logits and multiplies that with both inputs: four matrix products in all.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, words: Tensor, sampling: Sampling, group: dist.ProcessGroup):  # noqa: ANN001, ANN205
        pieces, logits, size = [], None, sampling.chunk_tokens
        for start in range(0, len(hidden), size):
            logits = torch.nn.functional.linear(hidden[start : start + size], weight)
            pieces.append(piece_statistics(logits, words[start : start + size], sampling, group))
        ctx.save_for_backward(hidden, weight, words)
        ctx.sampling, ctx.group, ctx.pieces = sampling, group, pieces
        ctx.logits = logits if len(pieces) == 1 and any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs the backward pass nothing
        squares = torch.cat([found.squares for found in pieces])
        ctx.mark_non_differentiable(squares)
        logprobs = torch.cat([found.logprobs - found.log_kept for found in pieces])
        return logprobs, torch.cat([found.entropy for found in pieces]), squares

    @staticmethod
    def backward(ctx, of_logprobs: Tensor | None, of_entropy: Tensor | None, _: Tensor | None):  # noqa: ANN001, ANN205
        hidden, weight, words = ctx.saved_tensors
        size = ctx.sampling.chunk_tokens
        gain = torch.zeros(len(hidden), device=hidden.device) if of_logprobs is None else of_logprobs
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        into_hidden = torch.empty_like(hidden) if wants_hidden else None
        into_weight = torch.empty_like(weight) if wants_weight else None
        for number, found in enumerate(ctx.pieces):
            part = slice(number * size, (number + 1) * size)
            # Its own logits are written over: a second backward pass multiplies again.
            kept, ctx.logits = ctx.logits, None
            logits = torch.nn.functional.linear(hidden[part], weight) if kept is None else kept
            gains = gain[part], None if of_entropy is None else of_entropy[part]
            slope_in_place(logits, words[part], found, gains, ctx.sampling, ctx.group)
            if into_hidden is not None:
                torch.mm(logits, weight, out=into_hidden[part])
            if into_weight is not None:
                into_weight.addmm_(logits.t(), hidden[part], beta=int(number > 0))
            del logits, kept  # before the next piece is made
        return into_hidden, into_weight, None, None, None


class ValueHead(torch.nn.Module):
    """Takes the place of `GPTModel.output_layer`. Every tensor-parallel rank holds all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # Zero values: the first advantages are the plain returns.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[s,b,H] (under sequence parallelism this rank's positions) to float32 [s,b,1] of all positions."""
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self._sequence_parallel:
            # False: every rank has the whole loss, so that gradients are split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
