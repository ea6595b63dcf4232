"""Trained samples as JSONL, one file per step, written by a separate thread."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from roll_async.observe.disk import writing

Row = Mapping[str, object]
"""Plain JSON values; `prompt_token_ids` and `response_token_ids` are lists of ints. With its texts also `step`,
`prompt`, `response` and `response_pieces`, the text of each token alone.
"""
Decode = Callable[[list[list[int]]], Sequence[str]]
SAMPLES = "samples"
"""Folder of a run's samples, inside of its own."""
EVERY_GROUP = sys.maxsize


def chosen_groups(means: Mapping[int, float], num_groups: int) -> set[int]:
    """Of groups by id with their mean scores: the best, the worst, then others evenly spread between them by rank.

    >>> sorted(chosen_groups({1: 0.5, 2: 0.0, 3: 1.0, 4: 0.25}, 2))
    [2, 3]
    """
    ranked = sorted(means, key=lambda group: (-means[group], group))
    if num_groups >= len(ranked):
        return set(ranked)
    return {ranked[i * (len(ranked) - 1) // max(1, num_groups - 1)] for i in range(num_groups)}


class SampleDump:
    """`samples/` of a run and `tracking.rollout_dump_dir`. A write that fails is raised by the next call."""

    def __init__(
        self,
        folders: Mapping[Path, int],
        decode: Decode,
        *,
        show: Callable[[int, Sequence[Row]], None] | None = None,
    ) -> None:
        """`folders`: the number of a step's groups that each gets. `show`: is called in the thread with a step and its
        rows, texts included, of as many groups as the folder with the most gets.
        """
        self._folders, self._decode, self._show = dict(folders), decode, show
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                remedy = "choose another output_dir or tracking.rollout_dump_dir"
                raise ValueError(f"samples in {folder}: {error.strerror}; {remedy}") from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample dump")  # one: steps are written in their order
        self._pending: list[Future[None]] = []

    def write(self, step: int, rows: Callable[[int], Sequence[Row]]) -> None:
        """Queue the samples of a step for `step_00000001.jsonl`. `rows`: makes those of a number of groups that
        `chosen_groups` takes; it is called, and texts are decoded, in the thread.
        """
        for done in [p for p in self._pending if p.done()]:
            self._pending.remove(done)
            done.result()
        self._pending.append(self._writer.submit(self._write, step, rows))

    def _write(self, step: int, rows_of: Callable[[int], Sequence[Row]]) -> None:
        rows = rows_of(max(self._folders.values()))
        prompts = self._decode([row["prompt_token_ids"] for row in rows])  # type: ignore[misc]
        responses = self._decode([row["response_token_ids"] for row in rows])  # type: ignore[misc]
        ids = sorted({token for row in rows for token in row["response_token_ids"]})  # type: ignore[attr-defined]
        # For a reader that has no tokenizer: what each token says alone.
        pieces = dict(zip(ids, self._decode([[token] for token in ids]), strict=True))
        shown: list[Row] = [
            {
                "step": step,
                **row,
                "response_pieces": [pieces[token] for token in row["response_token_ids"]],  # type: ignore[attr-defined]
                "prompt": prompt,
                "response": response,
            }
            for row, prompt, response in zip(rows, prompts, responses, strict=True)
        ]
        for folder, num_groups in self._folders.items():
            kept = chosen_groups(_means(rows), num_groups)
            lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in shown]
            target = folder / f"step_{step:08d}.jsonl"
            partial = target.with_suffix(".partial")
            with writing(target):
                text = "".join(line + "\n" for line, row in zip(lines, rows, strict=True) if row["group_id"] in kept)
                # What has no UTF-8, half of a surrogate pair, becomes an escape, which JSON reads.
                partial.write_text(text, encoding="utf-8", errors="backslashreplace")
                partial.replace(target)
        if self._show is not None:
            self._show(step, shown)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        pending, self._pending = self._pending, []
        for one in pending:
            one.result()

    def close(self) -> None:
        """Flush, and end the thread."""
        self._writer.shutdown(wait=True)
        self.flush()


def _means(rows: Sequence[Row]) -> dict[int, float]:
    """Mean score of each group. All rows of a trajectory carry its one score, and it counts once."""
    scores: dict[int, dict[object, float]] = {}
    for position, row in enumerate(rows):
        score = row["score"]
        assert isinstance(score, float | int | None)
        of_group = scores.setdefault(row["group_id"], {})  # type: ignore[arg-type]
        of_group.setdefault(row["trajectory"] or position, float(score or 0.0))
    return {group: sum(found.values()) / len(found) for group, found in scores.items()}
