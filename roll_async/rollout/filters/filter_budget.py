"""How many groups may be generated for one batch before the run ends with an error about its data
(`filter_groups.max_num_gen_batches`), and a line of log for each round of generation that did not suffice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from roll_async.config.schema import PipelineConfig
from roll_async.schema import Group

logger = logging.getLogger(__name__)


class GeneratedTooMany(ValueError):
    """The limit is reached. Finished groups are kept, every other prompt is still to be generated."""

    def __init__(self, *, num_batches: float, limit: int, kept: int, wanted: int) -> None:
        super().__init__(
            f"num_gen_batches={num_batches:g} >= max_num_gen_batches={limit} with {kept} of {wanted} groups kept. "
            "Generated too many. Please check your data."
        )
        self.groups: tuple[Group, ...] = ()
        """Groups that a round had kept before. In a run with a queue they are in the queue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """How many groups may be generated for one batch."""

    groups_per_batch: int
    gen_batch_size: int
    """Groups of one round of generation."""
    max_num_gen_batches: int
    """Rounds; <= 0 = no limit."""

    @classmethod
    def of(cls, config: PipelineConfig) -> BudgetOptions | None:
        """None without dynamic sampling."""
        groups = config.algorithm.filter_groups
        if not groups.enable:
            return None
        return cls(
            groups_per_batch=config.groups_per_batch,
            gen_batch_size=groups.gen_batch_size,
            max_num_gen_batches=groups.max_num_gen_batches,
        )


class FilterBudget:
    """Counts judged groups per batch of kept ones.

    Example: G = 4, gen_batch_size = 8, limit 2: the 16th judged group since the last full batch raises, unless it
    completes the batch.
    """

    def __init__(self, options: BudgetOptions) -> None:
        self._wanted, self._size = options.groups_per_batch, options.gen_batch_size
        self._limit = options.max_num_gen_batches
        self._kept = self._seen = 0

    def judged(self, *, kept: bool) -> None:
        """Count one group that was kept or filtered. Raises GeneratedTooMany at the limit; <= 0 = no limit."""
        self._seen += 1
        self._kept += kept
        if self._kept >= self._wanted:
            self._kept = self._seen = 0
            return
        batches = self._seen / self._size
        if 0 < self._limit * self._size <= self._seen:
            raise GeneratedTooMany(num_batches=batches, limit=self._limit, kept=self._kept, wanted=self._wanted)
        if self._seen % self._size == 0:
            logger.info(
                "num_prompt_in_batch=%d < prompt_bsz=%d, num_gen_batches=%d < max_num_gen_batches=%d. "
                "Keep generating...",
                self._kept, self._wanted, batches, self._limit,
            )  # fmt: skip
