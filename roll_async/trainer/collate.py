"""Whole groups to one padded TrainBatch. Shape letters: B rows, T positions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from roll_async.prompts.teachers import teacher_of
from roll_async.schema import ExpertRecord, ExpertRows, Group, Prompt, Sample, TrainBatch, TurnTable, WeightVersion


def collate(
    groups: Sequence[Group],
    *,
    step: int,
    domains: Sequence[str],
    numbers: Sequence[str] = (),
    unscored: Set[str] = frozenset(),
    teachers: Sequence[str] = (),
) -> TrainBatch:
    """One row per sample, in group order; padded to the longest row. `numbers`: what rewards report and the estimator
    reads; 0 in `unscored` domains. `teachers`: of a run that distils, which `unscored` domains have none of.

    Worked example: prompt `[5, 6]`, response `[7, 8]` sampled by version 3 gives tokens `[5, 6, 7, 8]`, mask `[0, 0,
    1, 1]`, versions `[-1, -1, 3, 3]`. Raises ValueError for a sample without a score: an outage must not reach the
    trainer.
    """
    samples = [(g, s) for g in groups for s in g.samples]
    rows = [s for _, s in samples]
    prompt_lengths = torch.tensor([len(s.prompt_token_ids) for s in rows])
    lengths = prompt_lengths + torch.tensor([len(s.response_token_ids) for s in rows])
    # All rows' values one after another, each put into its cells at once: a step has thousands of rows.
    position = torch.arange(int(lengths.max()))
    # [B,T]; its row-major order is that of the joined values, so a boolean index puts each in its place.
    filled = position < lengths[:, None]
    responded = filled & (position >= prompt_lengths[:, None])
    # [response tokens of all rows], False for tokens of tools and worlds.
    sampled = _joined(bytearray(), [s.loss_mask for s in rows], torch.uint8).bool()
    tokens = torch.zeros(filled.shape, dtype=torch.int64)
    ids = [part for s in rows for part in (s.prompt_token_ids, s.response_token_ids)]
    tokens[filled] = _joined(array("i"), ids, torch.int32).long()
    mask = torch.zeros(filled.shape, dtype=torch.bool)
    mask[responded] = sampled
    logprobs = torch.zeros(filled.shape, dtype=torch.float32)
    logprobs[mask] = _joined(array("f"), [s.behaviour_logprobs for s in rows], torch.float32)[sampled]
    # -1, because 0 is a version: the initial model.
    versions = torch.full(filled.shape, -1, dtype=torch.int64)
    versions[mask] = _expand_runs([run for s in rows for run in s.version_runs])[sampled]
    trajectory = _trajectories(groups)
    turns, turn_of = _turns(rows, trajectory, mask)
    ends = dict(zip(trajectory.tolist(), rows, strict=True))  # the last row of each trajectory
    return TrainBatch(
        step=step,
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        mask=mask,
        behaviour_logprobs=logprobs,
        versions=versions,
        scores=torch.tensor([_score(s) for s in rows], dtype=torch.float32),
        group_index=torch.tensor([g.group_id for g, _ in samples]),
        cut=torch.tensor([ends[t].is_cut for t in trajectory.tolist()]),
        domain_index=torch.tensor([domains.index(g.prompt.domain) for g, _ in samples]),
        domains=tuple(domains),
        baseline_scores=_baselines(groups),
        experts=_experts([s.experts for s in rows]),
        trajectory_index=trajectory,
        turns=turns,
        turn_of=turn_of,
        roles=tuple(_role(g.prompt) for g, _ in samples),
        reported={
            name: torch.tensor([0.0 if g.prompt.domain in unscored else _number(s, name) for g, s in samples])
            for name in numbers
        },
        teachers=tuple(
            "" if g.prompt.domain in unscored else teacher_of(g.prompt.domain, g.prompt.extra, teachers)
            for g, _ in samples
            if teachers
        ),
        teacher_logprobs=_taught(rows, responded) if teachers else None,
        images=tuple(g.prompt.images for g, _ in samples) if any(g.prompt.images for g in groups) else (),
    )


def _taught(samples: Sequence[Sample], responded: Tensor) -> Tensor:
    """[B,T] log-probs that came with samples, NaN where none did. `responded`: [B,T] bool, the samples' responses."""
    none = array("f", [math.nan])
    found = [none * len(s.loss_mask) if s.teacher_logprobs is None else s.teacher_logprobs for s in samples]
    logprobs = torch.full(responded.shape, math.nan)
    logprobs[responded] = _joined(array("f"), found, torch.float32)
    return logprobs


