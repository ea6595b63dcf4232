"""The prompt stream: deterministic, shuffled per epoch, mixed by domain, addressed by position."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll_async.prompts.rows import BadRows, Columns, Row, read_rows
from roll_async.prompts.tokenizer import load_tokenizer, render
from roll_async.schema import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The part of the config the loader obeys."""

    files: tuple[str, ...]
    columns: Columns
    template: str
    prompt_length: int
    """Tokens; longer prompts are skipped and counted."""
    domains: Mapping[str, tuple[str, ...]]
    """Tags of each domain; a single domain takes all."""
    tokenizer_folder: str


def load_prompts(options: DataOptions) -> dict[str, list[Prompt]]:
    """Tokenised prompts by domain. Raises ValueError when nothing is left, naming what was skipped and why."""
    tokenizer = load_tokenizer(options.tokenizer_folder)
    bad, too_long, homeless = BadRows(), 0, 0
    by_domain: dict[str, list[Prompt]] = {name: [] for name in options.domains}
    for row in read_rows(options.files, options.columns, bad):
        domain = domain_of(row, options.domains)
        if domain is None:
            homeless += 1
            continue
        ids = render(tokenizer, row.messages, options.template)
        if len(ids) > options.prompt_length:
            too_long += 1
            continue
        by_domain[domain].append(
            Prompt(
                row_id=row.row_id,
                token_ids=array("i", ids),
                domain=domain,
                ground_truth=row.ground_truth,
                text=row.messages[-1]["content"],
            )
        )
    for problem in bad.problems:
        logger.warning("skipped %s", problem)
    kept = sum(map(len, by_domain.values()))
    logger.info(
        "%d prompts of %s (skipped: %d malformed, %d longer than prompt_length %d, %d without a domain)",
        kept, ", ".join(options.files), len(bad.problems), too_long, options.prompt_length, homeless,
    )  # fmt: skip
    empty = [name for name, prompts in by_domain.items() if not prompts]
    if empty:
        raise ValueError(
            f"no prompt for domain {', '.join(empty)} in {', '.join(options.files)}: {kept} kept, {len(bad.problems)} malformed, "
            f"{too_long} longer than prompt_length {options.prompt_length}, {homeless} whose tag belongs to no domain"
        )
    return by_domain


def domain_of(row: Row, domains: Mapping[str, tuple[str, ...]]) -> str | None:
    """The domain whose tags hold the row's tag; a single domain takes all rows."""
    if len(domains) == 1:
        return next(iter(domains))
    return next((name for name, tags in domains.items() if row.tag in tags), None)


class ShuffledPrompts:
    """`rollout/protocol.py: PromptSource`. Position -> (domain, epoch, row) by arithmetic and a seeded shuffle per
    epoch.
    """

    def __init__(
        self,
        by_domain: Mapping[str, Sequence[Prompt]],
        *,
        seed: int,
        probabilities: Mapping[str, float] | None = None,
        num_epochs: int | None = None,
    ) -> None:
        self._prompts = {name: list(prompts) for name, prompts in by_domain.items()}
        self._seed, self._num_epochs = seed, num_epochs
        total = sum(map(len, self._prompts.values()))
        shares = probabilities or {name: len(p) / total for name, p in self._prompts.items()}
        self._pattern = _interleave(shares, period=min(total, 10_000))
        self._before = _running_counts(self._pattern)
        self._size = total
        self._orders: dict[tuple[str, int], list[int]] = {}

    def at(self, index: int) -> Prompt | None:
        """The prompt at this position; None from the end of the last epoch on."""
        if self._num_epochs is not None and index >= self._num_epochs * self._size:
            return None
        rounds, place = divmod(index, len(self._pattern))
        domain = self._pattern[place]
        nth = rounds * self._before[-1][domain] + self._before[place][domain]
        prompts = self._prompts[domain]
        epoch, position = divmod(nth, len(prompts))
        return prompts[self._order(domain, epoch)[position]]

    def _order(self, domain: str, epoch: int) -> list[int]:
        key = (domain, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[1] >= epoch - 1}
            order = list(range(len(self._prompts[domain])))
            random.Random(f"{self._seed}/{domain}/{epoch}").shuffle(order)
            self._orders[key] = order
        return self._orders[key]


def _interleave(shares: Mapping[str, float], *, period: int) -> list[str]:
    """A repeating pattern in which every prefix holds each domain as close to its share as possible (largest deficit
    first).
    """
    counts = dict.fromkeys(shares, 0)
    pattern = []
    for position in range(1, period + 1):
        name = max(shares, key=lambda d: shares[d] * position - counts[d])
        counts[name] += 1
        pattern.append(name)
    return pattern


def _running_counts(pattern: Sequence[str]) -> list[dict[str, int]]:
    counts = dict.fromkeys(pattern, 0)
    running = [dict(counts)]
    for name in pattern:
        counts[name] += 1
        running.append(dict(counts))
    return running
