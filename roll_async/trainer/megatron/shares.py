"""A batch split over data-parallel ranks: each is sent its own rows only, and the counts over the whole batch that its
loss is divided by. All tensor, pipeline and context ranks of one replica take the same share.

The split is planned once, where the whole batch is; a rank only computes what its share says. Shape letters: B rows of
the batch, b rows of a share, T positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roll_async.algorithms.aggregation import Denominators
from roll_async.algorithms.objective import LossSettings, PreferenceOptions, count_parts
from roll_async.algorithms.policy_losses import ZERO_GRADIENT_WITHOUT_ADVANTAGE
from roll_async.schema import Image
from roll_async.trainer.megatron.micro_batches import StepRows
from roll_async.trainer.megatron.model.model_flops import ModelFlops
from roll_async.trainer.megatron.model.partition import Parts, RowPlan, plan_rows
from roll_async.trainer.megatron.model.shapes import padded_length
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.trainer.protocol import GivenRows, PolicyRows, TokenRows, ValueRows, mini_batch_ranges

_POLICY_FIELDS = (
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "correction_weights",
    "scores",
    "version_lag",
    "ref_logprobs",
    "segment_ids",
    "selection",
    "policy_mask",
    "cross_entropy_mask",
    "reference_kl_mask",
    "kept",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTraits:
    """What a plan must know of the model, besides the settings of its role."""

    flops: ModelFlops
    """What a row costs."""
    has_experts: bool
    common_shape: bool
    """All micro-batches of all ranks are fed in one shape: the exchange of tokens or stages asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniBatch:
    """One optimizer step, or one scoring call, as one data-parallel rank computes it."""

    micro_batches: Sequence[Parts]
    """`micro_batches[m][i]`: the rows that are copies of sequence i of micro-batch m, by their numbers in the share;
    the model is fed the first. All ranks have the same number of micro-batches; some may be empty.
    """
    feed_shape: tuple[int, int] | None
    """(sequences, positions) of every micro-batch; None = as its sequences need."""
    denominators: Mapping[str, Denominators]
    """By part of the loss, over all rows of the mini-batch, whichever rank computes them."""
    computed: Mapping[str, Denominators]
    """The same over those rows that some rank computes."""
    num_tokens: int
    """Of all rows that some rank computes, prompts included."""
    zero_gradient_rows_share: float
    """Of the rows, those that no rank computes."""
    copied_rows_share: float
    """Of the rows that some rank computes, those that it is not fed, because they are copies of one that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelShard:
    """What one data-parallel rank is sent of a batch."""

    rows: StepRows
    """b rows."""
    numbers: Tensor  # [b] int64: which rows of the batch they are, ascending
    mini_batches: Sequence[MiniBatch]
    preference: PreferenceOptions | None = None
    """Its rows are pairs, and this is their loss."""


class BatchSplitter:
    """Makes the shares of one role, one for each data-parallel rank."""

    def __init__(self, settings: MegatronSettings, model: ModelTraits, num_ranks: int) -> None:
        self._settings, self._model, self._num_ranks = settings, model, num_ranks

    def scoring(self, rows: TokenRows) -> list[DataParallelShard]:
        """Of a scoring call: one pass over all rows."""
        step = self._step_rows(rows, {})
        everything = range(len(rows.lengths))
        return self._shares(step, [(everything, everything)], self._settings.scoring_rows)

    def policy(self, rows: PolicyRows) -> list[DataParallelShard]:
        """Of a step of the actor: rows without a gradient are sent to no rank."""
        fields = {name: x for name in _POLICY_FIELDS if (x := getattr(rows, name)) is not None}
        parts = [(part, self._rows_to_train(rows, part)) for part in self._mini_batches(rows)]
        return self._shares(
            self._step_rows(rows, fields), parts, self._settings.micro_batch_rows, self._loss.normalizer_length
        )

    def values(self, rows: ValueRows) -> list[DataParallelShard]:
        """Of a step of the critic."""
        step = self._step_rows(rows, {"old_values": rows.old_values, "returns": rows.returns})
        parts = [(part, part) for part in self._mini_batches(rows)]
        return self._shares(step, parts, self._settings.micro_batch_rows)

    def given(self, rows: GivenRows) -> list[DataParallelShard]:
        """Of one step on all rows. The two rows of a pair are in one micro-batch."""
        everything = range(len(rows.lengths))
        fields = {} if rows.ref_logprobs is None else {"ref_logprobs": rows.ref_logprobs}
        step = self._step_rows(rows, fields)
        shares = self._shares(
            step, [(everything, everything)], self._settings.micro_batch_rows, paired=rows.preference is not None
        )
        return [replace(share, preference=rows.preference) for share in shares]

    @property
    def _loss(self) -> LossSettings:
        assert self._settings.loss is not None, "a role without a loss cannot train"
        return self._settings.loss

    def _step_rows(self, rows: TokenRows | PolicyRows | ValueRows, fields: Mapping[str, Tensor]) -> StepRows:
        if rows.images and self._settings.micro_batching != "packed":
            raise ValueError(
                f"micro_batching={self._settings.micro_batching} of {self._settings.model_folder}, but rows "
                "have images, whose positions on three axes packed rows alone carry; set micro_batching: packed"
            )
        experts = rows.experts if self._settings.router_replay and not isinstance(rows, ValueRows) else None
        return StepRows(
            tokens=rows.tokens,
            lengths=rows.lengths,
            mask=rows.mask,
            fields=fields,
            experts=experts,
            images=rows.images,
        )

    def _mini_batches(self, rows: PolicyRows | ValueRows) -> list[range]:
        return mini_batch_ranges(len(rows.lengths), self._settings.mini_batch_rows)

    def _rows_to_train(self, rows: PolicyRows, part: range) -> list[int]:
        """The rows of a mini-batch with a gradient. Where every answer of a group has the same score, all
        advantages are zero, and so is the gradient: half of a late GRPO batch. The step is exactly the same without
        them, because the denominators count all rows. One row per data-parallel rank stays, for the schedule.
        """
        loss = self._loss
        # KL and entropy need no advantage; the load of experts is balanced over all rows.
        all_have_gradients = loss.kl_coef > 0 or loss.entropy_coef > 0 or self._model.has_experts
        if all_have_gradients or loss.pg_variant not in ZERO_GRADIENT_WITHOUT_ADVANTAGE:
            return list(part)
        signal = rows.mask & (rows.advantages != 0)
        if rows.correction_weights is not None:
            signal &= rows.correction_weights != 0
        if rows.cross_entropy_mask is not None:
            signal |= rows.cross_entropy_mask
        has_gradient = signal.any(-1).tolist()
        to_train = [row for row in part if has_gradient[row]]
        least = min(len(part), self._num_ranks)
        zero_gradient = [row for row in part if not has_gradient[row]]
        return sorted(to_train + zero_gradient[: max(0, least - len(to_train))])

    def _shares(
        self,
        step: StepRows,
        parts: Sequence[tuple[range, Sequence[int]]],
        rows_per_batch: int,
        normalizer_length: int = 1,
        *,
        paired: bool = False,
    ) -> list[DataParallelShard]:
        """`parts`: of each mini-batch its rows, and those of them that are computed."""
        planned = [
            self._planned(step, part, computed, rows_per_batch, normalizer_length, paired) for part, computed in parts
        ]
        return [_share(step, of_rank) for of_rank in zip(*planned, strict=True)]

    def _planned(
        self,
        step: StepRows,
        part: range,
        computed: Sequence[int],
        rows_per_batch: int,
        normalizer_length: int,
        paired: bool,
    ) -> list[MiniBatch]:
        """By data-parallel rank, still with the row numbers of the batch."""
        # A copy of a row may be in another pair: all of them are fed.
        sequences = [[row] for row in computed] if paired else self._sequences(step, computed)
        lengths = [int(step.lengths[copies[0]]) for copies in sequences]
        plan = plan_rows(
            self._lengths_of_pairs(lengths) if paired else lengths,
            self._settings,
            rows_per_batch=rows_per_batch,
            num_ranks=self._num_ranks,
            flops=self._model.flops,
            common_shape=self._model.common_shape,
        )
        if paired:
            plan = RowPlan(
                ranks=[[[2 * pair + i for pair in batch for i in (0, 1)] for batch in rank] for rank in plan.ranks]
            )
        of_all = MiniBatch(
            micro_batches=[],
            feed_shape=self._common_shape(plan, lengths),
            denominators=count_parts(step.fields, step.mask, part, normalizer_length),
            # Only metrics read it, per token: the normalizer length does not count.
            computed=count_parts(step.fields, step.mask, computed, 1),
            num_tokens=int(step.lengths[list(computed)].sum()),
            zero_gradient_rows_share=1 - len(computed) / max(1, len(part)),
            copied_rows_share=1 - len(sequences) / max(1, len(computed)),
        )
        return [
            replace(of_all, micro_batches=[[sequences[i] for i in batch] for batch in batches])
            for batches in plan.ranks
        ]

    def _lengths_of_pairs(self, lengths: Sequence[int]) -> list[int]:
        """What each pair takes in a micro-batch: packed its two rows, else twice the longer one."""
        packed = self._settings.micro_batching == "packed"
        padded = [padded_length(length, self._settings) for length in lengths]
        both = zip(padded[::2], padded[1::2], strict=True)
        return [chosen + rejected if packed else 2 * max(chosen, rejected) for chosen, rejected in both]

    def _sequences(self, step: StepRows, computed: Sequence[int]) -> Parts:
        """The rows that are computed, copies together: equal in tokens, mask and images. Samples of a group are often
        copies of one another, and a model that draws nothing at random answers copies alike. Their losses may differ
        (advantages, behaviour log-probs); what flows back into the one answer is the sum of their gradients. With
        experts every row stays alone: their load is balanced over all rows, and each row may have its own record.
        """
        if self._model.has_experts or self._settings.drops_out:
            return [[row] for row in computed]
        found: dict[tuple[bytes, tuple[Image, ...]], list[int]] = {}
        for row in computed:
            length = int(step.lengths[row])
            content = hashlib.sha256(step.tokens[row, :length].contiguous().numpy())  # no copy of a batch's tokens
            content.update(step.mask[row, :length].contiguous().numpy())
            found.setdefault((content.digest(), step.images_of(row)), []).append(row)
        return list(found.values())

    def _common_shape(self, plan: RowPlan, lengths: Sequence[int]) -> tuple[int, int] | None:
        """One shape for all micro-batches of all ranks, where the model asks for it."""
        if not self._model.common_shape:
            return None
        batches = [part for rank in plan.ranks for part in rank if part]
        spans = [[padded_length(lengths[i], self._settings) for i in part] for part in batches]
        if self._settings.micro_batching == "packed":
            return 1, max((sum(x) for x in spans), default=1)
        return max((len(x) for x in spans), default=1), max((max(x) for x in spans), default=1)


def _share(step: StepRows, mini_batches: Sequence[MiniBatch]) -> DataParallelShard:
    """The rows of these mini-batches, and the mini-batches with row numbers of the share."""
    numbers = sorted(row for part in mini_batches for batch in part.micro_batches for rows in batch for row in rows)
    place = {row: i for i, row in enumerate(numbers)}
    index = torch.tensor(numbers, dtype=torch.int64)
    return DataParallelShard(
        rows=step.taken(index),
        numbers=index,
        mini_batches=[
            replace(
                part,
                micro_batches=[[[place[row] for row in rows] for rows in batch] for batch in part.micro_batches],
            )
            for part in mini_batches
        ],
    )
