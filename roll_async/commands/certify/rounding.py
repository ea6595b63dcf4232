"""How far apart two computations of the same number may be: what rounding explains, and no more.

Other instructions, threads, ranks and sizes of blocks add the same terms in another order. Every addition rounds its
result, to either side, so two orders of n additions differ by about sqrt(n) units of rounding of what is summed, not by
n of them. `SURE` times that is a bound that no order reaches, and is far below a defect: a term too many, a rank left
out, a factor of 1.001. So a bound is relative, to the numbers compared or to the terms they are the sum of, and grows
with the number of additions on the way from the weights; nothing is tuned to a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FLOAT32 = 2.0**-24
"""Relative error of one rounding."""
SURE = 4.0


def reordered(num_additions: float, unit: float = FLOAT32) -> float:
    """The relative difference that this many additions in another order explain."""
    return SURE * unit * math.sqrt(num_additions)


@dataclass(frozen=True)
class Bounds:
    """Of a transformer that computes `rows` of up to `length` tokens."""

    layers: int
    hidden: int
    inner: int
    length: int
    rows: int = 0

    @property
    def additions(self) -> int:
        """On the way from an embedding to a log-prob: per layer two norms, four products with `hidden` and one with
        `inner` terms, and attention over `length`; then the output layer.
        """
        return self.layers * (6 * self.hidden + self.inner + self.length) + self.hidden

    @property
    def forward(self) -> float:
        """Of logits and log-probs, relative to the largest."""
        return reordered(self.additions)

    @property
    def step(self) -> float:
        """Of gradients, relative to them: twice as far back through the layers, and summed over the tokens. Of losses
        as well, relative to the terms, which are of both signs.
        """
        return reordered(3 * self.additions + self.rows * self.length)

    @property
    def moved(self) -> float:
        """Of log-probs after an optimizer step, relative to how far it moved them. Adam makes the steps of all weights
        about equal, also of those whose gradient is a small sum of large terms.
        """
        return 10 * self.step


def apart(found: object, wanted: object) -> float:
    """The largest difference of two numbers or tensors of one shape; equal infinities are no difference."""
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (found, wanted))
    assert found.shape == wanted.shape
    return float(torch.where(found == wanted, 0.0, (found - wanted).abs()).max())
