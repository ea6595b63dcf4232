"""Which samples a run has, and where they lie: one pass over its files, kept in `samples_index.sqlite` beside them and
extended when files come or change. Rows themselves are read from their files when they are asked for.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

INDEX = "samples_index.sqlite"
_FORMAT = 1
"""Of the table. An index of another one is made anew."""
_PREVIEW = 160
_TABLES = """
create table files (name text primary key, stamp text);
create table samples (
    id integer primary key, file text, offset integer, size integer, step integer, group_id integer, sample_id text,
    domain text, outcome text, score real, advantage real, tokens integer, version integer, parts integer,
    trajectory text, preview text
);
create index by_file on samples (file);
create index by_step on samples (step, group_id);
create index by_score on samples (score, step);
"""
_COLUMNS = (
    "id, step, group_id, sample_id, domain, outcome, score, advantage, tokens, version, parts, trajectory, preview"
)
_ORDERS = {
    "newest": "step desc, group_id, id",
    "oldest": "step, group_id, id",
    "best": "score desc, step desc, id",
    "worst": "score is null, score, step desc, id",
    "longest": "tokens desc, id",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFilter:
    """Which samples are asked for; None = any."""

    domain: str | None = None
    outcome: str | None = None
    """How it ended: that of a trajectory, or the finish reason of a single answer."""
    lowest: float | None = None
    highest: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    order: str = "newest"

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise ValueError(f"order {self.order!r}: expected one of {', '.join(_ORDERS)}")

    @property
    def where(self) -> tuple[str, list[object]]:
        """The condition, and what its question marks stand for."""
        conditions = {
            "domain = ?": self.domain,
            "outcome = ?": self.outcome,
            "score >= ?": self.lowest,
            "score <= ?": self.highest,
            "step >= ?": self.first_step,
            "step <= ?": self.last_step,
        }
        asked = {text: value for text, value in conditions.items() if value is not None}
        return " and ".join(asked) or "1", list(asked.values())


finite = partial(json.loads, parse_constant=lambda name: None)
"""As JSON is read by browsers, which know no NaN and no Infinity: they become null."""


class SampleIndex:
    """The samples in `step_*.jsonl` of a folder. Used by one thread at a time."""

    def __init__(self, folder: Path, index: Path) -> None:
        self._folder, self._index = folder, index
        try:
            self._open(str(index))
        except sqlite3.DatabaseError as error:
            self._do_without(error)

    def _open(self, path: str) -> None:
        self._table = sqlite3.connect(path, check_same_thread=False)
        self._table.row_factory = sqlite3.Row
        if self._table.execute("pragma user_version").fetchone()[0] != _FORMAT:
            self._table.executescript("drop table if exists files; drop table if exists samples;" + _TABLES)
            self._table.execute(f"pragma user_version = {_FORMAT}")
        self._table.execute("pragma synchronous = off")  # what is lost is made again
        self._table.commit()

    def refresh(self) -> int:
        """Read the files that are new or have changed, and forget those that are gone; how many were read."""
        try:
            return self._refresh()
        except sqlite3.DatabaseError as error:
            self._table.close()
            self._do_without(error)
            return self._refresh()

    def _ask(self, text: str, values: Sequence[object] = ()) -> list[Any]:
        try:
            return self._table.execute(text, values).fetchall()
        except sqlite3.DatabaseError as error:  # a page of the file is damaged
            self._table.close()
            self._do_without(error)
            self._refresh()
            return self._table.execute(text, values).fetchall()

    def _do_without(self, error: sqlite3.DatabaseError) -> None:
        """Index in memory. The file is removed where it is damaged."""
        if not isinstance(error, sqlite3.OperationalError):  # that of one which is locked, or cannot be written
            with suppress(OSError):
                self._index.unlink(missing_ok=True)
        self._open(":memory:")

    def _refresh(self) -> int:
        known = dict(self._table.execute("select name, stamp from files").fetchall())
        there = {path.name: path for path in self._folder.glob("step_*.jsonl")}
        num_read = 0
        for name in known.keys() - there.keys():
            self._forget(name)
        for name, path in sorted(there.items()):
            try:
                status = path.stat()
                stamp = f"{status.st_size} {status.st_mtime_ns}"
                if known.get(name) != stamp:
                    self._forget(name)
                    self._add(path)
                    self._table.execute("insert into files values (?, ?)", (name, stamp))
                    num_read += 1
            except FileNotFoundError:  # the run went back to an earlier step meanwhile
                continue
        self._table.commit()
        return num_read

    def _forget(self, name: str) -> None:
        self._table.execute("delete from files where name = ?", (name,))
        self._table.execute("delete from samples where file = ?", (name,))

    def _add(self, path: Path) -> None:
        self._table.executemany(
            f"insert into samples (file, offset, size, {_COLUMNS[4:]}) values ({', '.join('?' * 15)})", _entries(path)
        )

    def page(self, asked: SampleFilter, offset: int = 0, limit: int = 50) -> tuple[int, list[dict[str, object]]]:
        """(how many samples fit, those from `offset` on without their tokens)."""
        where, values = asked.where
        ((count,),) = self._ask(f"select count(*) from samples where {where}", values)
        rows = self._ask(
            f"select {_COLUMNS} from samples where {where} order by {_ORDERS[asked.order]} limit ? offset ?",
            [*values, limit, offset],
        )
        return count, [dict(row) for row in rows]

    def choices(self) -> dict[str, list[object]]:
        """What can be asked for: domains, outcomes, the first and last step, the lowest and highest score."""
        found: dict[str, list[object]] = {
            name: [row[0] for row in self._ask(f"select distinct {name} from samples order by 1")]
            for name in ("domain", "outcome")
        }
        of_all = "select min(step), max(step), min(score), max(score), count(*) from samples"
        ((first, last, lowest, highest, count),) = self._ask(of_all)
        return found | {"steps": [first, last], "scores": [lowest, highest], "count": [count]}

    def group_of(self, number: int) -> list[dict[str, object]]:
        """The whole rows of the group that a sample is one of, in the order of their file, with their `id`. Raises
        KeyError where there is none.
        """
        found = self._ask(
            "select others.id, others.file, others.offset, others.size from samples as one join samples as others "
            "using (file, step, group_id) where one.id = ? order by others.id",
            [number],
        )
        if not found:
            raise KeyError(number)
        return [{"id": row["id"], **self._read(row)} for row in found]

    def _read(self, row: Mapping[str, object]) -> dict[str, object]:
        with open(self._folder / str(row["file"]), "rb") as file:
            file.seek(row["offset"])  # type: ignore[arg-type]
            return finite(file.read(row["size"]))  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the table."""
        self._table.close()


def _entries(path: Path) -> Iterator[Sequence[object]]:
    """Of each line of a file: what the table has of it. A line that is damaged is left out."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                row = _without_tokens(line)
                runs = row["version_runs"]
                yield (
                    path.name, offset, len(line), row["step"], row["group_id"], row["sample_id"], row["domain"],
                    row["outcome"] or row["finish_reason"], row["score"], row["advantage"], sum(row["loss_mask"]),
                    min((version for version, _ in runs), default=None), len(row["turns"]) or 1, row["trajectory"],
                    row["response"][:_PREVIEW],
                )  # fmt: skip
            offset += len(line)


def _without_tokens(line: bytes) -> dict[str, Any]:
    """A row without most of its lists, whose numbers are nine tenths of the time that it takes to parse. Inside of a
    text the quotes of such a key would be escaped.
    """
    begins, ends = line.find(b',"prompt_token_ids":'), line.rfind(b',"prompt":')
    if not 0 < begins < ends:  # a dump of an earlier version
        return finite(line)
    return finite(line[:begins] + b"}") | finite(b"{" + line[ends + 1 :])
