"""Rows of prompt files: json, jsonl and parquet; ROLL's columns, verl's columns, or whatever the config names.

Formats with an example each: docs_roll/data.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path

from roll_async.prompts.images import taken_out
from roll_async.prompts.turns import Turn, parse_turns, text_of

MAX_BAD_ROWS = 100
_IMAGES = "images"
"""Column of verl's rows."""
_ORIGINS = {
    "gsm8k": "it is the GSM8K file of openai/grade-school-math (grade_school_math/data); put it there or pass its "
    "place as an override",
    "demo_assets": "make it with: roll-async demo --assets-only",
    "word_problems": "make it with: roll-async demo --assets-only word_problems",
    "output/images/": "make it with: roll-async demo --assets-only images",
    "math_deepmath": "make it with: python tools/make_math_rows.py (without a network: --source bundled)",
    "skywork": "make it with: python examples/async_dapo/process_skywork.py --local_dir DIR",
    "aime": "make it with: python examples/async_dapo/process_aime24.py --local_dir DIR",
    "dapo-math": "make it with: bash examples/dapo/prepare_dapo_data.sh",
}
_GSM8K_ANSWER = re.compile(r"(?:^|\n)#### *([-+]?\$?\d[\d,]*(?:\.\d+)?)\s*\Z")
"""The last line of a GSM8K solution; the reasoning stands before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns."""

    messages: str | None = "messages"
    prompt: str | None = None
    id: str = "id"
    tag: str = "tag"
    ground_truth: str = "ground_truth"
    references: tuple[str, ...] = ()
    """Further columns that rewards compare with; a row that has one needs no ground truth."""


def found_columns(record: object, where: str) -> dict[str, str]:
    """The keys of `data_args` under which a row is read: by its columns messages, prompt, question or problem, and
    ground_truth, answer or solution. Raises ValueError naming the columns that it has.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: a row must be an object, got {type(record).__name__}")
    asks = next((name for name in ("messages", "prompt", "question", "problem") if record.get(name)), None)
    verl = _nested(dict(record), "reward_model", "ground_truth")
    answers = ("ground_truth", "answer", "solution")
    truth = "ground_truth" if verl is not None else next((n for n in answers if record.get(n) is not None), None)
    if asks is None or truth is None:
        lacking = "messages, prompt or question" if asks is None else "ground_truth or answer"
        raise ValueError(f"{where}: no column {lacking} among {', '.join(map(str, record)) or 'none'}; rename one")
    found = {} if asks == "messages" else {"prompt" if isinstance(record[asks], str) else "messages": asks}
    return found if truth == "ground_truth" else {**found, "ground_truth": truth}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt as text."""

    where: str
    """File and line, for messages to the user."""
    row_id: str
    tag: str
    messages: tuple[Turn, ...]
    """As `turns.py` describes."""
    ground_truth: str
    style: str = ""
    """`reward_model.style` of verl's schema: rule, model, ..."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """The columns nothing else uses: text as it is, everything else as JSON. Reward functions read them."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Files of the images in the messages, in their order."""

    @property
    def text(self) -> str:
        """The last turn, which is the question or what a tool says."""
        return text_of(self.messages[-1])


def content_digest(
    messages: Sequence[Turn], ground_truth: str, extra: Mapping[str, str], images: Sequence[bytes] = ()
) -> str:
    """What a row says and shows, whatever file it is in and however it is rendered: 16 hexadecimal digits."""
    said = json.dumps([list(map(dict, messages)), ground_truth, dict(extra)], sort_keys=True, ensure_ascii=True)
    digest = hashlib.blake2b(said.encode(), digest_size=8)
    for image in images:
        digest.update(len(image).to_bytes(8, "little") + image)
    return digest.hexdigest()


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
    """Stream the rows of all files, in order. Raises ValueError naming a missing or unreadable file."""
    for name in files:
        for where, record in read_records(name, bad):
            try:
                yield _row(record, columns, where, Path(name).parent)
            except (KeyError, TypeError, ValueError) as error:
                bad.add(f"{where}: {_say(error)}")


def files_of(name: str) -> list[str]:
    """A file, or the .jsonl files of a folder (a name that ends in /) in the order of their names. Raises ValueError
    for a folder without any.
    """
    if not name.endswith("/"):
        return [name]
    found = sorted(map(str, Path(name).glob("*.jsonl")))
    if not found:
        raise ValueError(f"data_args.file_name: {name} holds no .jsonl file; name a folder of samples")
    return found


