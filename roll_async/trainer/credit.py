"""Rewards of trajectories and turns to advantages of tokens, whatever rows they lie in.

A trajectory may be one row of many turns, one row per turn, or a tree of rows. The estimators of `algorithms/` see one
row per unit of credit: the tokens are folded into rows of trajectories (or of turns, for the estimators that compare
turns), the estimator runs, and its result is unfolded to where the tokens came from. So group statistics count every
trajectory once, and returns to go pass from a row to the next row of the same trajectory.

Worked example. Two rows of one trajectory hold the turns 0 and 1, with 2 and 1 tokens; rewards 0.2 and 1. Folded into
trajectories: one row of 3 tokens with token rewards `0 0.2 1`. Folded into turns: two rows, of 2 and 1 tokens.

Shape letters: B rows of the batch, T positions, R folded rows, W folded positions, K turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_async.algorithms.advantages import AdvantageInputs, estimator_function
from roll_async.algorithms.masked import segment_ids_from_mask
from roll_async.schema import TrainBatch

COMPARE_TURNS = frozenset({"step_reinforce", "gigpo"})
"""Estimators whose row is a turn."""


@dataclass(frozen=True, slots=True)
class TrajectoryLayout:
    """Where the n valid tokens of the batch lie in folded rows."""

    source: Tensor  # [n] int64 into the flattened batch
    target: Tensor  # [n] int64 into the flattened folded rows
    mask: Tensor  # [R,W] bool
    shape: torch.Size  # of the batch

    @classmethod
    def of(cls, unit_BT: Tensor, order_BT: Tensor, num_units: int) -> TrajectoryLayout:
        """`unit_BT`: the folded row of each token, -1 where not valid; `order_BT`: within it tokens are sorted by this
        number, then by where they are.
        """
        source = (unit_BT >= 0).flatten().nonzero().flatten()
        # Least significant key first: the second sort is stable, so it keeps this order within a unit.
        source = source[torch.argsort(order_BT.flatten()[source], stable=True)]
        source = source[torch.argsort(unit_BT.flatten()[source], stable=True)]
        units = unit_BT.flatten()[source]
        counts = torch.bincount(units, minlength=num_units)
        # cumsum - counts is where the tokens of each unit begin.
        place = torch.arange(len(units)) - (counts.cumsum(0) - counts)[units]
        width = max(1, int(counts.max())) if len(counts) else 1
        mask = torch.arange(width)[None] < counts[:, None]
        return cls(source, units * width + place, mask, unit_BT.shape)

    def fold(self, values_BT: Tensor) -> Tensor:
        """[R,W] of [B,T]; 0 where nothing is."""
        folded = values_BT.new_zeros(self.mask.numel())
        folded[self.target] = values_BT.flatten()[self.source]
        return folded.view(self.mask.shape)

    def unfold(self, values_RW: Tensor) -> Tensor:
        """[B,T] of [R,W]; 0 where not valid."""
        flat = values_RW.new_zeros(self.shape.numel())
        flat[self.source] = values_RW.flatten()[self.target]
        return flat.view(self.shape)


def first_rows(batch: TrainBatch) -> Tensor:
    """[R] the first row of each trajectory."""
    index = _trajectory_index(batch)
    # Larger than any row number, so that the minimum below is a row.
    first = torch.full((int(index.max()) + 1,), len(index))
    return first.scatter_reduce(0, index, torch.arange(len(index)), "amin")


def of_each_row(batch: TrainBatch, values_R: Tensor) -> Tensor:
    """[B] the value of each row's trajectory."""
    return values_R[_trajectory_index(batch)]


def segments(batch: TrainBatch) -> Tensor:
    """[B,T] number of the turn within its row, -1 where not sampled."""
    return segment_ids_from_mask(mask_BT=batch.mask) if batch.turn_of is None else batch.turn_of


