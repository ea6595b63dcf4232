"""Trained samples as JSONL, one file per step, written by a separate thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from roll_async.observe.disk import writing

Row = Mapping[str, object]
"""Plain JSON values; `prompt_token_ids` and `response_token_ids` are lists of ints."""
Decode = Callable[[list[list[int]]], Sequence[str]]


class SampleDump:
    """`tracking.rollout_dump_dir`. A write that fails is raised by the next call."""

    def __init__(
        self, folder: str | Path, decode: Decode, *, show: Callable[[int, Sequence[Row]], None] | None = None
    ) -> None:
        """`show`: is called in the thread with a step and its rows, texts included."""
        self._folder, self._decode, self._show = Path(folder), decode, show
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"tracking.rollout_dump_dir {folder}: {error.strerror}; choose another folder") from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sample dump")  # one: steps are written in their order
        self._pending: list[Future[None]] = []

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Queue the samples of a step for `step_00000001.jsonl`; its texts are decoded in the thread."""
        for done in [p for p in self._pending if p.done()]:
            self._pending.remove(done)
            done.result()
        self._pending.append(self._writer.submit(self._write, step, list(rows)))

    def _write(self, step: int, rows: list[Row]) -> None:
        prompts = self._decode([row["prompt_token_ids"] for row in rows])  # type: ignore[misc]
        responses = self._decode([row["response_token_ids"] for row in rows])  # type: ignore[misc]
        shown: list[Row] = [
            {"step": step, **row, "prompt": prompt, "response": response}
            for row, prompt, response in zip(rows, prompts, responses, strict=True)
        ]
        lines = [json.dumps(row, ensure_ascii=False) for row in shown]
        target = self._folder / f"step_{step:08d}.jsonl"
        partial = target.with_suffix(".partial")
        with writing(target):
            partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
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
