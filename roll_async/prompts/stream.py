"""The prompt stream: deterministic, shuffled per epoch, mixed by domain, addressed by position.

Worked example, domains math (4 rows) and code (2 rows), no probabilities: the pattern of domains is math, code, math,
math, code, math and repeats; position 7 is the second math prompt of its round, so the sixth math prompt of the run:
row 1 of the shuffled order of epoch 1.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

from roll_async.schema import Prompt

_MAX_PERIOD = 1_000_000
_PROBABILITY_PERIOD = 10_000
"""Positions after which the pattern of domains repeats: shares are exact to 1e-4."""


class ShuffledPrompts:
    """`rollout/protocol.py: PromptSource`. Position -> (domain, epoch, row) by arithmetic and a seeded shuffle per
    epoch and domain.
    """

    def __init__(
        self,
        by_domain: Mapping[str, Sequence[Prompt]],
        *,
        seed: int,
        probabilities: Mapping[str, float] | None = None,
        num_epochs: int | None = None,
    ) -> None:
        """`probabilities`: share of each domain, sum 1; None = by size. `num_epochs`: the stream ends after this many
        times the number of all prompts; None = never.
        """
        self._domains = tuple(by_domain)
        self._prompts = [list(by_domain[name]) for name in self._domains]
        self._seed, self._num_epochs = seed, num_epochs
        self._size = sum(map(len, self._prompts))
        shares, period = [len(p) / self._size for p in self._prompts], min(self._size, _MAX_PERIOD)
        if probabilities is not None:
            shares, period = [probabilities[name] for name in self._domains], _PROBABILITY_PERIOD
        self._pattern, self._nth, self._per_round = _interleave(shares, 1 if len(shares) == 1 else period)
        self._orders: dict[tuple[int, int], array] = {}

    def at(self, index: int) -> Prompt | None:
        """The prompt at this position; None from the end of the last epoch on."""
        assert index >= 0
        if self._num_epochs is not None and index >= self._num_epochs * self._size:
            return None
        rounds, place = divmod(index, len(self._pattern))
        domain = self._pattern[place]
        nth = rounds * self._per_round[domain] + self._nth[place]
        prompts = self._prompts[domain]
        epoch, position = divmod(nth, len(prompts))
        return prompts[self._order(domain, epoch)[position]]

    def _order(self, domain: int, epoch: int) -> array:
        """Row numbers of one epoch. The epoch before is kept, too: requeued prompts come from there."""
        key = (domain, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or abs(k[1] - epoch) <= 1}
            order = list(range(len(self._prompts[domain])))
            # Python seeds by a digest of a text, which is the same in every process.
            random.Random(f"{self._seed}/{self._domains[domain]}/{epoch}").shuffle(order)
            self._orders[key] = array("q", order)  # 8 bytes a row; a list takes several times that
        return self._orders[key]


def _interleave(shares: Sequence[float], period: int) -> tuple[array, array, list[int]]:
    """A pattern of domain numbers in which every prefix holds each domain as close to its share as possible (largest
    deficit first); for each place how often its domain came before it; and the count of each domain in the pattern.
    """
    counts = [0] * len(shares)
    pattern, nth = array("q"), array("q")
    for position in range(1, period + 1):
        chosen = max(range(len(shares)), key=lambda d: shares[d] * position - counts[d])
        pattern.append(chosen)
        nth.append(counts[chosen])
        counts[chosen] += 1
    return pattern, nth, counts
