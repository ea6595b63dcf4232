"""Rows of prompt files: json, jsonl and parquet; ROLL's columns, verl's columns, or whatever the config names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_BAD_ROWS = 100
_ORIGINS = {
    "gsm8k": "it is the GSM8K file of openai/grade-school-math (grade_school_math/data); put it there or pass its place as an override",
    "demo_assets": "make it with: make demo-assets",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns."""

    messages: str | None = "messages"
    prompt: str | None = None
    id: str = "id"
    tag: str = "tag"
    ground_truth: str = "ground_truth"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt as text."""

    row_id: str
    tag: str
    messages: tuple[Mapping[str, str], ...]
    ground_truth: str


class BadRows:
    """Malformed rows, named; more than the limit end the loading."""

    def __init__(self, limit: int = MAX_BAD_ROWS) -> None:
        self._limit = limit
        self.problems: list[str] = []

    def add(self, problem: str) -> None:
        """Remember one. Raises ValueError when there are too many to be an accident."""
        self.problems.append(problem)
        if len(self.problems) > self._limit:
            raise ValueError(f"more than {self._limit} malformed rows; first: {self.problems[0]}; last: {problem}")


def read_rows(files: Sequence[str], columns: Columns, bad: BadRows) -> Iterator[Row]:
    """Stream the rows of all files, in order. Raises ValueError naming a missing file or one of an unknown kind."""
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise ValueError(missing_file(name))
        for number, record in _records(path, bad):
            where = f"{name}:{number}"
            try:
                yield _row(record, columns, where)
            except (KeyError, TypeError, ValueError) as error:
                bad.add(f"{where}: {_say(error)}")


def missing_file(name: str) -> str:
    """What to say of a data file that is not there, and where it comes from when we know."""
    hints = [text for key, text in _ORIGINS.items() if key in name]
    return f"data file {name} does not exist; " + (hints[0] if hints else "check data_args.file_name")


def _records(path: Path, bad: BadRows) -> Iterator[tuple[int, object]]:
    match path.suffix:
        case ".jsonl":
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        try:
                            yield number, json.loads(line)
                        except json.JSONDecodeError as error:
                            bad.add(f"{path}:{number}: not JSON: {error.msg}")
        case ".json":
            try:
                rows = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
            if not isinstance(rows, list):
                raise ValueError(f"{path}: expected a list of rows")
            yield from enumerate(rows, 1)
        case ".parquet":
            try:
                from pyarrow import parquet
            except ImportError as error:
                raise ValueError(f"{path}: reading parquet needs pyarrow; pip install 'roll_async[data]'") from error
            number = 0
            for batch in parquet.ParquetFile(path).iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        case other:
            raise ValueError(f"data file {path} has suffix {other!r}; expected .json, .jsonl or .parquet")


def _row(record: object, columns: Columns, where: str) -> Row:
    if not isinstance(record, dict):
        raise TypeError("a row must be an object")
    return Row(
        row_id=str(record.get(columns.id, _nested(record, "extra_info", "index") or where)),
        tag=str(record.get(columns.tag) or record.get("data_source") or ""),
        messages=_messages(record, columns),
        ground_truth=_ground_truth(record, columns),
    )


def _messages(record: dict, columns: Columns) -> tuple[Mapping[str, str], ...]:
    if columns.prompt is not None:
        text = record[columns.prompt]
        if isinstance(text, str):
            return ({"role": "user", "content": text},)
        turns = text
    elif columns.messages in record:
        turns = record[columns.messages]
        turns = json.loads(turns) if isinstance(turns, str) else turns
    elif "prompt" in record:  # verl's schema keeps the chat there
        turns = record["prompt"]
    else:
        raise KeyError(columns.messages)
    if (
        not isinstance(turns, (list, tuple))
        or not turns
        or not all(isinstance(t, dict) and {"role", "content"} <= set(t) for t in turns)
    ):
        raise ValueError("the chat must be a non-empty list of {role, content}")
    return tuple({"role": str(t["role"]), "content": str(t["content"])} for t in turns)


def _ground_truth(record: dict, columns: Columns) -> str:
    value = record.get(columns.ground_truth)
    if value is None:
        value = _nested(record, "reward_model", "ground_truth")
    if value is None:
        raise KeyError(columns.ground_truth)
    text = str(value)
    # GSM8K keeps the reasoning and the answer in one column.
    return text.rpartition("#### ")[2].strip().replace(",", "") if "#### " in text else text


def _nested(record: dict, outer: str, inner: str) -> object:
    found = record.get(outer)
    return found.get(inner) if isinstance(found, dict) else None


def _say(error: Exception) -> str:
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)
