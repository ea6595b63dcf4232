"""The rows of a batch by distillation teacher: who scores which, and the log-probs of all of them. Shape letters: B
rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import torch
from torch import Tensor

from roll_async.algorithms.masked import masked_mean
from roll_async.schema import TrainBatch
from roll_async.trainer.protocol import TokenRows


def taught_by(batch: TrainBatch, teacher: str) -> Tensor:
    """[B] bool: rows that this teacher scores."""
    return torch.tensor([name == teacher for name in batch.teachers])


def chosen_rows(rows: TokenRows, own: Tensor) -> TokenRows:
    """The rows where `own` [B] is True, at the width of all."""
    images = tuple(compress(rows.images, own.tolist()))
    return TokenRows(tokens=rows.tokens[own], lengths=rows.lengths[own], mask=rows.mask[own], images=images)


def merged_logprobs(batch: TrainBatch, scored: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """[B,T] log-probs of each row's teacher, 0 where it has none or nothing is sampled; None in a run without teachers.
    `scored`: by ranks, rows [B] bool and their log-probs [rows,T]; what addresses scored came with the batch.

    Example: rows of maths, code, maths; the ranks of maths score rows 0 and 2, row 1 keeps what came with it. Raises
    RuntimeError for a row that nobody scored.
    """
    if batch.teacher_logprobs is None:
        return None
    merged, waiting = batch.teacher_logprobs.clone(), torch.tensor([bool(name) for name in batch.teachers])
    sampled = batch.mask & waiting[:, None]
    for own, logprobs in scored:
        assert logprobs is not None
        merged[own], waiting = logprobs, waiting & ~own
    lost = waiting & (merged.isnan() & batch.mask).any(-1)
    if bool(lost.any()):
        raise RuntimeError(
            f"{int(lost.sum())} rows have no log-probs of their teacher {batch.teachers[int(lost.nonzero()[0])]}; if "
            "the ledger is that of a run without it, remove the ledger"
        )
    return torch.where(sampled, merged, 0.0)


def teacher_metrics(batch: TrainBatch, distance: Tensor, policy: Tensor, teachers: Iterable[str]) -> dict[str, float]:
    """Share of the tokens and mean KL of each teacher. `distance`: [B,T] k1 estimates; `policy`: [B,T] bool, the
    tokens that are distilled.
    """
    metrics, num_tokens = {}, max(1, int(policy.sum()))
    for name in teachers:
        own = policy & taught_by(batch, name)[:, None]
        metrics[f"distill/{name}/token_share"] = int(own.sum()) / num_tokens
        if bool(own.any()):
            metrics[f"distill/{name}/kl"] = float(masked_mean(values_BT=distance, mask_BT=own))
    return metrics
