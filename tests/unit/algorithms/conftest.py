"""Batches the algorithm tests share. Everything under the mask is NaN or infinite: no test needs a clean one."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from roll_async.algorithms.policy_losses import PolicyLossInputs

NOISE = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=torch.float64)


def poison(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with NaN and infinities where masked, in turn."""
    noise = NOISE[torch.arange(values.numel()) % 3].view_as(values)
    return torch.where(mask, values, noise.to(values.dtype))


@dataclass
class RandomBatch:
    """A float64 batch with holes, one empty row when there are several, and segment numbers that are not 0, 1, 2."""

    seed: int
    rows: int = 4
    length: int = 6

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.length)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=g, dtype=torch.float64)

        self.mask = torch.rand(shape, generator=g) < 0.75
        if self.rows > 1:
            self.mask[int(torch.randint(self.rows, (), generator=g))] = False
        current = -torch.rand(shape, generator=g, dtype=torch.float64) * 3
        self.logprobs = poison(current, self.mask)
        self.proximal = poison(current + normal(0.3), self.mask)
        self.behaviour = poison(current + normal(0.4), self.mask)
        advantages = normal(1.0)
        self.advantages = poison(torch.where(torch.rand(shape, generator=g) < 0.1, 0, advantages), self.mask)
        scores = torch.randint(-1, 2, (self.rows,), generator=g).double()
        self.scores = torch.where(self.mask.any(-1), scores, torch.nan)
        self.segments = torch.randint(0, 3, shape, generator=g) * 1000 + 7
        self.selection = torch.rand(shape, generator=g) < 0.5
        self.lag = torch.randint(0, 12, shape, generator=g)

    def inputs(self, logprobs: Tensor | None = None) -> PolicyLossInputs:
        return PolicyLossInputs(
            logprobs=self.logprobs if logprobs is None else logprobs,
            proximal_logprobs=self.proximal,
            behaviour_logprobs=self.behaviour,
            advantages=self.advantages,
            mask=self.mask,
            scores=self.scores,
            segment_ids=self.segments,
            selection=self.selection,
        )


@pytest.fixture
def make_batch():
    return RandomBatch


@pytest.fixture
def poisoned():
    return poison
