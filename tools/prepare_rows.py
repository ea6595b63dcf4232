"""Published data sets to prompt files: verl's columns, no duplicates, a split and an order that do not depend on the
order of the source. Behind `examples/async_dapo/process_*.py` and `examples/dapo/process_dapo.py`; docs_roll/data.md.

    records --> Question, or the reason to drop it --> unique --> shuffled by hash --> train.parquet, test.parquet
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll_async.prompts.rows import BadRows, read_records

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
_SUFFIXES = (".json", ".jsonl", ".parquet")
_NO_LIMIT = sys.maxsize
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One problem of a source."""

    question: str
    answer: str
    """What a rule can compare with."""
    solution: str = ""
    """The source's own text of the answer, if it says more."""
    data_source: str = ""
    """Tag of the row; empty = the tag of the whole file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What becomes of the questions."""

    data_source: str
    """Tag that routes a row to its reward."""
    system_prompt: str = ""
    """Empty = none."""
    seed: int = 0
    test_size: int = 0
    """Questions held out of training."""
    only_split: str = "train"
    """Name of the file of all that is not held out."""
    keep_repeats: bool = False
    """Whether a question that comes n times with the same answer stays n rows, next to one another."""
    exclude: frozenset[str] = frozenset()
    """Keys (`question_key`) of questions that must not appear, e.g. those of a test set."""


@dataclass(kw_only=True, slots=True)
class Prepared:
    """Rows by split, and what became of the others."""

    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""


def question_key(question: str) -> str:
    """Equal for questions that differ in spaces, case and punctuation only."""
    return hashlib.sha256(" ".join(_WORD.findall(question.casefold())).encode(errors="replace")).hexdigest()


def prepare(
    records: Iterable[object], read: Callable[[Mapping[str, object]], Question | str], options: Preparation
) -> Prepared:
    """Read, drop, split, shuffle. `read` gives a question or why there is none. A question that comes twice is kept
    once, and dropped altogether when its answers differ: one of them is wrong.
    """
    result, unique, contradicted, repeats = Prepared(), dict[str, Question](), Counter[str](), Counter[str]()
    for record in records:
        result.seen += 1
        found = read(record) if isinstance(record, dict) else "not an object"
        if isinstance(found, str):
            result.dropped[found] += 1
            continue
        key = question_key(found.question)
        if key in options.exclude:
            result.dropped["in the excluded set"] += 1
        elif key in contradicted:
            contradicted[key] += 1
        elif key not in unique:
            unique[key] = found
        elif unique[key].answer == found.answer and options.keep_repeats:
            repeats[key] += 1
        elif unique[key].answer == found.answer:
            result.dropped["duplicate question"] += 1
        else:
            del unique[key]
            contradicted[key] = 2 + repeats.pop(key, 0)
    if contradicted:
        result.dropped["same question, different answers"] += contradicted.total()
    order = sorted(unique, key=lambda key: hashlib.sha256(f"{options.seed}/{key}".encode()).digest())
    splits = {"test": order[: options.test_size], options.only_split: order[options.test_size :]}
    for split, keys in splits.items():
        if keys or split == options.only_split:
            rows = (key for key in keys for _ in range(1 + repeats[key]))
            result.rows[split] = [_row(unique[key], number, split, options) for number, key in enumerate(rows)]
    return result


def _row(found: Question, number: int, split: str, options: Preparation) -> dict[str, object]:
    system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    return {
        "data_source": found.data_source or options.data_source,
        "prompt": [*system, {"role": "user", "content": found.question}],
        "ability": "math",
        "reward_model": {"ground_truth": found.answer, "style": "rule"},
        "extra_info": {
            "answer": found.solution or found.answer,
            "index": number,
            "question": found.question,
            "split": split,
        },
    }


