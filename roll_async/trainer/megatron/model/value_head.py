"""The critic's last layer: hidden states to one number each. Shape letters: S positions, B rows, H hidden size."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


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
        """[S,B,H] (under sequence parallelism this rank's positions) to float32 [S,B,1] of all positions."""
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self._sequence_parallel:
            # False: every rank has the whole loss, so that gradients are split, not summed.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