def _role(prompt: Prompt) -> str:
    role = prompt.extra.get("role")
    return prompt.domain if role is None else f"{prompt.domain}/{role}"


def _number(sample: Sample, name: str) -> float:
    reported = {} if sample.reward is None else sample.reward.metrics
    if name not in reported:
        raise ValueError(
            f"sample {sample.sample_id}: its reward reports no {name!r}, which algorithm.adv_options.rewards names; it "
            f"reports {', '.join(sorted(reported)) or 'nothing but the score'}"
        )
    return float(reported[name])


def _trajectories(groups: Sequence[Group]) -> Tensor:
    """[B] numbers the trajectories of the batch, in the order of their first rows."""
    numbers: dict[tuple[int, object], int] = {}
    found = []
    for place, group in enumerate(groups):
        for row, sample in enumerate(group.samples):
            # A row that names no trajectory is one; its number (int) never meets a name (str) of its group.
            found.append(numbers.setdefault((place, sample.trajectory or row), len(numbers)))
    return torch.tensor(found)


def _turns(samples: Sequence[Sample], trajectory: Tensor, mask: Tensor) -> tuple[TurnTable, Tensor] | tuple[None, None]:
    """The turns of all rows, and [B,T] which of them each trained token belongs to. None when no row has turns. Raises
    ValueError for a trained token outside of every turn.
    """
    if not any(sample.turns for sample in samples):
        return None, None
    turn_of = torch.full(mask.shape, -1, dtype=torch.int64)
    turns, owners = [], []
    for row, sample in enumerate(samples):
        first = len(sample.prompt_token_ids)
        for turn in sample.turns:
            start = first + turn.start
            turn_of[row, start : start + turn.num_tokens] = len(turns)
            turns.append(turn)
            owners.append(int(trajectory[row]))
    turn_of = torch.where(mask, turn_of, -1)
    lost = (mask & (turn_of < 0)).any(-1).nonzero().flatten().tolist()
    if lost:
        raise ValueError(f"sample {samples[lost[0]].sample_id} trains tokens that belong to none of its turns")
    table = TurnTable(
        trajectory=torch.tensor(owners),
        index=torch.tensor([turn.index for turn in turns]),
        rewards=torch.tensor([turn.reward for turn in turns], dtype=torch.float32),
        states=torch.tensor([turn.state for turn in turns]),
    )
    return table, turn_of


def _joined(whole: bytearray | array, parts: Iterable[bytes | array], dtype: torch.dtype) -> Tensor:
    """[values of all parts] in `whole`, which is given empty and is the tensor's memory."""
    for part in parts:
        # array.extend refuses another typecode, so the caller's empty one has that of the field in `Sample`.
        whole.extend(part)
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(whole, dtype=dtype) if whole else torch.zeros(0, dtype=dtype)


def _expand_runs(runs: Sequence[tuple[WeightVersion, int]]) -> Tensor:
    """One version per token."""
    return torch.repeat_interleave(
        torch.tensor([v for v, _ in runs], dtype=torch.int64), torch.tensor([n for _, n in runs], dtype=torch.int64)
    )


def _experts(records: Sequence[ExpertRecord | None]) -> ExpertRows | None:
    """All records one after another. Raises ValueError for records of different models."""
    found = [record for record in records if record is not None]
    if not found:
        return None
    shapes = {(record.ids.typecode, record.num_layers, record.top_k) for record in found}
    if len(shapes) > 1:
        raise ValueError(
            f"samples carry experts of different models: (type, layers, experts per token) {sorted(shapes)}"
        )
    typecode, layers, top_k = shapes.pop()
    parts = [
        torch.frombuffer(record.ids, dtype=torch.uint8 if typecode == "B" else torch.int16)
        for record in found
        if record.num_positions  # frombuffer refuses an empty one
    ]
    # The dtype stays the record's: int64 would take four to eight times the memory.
    ids = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
    return ExpertRows(
        ids=ids.view(-1, layers, top_k),
        num_positions=torch.tensor([0 if record is None else record.num_positions for record in records]),
    )


def _baselines(groups: Sequence[Group]) -> Tensor | None:
    if any(g.baseline_score is None for g in groups):
        return None
    return torch.tensor([g.baseline_score for g in groups for _ in g.samples], dtype=torch.float32)


def _score(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.sample_id} has no reward; a group without scores must fail, not be trained")
    return sample.reward.score