def read_source(source: str, split: str) -> Iterator[object]:
    """Records of a local file, or of a data set of the hub by name. A broken line is a record that is no object, so
    that it is counted. Raises ValueError naming what cannot be read.
    """
    if source.endswith(_SUFFIXES) or Path(source).exists():
        if not (source.startswith("hf://") or Path(source).exists()):
            raise ValueError(f"{source} does not exist; give a downloaded file, or a name on the hub, with --source")
        bad = BadRows(_NO_LIMIT)
        told = 0
        for _, record in read_records(source, bad):
            while told < len(bad.problems):
                told += 1
                yield None
            yield record
        yield from [None] * (len(bad.problems) - told)
        return
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(f"{source}: reading from the hub needs datasets; pip install 'roll_async[data]'") from error
    try:
        yield from load_dataset(source, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # what a network, a name and a file can do
        reason = str(error).strip().partition("\n")[0][:300]
        raise ValueError(
            f"cannot read {source} (split {split}) from the hub: {type(error).__name__}: {reason}; "
            "check the name and the network, or give a downloaded file with --source FILE"
        ) from error


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One parquet file; a half-written one never stands under its name."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    turn = pyarrow.struct({"role": text, "content": text})
    schema = pyarrow.schema(
        {
            "data_source": text,
            "prompt": pyarrow.list_(turn),
            "ability": text,
            "reward_model": pyarrow.struct({"ground_truth": text, "style": text}),
            "extra_info": pyarrow.struct({"answer": text, "index": pyarrow.int64(), "question": text, "split": text}),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_chats(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """The same rows with ROLL's columns, one JSON object a line: id, tag, messages, ground_truth."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                chat = {
                    "id": f"{row['data_source']}-{number}",
                    "tag": row["data_source"],
                    "messages": row["prompt"],
                    "ground_truth": row["reward_model"]["ground_truth"],  # type: ignore[index]
                }
                file.write(json.dumps(chat, ensure_ascii=False) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def excluded(files: Sequence[str]) -> frozenset[str]:
    """Keys of the questions in prepared files."""
    keys = set()
    for name in files:
        for record in read_source(name, ""):
            info = record.get("extra_info") if isinstance(record, dict) else None
            if isinstance(info, dict) and isinstance(info.get("question"), str):
                keys.add(question_key(info["question"]))
    return frozenset(keys)


def common_parser(description: str | None, *, source: str, local_dir: str, split: str) -> argparse.ArgumentParser:
    """The options all `process_*.py` have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", default=local_dir, help=f"folder of the parquet files [{local_dir}]")
    parser.add_argument("--source", default=source, help=f"name on the hub, or json, jsonl or parquet file [{source}]")
    parser.add_argument("--source_split", default=split, help=f"split on the hub [{split}]")
    parser.add_argument("--system_prompt", default=SYSTEM_PROMPT, help="first turn of every chat; empty = none")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the split")
    parser.add_argument("--keep_repeats", action="store_true", help="a question that comes n times stays n rows")
    return parser


def report(prepared: Prepared, written: Mapping[str, Path]) -> str:
    """What was kept and why the rest was not, for the user."""
    lines = [f"{prepared.seen} rows read, {sum(map(len, prepared.rows.values()))} kept"]
    lines += [f"  {len(prepared.rows[split])} -> {path}" for split, path in written.items()]
    if prepared.dropped:
        lines.append(f"{prepared.dropped.total()} dropped")
        lines += [f"  {count} {reason}" for reason, count in prepared.dropped.most_common()]
    return "\n".join(lines)


def run(args: argparse.Namespace, read: Callable[[Mapping[str, object]], Question | str], options: Preparation) -> int:
    """Read `args.source`, write `args.local_dir`, say what happened; the exit code."""
    try:
        prepared = prepare(read_source(args.source, args.source_split), read, options)
        if not any(prepared.rows.values()):
            raise ValueError(f"{args.source}: no row could be used\n{report(prepared, {})}")
        written = {split: Path(args.local_dir) / f"{split}.parquet" for split in prepared.rows}
        for split, path in written.items():
            write_rows(path, prepared.rows[split])
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    print(report(prepared, written))
    return 0


def text_of(record: Mapping[str, object], *names: str) -> str:
    """The first of these columns that holds text or a number, without spaces around; empty when none does."""
    for name in names:
        value = record.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return ""
