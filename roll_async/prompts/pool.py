"""A pool of prompts over the stream: what is asked next depends on how earlier answers fared.

    stream position --> the row the stream would ask --> accepted with the row's weight, else another row of its domain
    scores of a group --> pass rate of its row --> solved often enough: retired --> too few left: refilled

Domains keep their shares: the stream says which domain a position asks. The choice of a position is kept until the
position is done with, so that a prompt that is asked again is the same one, and is saved with the position of the run.

Worked example, `floor` 0.1: a row never asked has weight 1; one solved half of the time 1, 9 times of 10 0.36, always
or never 0.1.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roll_async.config.schema import PromptPoolConfig
from roll_async.schema import Prompt

logger = logging.getLogger(__name__)

_TRIES = 64
_VISITS_APART = 3
"""Pass rates are told apart by visit up to this one; the last stands for all later ones."""


@dataclass(slots=True)
class _Record:
    """What is known of one row."""

    visits: int = 0
    rate: float = 0.0
    """Pass rate; each visit counts as much as all before it."""
    solved: int = 0
    """Visits in a row, up to the last, that solved it."""


@dataclass(slots=True)
class _Domain:
    rows: list[Prompt]
    reserve: Sequence[Prompt]
    size: int
    """Rows it began with."""
    ranks: list[float] = field(default_factory=list)
    """Share of the first rows that are easier, by row; rows of the reserve come last."""
    records: dict[int, _Record] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)

    @property
    def num_active(self) -> int:
        return len(self.rows) - len(self.retired)

    def append(self, count: int) -> int:
        """Take rows of the reserve in; how many there were."""
        taken = len(self.rows) - self.size
        more = self.reserve[taken : taken + count]
        self.rows += more
        self.ranks += [1.0] * len(more)
        return len(more)


class PooledPrompts:
    """`rollout/protocol.py: PromptPool`."""

    def __init__(
        self,
        at: Callable[[int], Prompt | None],
        by_domain: Mapping[str, Sequence[Prompt]],
        options: PromptPoolConfig,
        *,
        seed: int,
        reserve: Mapping[str, Sequence[Prompt]] | None = None,
    ) -> None:
        """`at`: the stream over `by_domain`. `reserve`: rows by domain that take the place of retired ones."""
        self._at, self._options, self._seed = at, options, seed
        self._domains = {
            name: _Domain(list(rows), (reserve or {}).get(name, ()), len(rows), _ranks(name, rows, options))
            for name, rows in by_domain.items()
        }
        # By identity: the stream gives these very objects, and rows may be equal.
        self._place = {id(prompt): row for rows in by_domain.values() for row, prompt in enumerate(rows)}
        self._chosen: dict[int, tuple[str, int]] = {}
        self._recorded: set[int] = set()
        self._refills = 0
        self._sums = [[0, 0.0] for _ in range(_VISITS_APART)]  # of pass rates, by visit

    @property
    def metric(self) -> str:
        """Number of a sample that says whether it is solved."""
        return self._options.metric

    def at(self, index: int) -> Prompt | None:
        """The prompt of this position; None when the stream ends or every row is retired."""
        if index not in self._chosen:
            first = self._at(index)
            choice = None if first is None else self._choose(index, first)
            if choice is None:
                return None
            self._chosen[index] = choice
        domain, row = self._chosen[index]
        return self._domains[domain].rows[row]

    def _choose(self, index: int, first: Prompt) -> tuple[str, int] | None:
        name, row = first.domain, self._place[id(first)]
        # By position, so that the draws do not depend on which positions were asked before.
        rng = random.Random(f"{self._seed}/pool/{index}")
        if not self._domains[name].num_active:
            name = max(self._domains, key=lambda d: self._domains[d].num_active)
            if not self._domains[name].num_active:
                return None
            row = rng.randrange(len(self._domains[name].rows))
        domain = self._domains[name]
        for _ in range(_TRIES):
            if rng.random() < self._weight(domain, row, index):
                return name, row
            row = rng.randrange(len(domain.rows))
        # No draw was taken, as where nearly all rows are retired or still too hard.
        active = [r for r in range(len(domain.rows)) if r not in domain.retired]
        return name, max(active, key=lambda r: (self._weight(domain, r, index), -domain.ranks[r]))

    def _weight(self, domain: _Domain, row: int, index: int) -> float:
        options = self._options
        if row in domain.retired:
            return 0.0
        # It opens evenly: at half of these prompts the easier half may be asked.
        if index < options.curriculum_prompts and domain.ranks[row] > (index + 1) / options.curriculum_prompts:
            return 0.0
        record = domain.records.get(row)
        # 4 p (1 - p): the variance of passing as a share of its largest, that at one half.
        return 1.0 if record is None else max(options.floor, 4 * record.rate * (1 - record.rate))

    def record(self, index: int, values: Sequence[float]) -> None:
        """How the samples of a position fared, each in [0, 1]. A position counts once, though generated again."""
        passed = [min(1.0, max(0.0, v)) for v in values if math.isfinite(v)]
        if index not in self._chosen or index in self._recorded or not passed:
            return
        self._recorded.add(index)
        name, row = self._chosen[index]
        domain, now = self._domains[name], sum(passed) / len(passed)
        record = domain.records.setdefault(row, _Record())
        record.rate = now if not record.visits else (record.rate + now) / 2
        of_visit = self._sums[min(record.visits, _VISITS_APART - 1)]
        of_visit[0] += 1
        of_visit[1] += now
        record.visits += 1
        record.solved = record.solved + 1 if now >= self._options.retire_at else 0
        if self._options.retire_after and record.solved >= self._options.retire_after and row not in domain.retired:
            domain.retired.add(row)
            self._refill(name, domain)

    def _refill(self, name: str, domain: _Domain) -> None:
        """Ask the reserve for as many rows as are missing."""
        if domain.num_active >= self._options.refill_below * domain.size:
            return
        found = domain.append(domain.size - domain.num_active)
        if found:
            self._refills += 1
            logger.info("prompts of %s: %d retired, %d refilled from the reserve", name, len(domain.retired), found)
        else:
            logger.warning(
                "prompts of %s: %d of %d are solved and retired, and the reserve is empty; give more in "
                "prompt_pool.refill_file_name", name, len(domain.retired), len(domain.rows)
            )  # fmt: skip

    def state(self, open_indexes: Collection[int]) -> dict[str, object]:
        """Plain JSON: everything a run that goes on needs. `open_indexes`: positions that are not done with."""
        self._chosen = {index: choice for index, choice in self._chosen.items() if index in open_indexes}
        self._recorded &= self._chosen.keys()
        return {
            "chosen": [[index, *choice] for index, choice in sorted(self._chosen.items())],
            "recorded": sorted(self._recorded),
            "domains": {
                name: {
                    "appended": len(domain.rows) - domain.size,
                    "retired": sorted(domain.retired),
                    "records": [[row, r.visits, r.rate, r.solved] for row, r in sorted(domain.records.items())],
                }
                for name, domain in self._domains.items()
            },
            "refills": self._refills,
            "sums": [list(of_visit) for of_visit in self._sums],
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on with what `state` gave. Raises ValueError for other domains or a reserve that is shorter now."""
        stored = state["domains"]
        assert isinstance(stored, Mapping)
        if stored.keys() != self._domains.keys():
            raise ValueError(f"the pool to go on with has domains {', '.join(stored)}, not {', '.join(self._domains)}")
        for name, domain in self._domains.items():
            kept = stored[name]
            # First: numbers of retired and recorded rows may be of the reserve.
            if domain.append(kept["appended"]) != kept["appended"]:
                raise ValueError(f"prompt_pool.refill_file_name holds fewer rows of {name} than the run took from it")
            domain.retired = set(kept["retired"])
            domain.records = {row: _Record(visits, rate, solved) for row, visits, rate, solved in kept["records"]}
        self._chosen = {index: (name, row) for index, name, row in state["chosen"]}  # type: ignore[attr-defined]
        self._recorded = set(state["recorded"])  # type: ignore[call-overload]
        self._refills = int(state["refills"])  # type: ignore[call-overload]
        self._sums = [[int(count), float(total)] for count, total in state["sums"]]  # type: ignore[attr-defined]

    def metrics(self) -> dict[str, float]:
        """Numbers of the pool since the run began, by key."""
        domains = self._domains.values()
        rows, records = sum(len(d.rows) for d in domains), [r for d in domains for r in d.records.values()]
        return {
            "pool/active": float(sum(d.num_active for d in domains)),
            "pool/retired": float(sum(len(d.retired) for d in domains)),
            "pool/reserve": float(sum(len(d.reserve) - (len(d.rows) - d.size) for d in domains)),
            "pool/refills": float(self._refills),
            "pool/seen_share": len(records) / rows,
            **({"pool/visits": sum(r.visits for r in records) / len(records)} if records else {}),
            **dict(self._rates()),
        }

    def _rates(self) -> Iterator[tuple[str, float]]:
        for visit, (count, total) in enumerate(self._sums, 1):
            if count:
                yield f"pool/pass_rate_visit_{visit}", total / count


def _ranks(name: str, rows: Sequence[Prompt], options: PromptPoolConfig) -> list[float]:
    """Share of the rows that are easier, by row; equal ones share theirs. Raises ValueError for a row whose column
    holds no number.
    """
    column = options.curriculum_column
    if column is None:
        return [0.0] * len(rows)
    try:
        levels = [float(prompt.extra[column]) for prompt in rows]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"prompt_pool.curriculum_column {column}: a row of {name} has no number there: {error}"
        ) from error
    first: dict[float, int] = {}
    for place, level in enumerate(sorted(levels)):
        first.setdefault(level, place)
    return [first[level] / len(rows) for level in levels]