def read_records(name: str, bad: BadRows) -> Iterator[tuple[str, object]]:
    """(place, record) of one file, by its suffix. Raises ValueError naming a missing or unreadable file."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(missing_file(name))
    match path.suffix:
        case ".jsonl":
            yield from _json_lines(path, bad)
        case ".json":
            yield from _json_file(path, bad)
        case ".parquet":
            yield from _parquet_rows(path)
        case other:
            raise ValueError(f"data file {path} has suffix {other!r}; expected .json, .jsonl or .parquet")


def missing_file(name: str) -> str:
    """What to say of a data file that is not there, and where it comes from when we know."""
    hints = [text for key, text in _ORIGINS.items() if key in name]
    return f"data file {name} does not exist; " + (hints[0] if hints else "check data_args.file_name")


def _json_lines(path: Path, bad: BadRows) -> Iterator[tuple[str, object]]:
    try:
        with open(path, encoding="utf-8-sig") as file:  # json refuses a byte order mark
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except (ValueError, RecursionError) as error:  # of a number of too many digits a plain ValueError
                        bad.add(f"{path}:{number}: not JSON: {getattr(error, 'msg', error)}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def _json_file(path: Path, bad: BadRows) -> Iterator[tuple[str, object]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))  # json refuses a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object per line under the name of .json is common
            yield from _json_lines(path, bad)
            return
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if isinstance(rows, dict):  # one object in one line
        rows = [rows]
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow; pip install 'roll_async[data]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            # Piece by piece: as Python objects a whole file takes many times its size.
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not readable as parquet after row {number}: {error}") from error


def _row(record: object, columns: Columns, where: str, folder: Path) -> Row:
    if not isinstance(record, dict):
        raise TypeError(f"a row must be an object, got {type(record).__name__}")
    source, tag = record.get("data_source"), record.get(columns.tag)
    style = _nested(record, "reward_model", "style")
    messages, images = _messages(record, columns, folder)
    found = Row(
        where=where,
        row_id=_row_id(record, columns, where),
        tag=str(source or "") if tag is None else str(tag),
        style="" if style is None else str(style),
        messages=messages,
        images=images,
        ground_truth=_ground_truth(record, columns),
        extra=_extra(record, columns),
    )
    texts = {columns.id: found.row_id, columns.tag: found.tag, columns.ground_truth: found.ground_truth, **found.extra}
    for name, text in texts.items():
        if text.encode(errors="replace").decode() != text:
            raise ValueError(f"{name}: half of a surrogate pair is in {text!r:.60}, which no file takes; remove it")
    return found


def _row_id(record: dict, columns: Columns, where: str) -> str:
    """The column `id`, else `uid`, else verl's index with its data set (each counts from 0), else the place."""
    for name in (columns.id, "uid"):
        if record.get(name) is not None:
            return str(record[name])
    index = _nested(record, "extra_info", "index")
    if index is None:
        return where
    parts = (record.get("data_source"), _nested(record, "extra_info", "split"), index)
    return "/".join(str(part) for part in parts if part not in (None, ""))


def _messages(record: dict, columns: Columns, folder: Path) -> tuple[tuple[Turn, ...], tuple[bytes, ...]]:
    """The chat, and the files of its images."""
    if columns.prompt is not None:
        name, turns = columns.prompt, record[columns.prompt]
    elif columns.messages is not None and record.get(columns.messages) is not None:
        name, turns = columns.messages, record[columns.messages]
        turns = json.loads(turns) if isinstance(turns, str) else turns
    elif record.get("prompt") is not None:  # verl's schema keeps the chat there
        name, turns = "prompt", record["prompt"]
    else:
        raise KeyError(columns.messages)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    turns, images = taken_out(turns, record.get(_IMAGES), folder)
    return parse_turns(turns, name), images


def _ground_truth(record: dict, columns: Columns) -> str:
    value = record.get(columns.ground_truth)
    if value is None:
        value = _nested(record, "reward_model", "ground_truth")
    if value is None:
        if any(record.get(name) for name in columns.references):
            return ""
        raise KeyError(columns.ground_truth)
    return _text(value)


def final_number(ground_truth: str) -> str:
    """What a maths rule compares with: the number in the last line of a GSM8K solution, else all of it."""
    gold = _GSM8K_ANSWER.search(ground_truth)
    return gold[1].replace(",", "") if gold else ground_truth  # GSM8K writes thousands as 1,000


def _extra(record: dict, columns: Columns) -> dict[str, str]:
    used = {columns.id, columns.tag, columns.ground_truth, columns.messages, columns.prompt, "prompt", "reward_model"}
    if isinstance(record.get(_IMAGES), list):
        used.add(_IMAGES)
    there = {name: value for name, value in record.items() if name not in used and value is not None}
    return {name: _text(value) for name, value in there.items() if not isinstance(value, bytes)}


def _text(value: object) -> str:
    """Texts, dates and decimal numbers as they are written, everything else as JSON, with null for bytes in it."""
    if isinstance(value, str | date | time | timedelta | Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise TypeError("bytes, and a reward reads text; write it as a string")
    return json.dumps(value, ensure_ascii=False, default=lambda v: None if isinstance(v, bytes) else str(v))


def _nested(record: dict, outer: str, inner: str) -> object:
    found = record.get(outer)
    return found.get(inner) if isinstance(found, dict) else None


def _say(error: Exception) -> str:
    return f"column {error} is missing" if isinstance(error, KeyError) else str(error)
