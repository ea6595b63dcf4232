"""The groups of a step in the form of verl, for hooks that were written for it: `batch.batch["responses"]`,
`batch[3].non_tensor_batch["uid"]`. Nothing of verl is imported.

Shape letters: B rows (one row = one sample), P prompt positions, R response positions, T = P + R.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_async.schema import Group, Prompt, Sample

if TYPE_CHECKING:
    from array import array

    import numpy as np
    import torch
    from torch import Tensor

_MAPS = ("extra_info", "tools_kwargs", "interaction_kwargs")
"""Columns that are maps in verl; rows keep them as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataProtoItem:
    """One row: the same fields without the dimension B."""

    batch: Mapping[str, Tensor]
    non_tensor_batch: Mapping[str, object]
    meta_info: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataProto:
    """Rows in the order of the groups; rows of one prompt share `uid`. With verl beside this package,
    `verl.DataProto.from_dict(tensors=d.batch, non_tensors=d.non_tensor_batch, meta_info=d.meta_info)` is its own.

    Worked example: prompt `[5, 6]`, response `[7, 8, 9]` of which 8 came from a tool, P = 3, R = 4, score 1:

        input_ids           0 5 6 7 8 9 0        prompts             0 5 6
        attention_mask      0 1 1 1 1 1 0        responses           7 8 9 0
        position_ids        0 0 1 2 3 4 4        response_mask       1 0 1 0
                                                 token_level_scores  0 0 1 0
    """

    batch: dict[str, Tensor]
    """input_ids, attention_mask, position_ids [B,T], prompts [B,P], responses, response_mask [B,R]: int64;
    rollout_log_probs, token_level_scores [B,R]: float32.
    """
    non_tensor_batch: dict[str, np.ndarray]
    """[B] objects: data_source, ability, reward_model, extra_info, uid, tools_kwargs, interaction_kwargs, index, and
    every other column of the data row as text; None where a row has no such column.
    """
    meta_info: dict[str, object]
    """global_token_num: tokens of each row, prompt and response."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.batch["input_ids"])

    def __getitem__(self, row: int) -> DataProtoItem:
        """One row. Raises IndexError outside of the batch, which also ends a loop over all rows."""
        return DataProtoItem(
            batch={name: values[row] for name, values in self.batch.items()},
            non_tensor_batch={name: values[row] for name, values in self.non_tensor_batch.items()},
            meta_info=self.meta_info,
        )


class StepGroups(tuple[Group, ...]):
    """The groups that a step trained, as `compute_custom_metrics(batch)` gets them."""

    __slots__ = ()

    def to_dataproto(
        self, *, prompt_length: int | None = None, response_length: int | None = None, pad_token_id: int = 0
    ) -> DataProto:
        """In the form of verl: prompts padded on the left to `prompt_length` tokens, responses on the right to
        `response_length`; None = the longest of the batch. Raises ValueError for a length that is too small.
        """
        import torch  # the loops are imported without it

        rows = [(group.prompt, sample, str(group.group_id)) for group in self for sample in group.samples]
        samples = [sample for _, sample, _ in rows]
        p = _length("prompt_length", prompt_length, [len(s.prompt_token_ids) for s in samples])
        r = _length("response_length", response_length, [len(s.response_token_ids) for s in samples])
        prompts = torch.full((len(rows), p), pad_token_id)
        responses = torch.full((len(rows), r), pad_token_id)
        attention = torch.zeros(len(rows), p + r, dtype=torch.int64)
        response_mask = torch.zeros_like(responses)
        logprobs, scores = (torch.zeros(len(rows), r) for _ in range(2))
        for row, sample in enumerate(samples):
            size, first = len(sample.response_token_ids), p - len(sample.prompt_token_ids)
            prompts[row, first:] = _tensor(sample.prompt_token_ids, torch.int32)
            attention[row, first : p + size] = 1
            responses[row, :size] = _tensor(sample.response_token_ids, torch.int32)
            response_mask[row, :size] = _tensor(bytearray(sample.loss_mask), torch.uint8)
            logprobs[row, :size] = _tensor(sample.behaviour_logprobs, torch.float32) * response_mask[row, :size]
            if size:
                scores[row, size - 1] = _score(sample)
        return DataProto(
            batch={
                "input_ids": torch.cat([prompts, responses], dim=-1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
                "prompts": prompts,
                "responses": responses,
                "response_mask": response_mask,
                "rollout_log_probs": logprobs,
                "token_level_scores": scores,
            },
            non_tensor_batch=_columns([_row(prompt, uid) for prompt, _, uid in rows]),
            meta_info={"global_token_num": attention.sum(-1).tolist()},
        )


def _length(name: str, wanted: int | None, found: Sequence[int]) -> int:
    longest = max(found, default=0)
    if wanted is not None and wanted < longest:
        raise ValueError(
            f"{name}={wanted} is less than the {longest} tokens of the longest row; raise it or leave it out"
        )
    return longest if wanted is None else wanted


def _tensor(values: array | bytearray, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.zeros(0, dtype=dtype)


def _score(sample: Sample) -> float:
    assert sample.reward is not None, "a step trains scored groups"
    return sample.reward.score


def _row(prompt: Prompt, uid: str) -> dict[str, object]:
    columns: dict[str, object] = {**prompt.extra, **{name: _map(prompt.extra.get(name)) for name in _MAPS}}
    info = columns["extra_info"]
    assert isinstance(info, dict)
    for name in _MAPS[1:]:  # where verl's data sets have them
        columns[name] = columns[name] or info.get(name) or {}
    return {
        "data_source": prompt.domain,
        "ability": "",
        **columns,
        "reward_model": {"ground_truth": prompt.ground_truth, "style": "rule"},
        "uid": uid,
        "index": info.get("index", prompt.row_id),
    }


def _map(text: str | None) -> dict[str, object]:
    try:
        found = json.loads(text or "{}")
    except ValueError:  # a text of the user's own under that name
        return {}
    return found if isinstance(found, dict) else {}


def _columns(rows: Sequence[Mapping[str, object]]) -> dict[str, np.ndarray]:
    import numpy as np

    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.fromiter((row.get(name) for row in rows), dtype=object, count=len(rows)) for name in names}
