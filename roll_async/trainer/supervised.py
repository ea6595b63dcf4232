"""Training steps on given rows: which rows a step takes, as tensors; cross-entropy or preferences; held-out rows.

    rows --epoch by epoch, each in an order of its own--> step --> GivenRows --> update

Shape letters: B rows of a step, T positions.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from roll_async.algorithms.objective import PreferenceOptions, preference_loss
from roll_async.config.schema import DpoConfig, SupervisedConfig
from roll_async.prompts.given import GivenRow, digest_of
from roll_async.trainer.protocol import GivenRows, StepReport, TokenRows, TrainerGroup

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = 256
"""Rows of a call that only scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenData:
    """All rows of a run; of pairs chosen, rejected, chosen, ..."""

    rows: Sequence[GivenRow]
    held_out: Sequence[GivenRow] = ()


def num_steps(config: SupervisedConfig, data: GivenData) -> int:
    """Training steps of the run: max_steps, or what num_train_epochs takes; the last one may have fewer rows."""
    if config.num_train_epochs is None:
        return config.max_steps
    num_rows = len(data.rows) // (2 if isinstance(config, DpoConfig) else 1)
    return -(-config.num_train_epochs * num_rows // config.train_batch_size)


class SupervisedLearner:
    """`pipelines/supervised.py: GivenLearner`. The position in the data is in the checkpoint: no row is skipped or
    trained twice after a resume, also with another train_batch_size.
    """

    def __init__(self, actor: TrainerGroup, config: SupervisedConfig, data: GivenData) -> None:
        self._actor, self._data, self._seed = actor, data, config.seed
        self._preference = None
        if isinstance(config, DpoConfig):
            self._preference = PreferenceOptions(beta=config.beta, label_smoothing=config.label_smoothing)
        self._size = 1 if self._preference is None else 2
        """Rows that belong together."""
        self._num = len(data.rows) // self._size
        self._batch = config.train_batch_size
        epochs, self._max_steps = config.num_train_epochs, config.max_steps
        self._end = None if epochs is None else epochs * self._num
        """Position at which the run ends; None: where its steps do."""
        self._resumes = config.checkpoint.resume_from is not None
        self._position = 0
        self._digest = digest_of(data.rows)
        self._reference: Tensor | None = None  # [rows] sums of log-probs
        self._held_out_reference: Tensor | None = None

    def export_state(self) -> dict[str, object]:
        """What a checkpoint must hold, as plain JSON values."""
        return {"position": self._position, "rows": self._digest}

    def restore_state(self, state: Mapping[str, object]) -> None:
        """Go on with what `export_state` gave. Raises ValueError for other rows."""
        if state.get("rows") != self._digest:
            raise ValueError(
                f"actor_train.data_args: the checkpoint is of rows {state.get('rows')}, these are {self._digest}; go "
                "on in the same rows: name its files, or begin a new run (exp_name, pretrain=RUN/hf)"
            )
        self._position = int(state["position"])  # type: ignore[call-overload]

    def last_step(self, restored: int) -> int:
        """Of the run, once its position is restored: another train_batch_size makes other steps of what is left."""
        return self._max_steps if self._end is None else restored - (self._position - self._end) // self._batch

    async def prepare(self) -> None:
        """Before a checkpoint is restored: of pairs, the log-probs of the model that the run starts from, once."""
        if self._preference is None:
            return
        used, reached = [*range(len(self._data.rows))], self._max_steps * self._batch
        if self._end is None and reached < self._num and not self._resumes:  # it ends before it has seen all of them
            used = [row for item in map(self._item, range(reached)) for row in self._rows_of(item)]
        self._reference = torch.zeros(len(self._data.rows))
        self._reference[used] = await self._sums([self._data.rows[row] for row in used])
        self._held_out_reference = await self._sums(self._data.held_out)
        logger.info("log-probs of the reference: %d rows, once", len(used) + len(self._data.held_out))

    async def learn(self, step: int) -> StepReport | None:
        """One step; None at the end of the data."""
        loop, stop = asyncio.get_running_loop(), self._position + self._batch
        items = range(self._position, stop if self._end is None else min(stop, self._end))
        if not items:
            return None
        began = loop.time()
        numbers = [row for item in map(self._item, items) for row in self._rows_of(item)]
        rows = [self._data.rows[number] for number in numbers]
        given = _tensors(rows)
        batch = GivenRows(
            tokens=given.tokens,
            lengths=given.lengths,
            mask=given.mask,
            images=given.images,
            preference=self._preference,
            ref_logprobs=None if self._reference is None else self._reference[numbers],
        )
        made = loop.time()
        metrics = await self._actor.update_given(batch, step)
        self._position = items.stop
        return StepReport(
            metrics={
                **metrics,
                "data/epoch": self._position / self._num,
                "data/trained_tokens": float(given.mask.sum()),
            },
            logprobs_s=0.0,
            train_s=loop.time() - made,
            collation_s=made - began,
            num_samples=len(rows),
            num_tokens=int(given.lengths.sum()),
        )

    async def validate(self) -> dict[str, float]:
        """The loss of the held-out rows, as in training."""
        rows = self._data.held_out
        if self._preference is None:
            tokens = max(1, sum(sum(row.mask[1:]) for row in rows))  # nothing predicts the first
            return {"validation/loss": -float((await self._sums(rows)).sum()) / tokens}
        assert self._held_out_reference is not None, "prepare comes first"
        losses, sums = preference_loss(
            logprobs_2P=await self._sums(rows), ref_logprobs_2P=self._held_out_reference, options=self._preference
        )
        means = {f"validation/{name}": float(value) / len(losses) for name, value in sums.items()}
        return {"validation/loss": float(losses.mean()), **means}

    async def _sums(self, rows: Sequence[GivenRow]) -> Tensor:
        """[rows] sums of the log-probs of the trained tokens, of the weights now."""
        parts = [rows[start : start + _SCORED_AT_ONCE] for start in range(0, len(rows), _SCORED_AT_ONCE)]
        found = [(await self._actor.compute_logprobs(_tensors(part))).double().sum(-1) for part in parts]
        return torch.cat(found).float() if found else torch.zeros(0)

    def _item(self, position: int) -> int:
        """The row, or pair, at a position of the data."""
        epoch, place = divmod(position, self._num)
        return _order(self._seed, epoch, self._num)[place]

    def _rows_of(self, item: int) -> Iterator[int]:
        return iter(range(item * self._size, (item + 1) * self._size))


@lru_cache(2)
def _order(seed: int, epoch: int, num: int) -> list[int]:
    """An order of its own for each epoch."""
    return random.Random(f"{seed}/rows/{epoch}").sample(range(num), num)


def _tensors(rows: Sequence[GivenRow]) -> TokenRows:
    """The first token has nothing before it that predicts it."""
    tokens = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True).long()
    mask = pad_sequence([torch.tensor(list(row.mask), dtype=torch.bool) for row in rows], batch_first=True)
    mask[:, 0] = False
    lengths = torch.tensor([len(row.tokens) for row in rows])
    images = tuple(row.images for row in rows) if any(row.images for row in rows) else ()
    return TokenRows(tokens=tokens, lengths=lengths, mask=mask, images=images)