def token_rewards(batch: TrainBatch, scores: Tensor) -> Tensor:
    """[B,T] each turn's reward on its last token, and what the trajectory's score [B] says beyond their sum (shaping,
    the verdict of a grader) on the trajectory's last token.
    """
    fold = _by_trajectory(batch)
    rewards = torch.zeros_like(fold.mask, dtype=scores.dtype)
    if batch.turns is not None:
        assert batch.turn_of is not None
        turn = torch.where(fold.mask, fold.fold(batch.turn_of), -1)
        # The last token of a turn: the next folded position is of another turn, or of none (-1).
        ends = fold.mask & (turn != torch.nn.functional.pad(turn[:, 1:], (0, 1), value=-1))
        rewards = torch.where(ends, batch.turns.rewards.to(scores.dtype)[turn.clamp(min=0)], 0)
    # Counted from the end, the first valid token; what follows it is masked.
    last = fold.mask & (fold.mask.long().flip(-1).cumsum(-1).flip(-1) == 1)
    # All rows of a trajectory carry its one score, so the first stands for them.
    rest = scores[first_rows(batch)] - rewards.sum(-1)
    return fold.unfold(rewards + torch.where(last, rest[:, None], 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimatorInputs:
    """What single estimators read besides scores and rewards."""

    row_mask: Tensor | None = None  # [B] bool, rows that are compared; None = all
    values: Tensor | None = None  # [B,T] of the critic (gae)
    reward_parts: Tensor | None = None  # [B,K] one column per reward (gdpo)
    role_baselines: Tensor | None = None  # [B] (rae)
    logprobs: Tensor | None = None  # [B,T] (optimal_token_baseline)
    squares: Tensor | None = None  # [B,T] (optimal_token_baseline)


def advantages(
    batch: TrainBatch,
    estimator: str,
    options: Mapping[str, object],
    *,
    scores: Tensor,
    rewards: Tensor | None,
    evidence: EstimatorInputs,
) -> tuple[Tensor, Tensor]:
    """(advantages [B,T], returns [B,T]). `scores` [B] of the trajectories; `rewards` [B,T] replaces them, token by
    token.
    """
    compute = estimator_function(estimator)
    if estimator in COMPARE_TURNS:
        fold, inputs = _turn_inputs(batch, scores, rewards)
    else:
        fold, lead = _by_trajectory(batch), first_rows(batch)

        def per_token(values: Tensor | None) -> Tensor | None:
            return None if values is None else fold.fold(values)

        def per_trajectory(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[lead]

        inputs = AdvantageInputs(
            scores=scores[lead],
            mask=fold.mask,
            group_index=batch.group_index[lead],
            row_mask=per_trajectory(evidence.row_mask),
            token_rewards=per_token(rewards),
            values=per_token(evidence.values),
            baseline_scores=per_trajectory(batch.baseline_scores),
            reward_parts=per_trajectory(evidence.reward_parts),
            role_baselines=per_trajectory(evidence.role_baselines),
            logprobs=per_token(evidence.logprobs),
            squares=per_token(evidence.squares),
            segment_ids=None if batch.turn_of is None else fold.fold(_turn_order(batch)),
        )
    found, returns = compute(inputs, **options)
    return fold.unfold(found), fold.unfold(returns)


def _turn_inputs(batch: TrainBatch, scores: Tensor, rewards: Tensor | None) -> tuple[TrajectoryLayout, AdvantageInputs]:
    """One row per turn."""
    turns, turn_of = batch.turns, batch.turn_of
    if turns is None or turn_of is None:
        raise ValueError("estimators that compare turns need trajectories of turns; this batch has single answers")
    # A turn lies in one row, in order: nothing to sort by.
    fold = TrajectoryLayout.of(turn_of, torch.zeros_like(turn_of), len(turns.index))
    lead = first_rows(batch)[turns.trajectory]
    of_tokens = token_rewards(batch, scores) if rewards is None else rewards
    return fold, AdvantageInputs(
        scores=scores[lead],
        mask=fold.mask,
        group_index=batch.group_index[lead],
        trajectory_index=turns.trajectory,
        step_index=turns.index,
        step_rewards=fold.fold(of_tokens).sum(-1),
        state_index=turns.states,
    )


def _by_trajectory(batch: TrainBatch) -> TrajectoryLayout:
    index = _trajectory_index(batch)
    unit = torch.where(batch.mask, index[:, None], -1)
    return TrajectoryLayout.of(unit, _turn_order(batch), int(index.max()) + 1)


def _turn_order(batch: TrainBatch) -> Tensor:
    """[B,T] order of each token's turn in its trajectory; 0 for single answers."""
    if batch.turns is None:
        return torch.zeros_like(batch.tokens)
    assert batch.turn_of is not None
    return torch.where(batch.mask, batch.turns.index[batch.turn_of.clamp(min=0)], 0)


def _trajectory_index(batch: TrainBatch) -> Tensor:
    return torch.arange(len(batch.lengths)) if batch.trajectory_index is None else batch.trajectory_index
