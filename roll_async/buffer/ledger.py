"""Durable log of groups: SQLite in WAL mode, one row per group.

A finished group is durable before it counts as buffered. "Consumed by step t" is written in the same transaction that
records
step t. Accounting is by position in the prompt stream: a position is done, buffered, or to be generated, never two of
them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from roll_async.buffer.errors import LedgerError
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.schema import Group, WeightVersion

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    prompt_index INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL,              -- buffered, trained, filtered, failed
    consumed_step INTEGER,
    finished_version INTEGER,
    reason TEXT NOT NULL DEFAULT '',
    header TEXT,
    block BLOB
);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY);
CREATE INDEX IF NOT EXISTS by_step ON groups (consumed_step);
"""
_FSYNC = {"group": "FULL", "step": "NORMAL", "never": "OFF"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A finished group that waits for the trainer."""

    prompt_index: int
    finished_version: WeightVersion
    group: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a ledger says relative to a restored step."""

    buffered: tuple[StoredGroup, ...]
    done: frozenset[int]
    """Positions trained up to the restored step, filtered, or quarantined."""
    next_index: int
    """First position the ledger knows nothing about."""


class Ledger(Protocol):
    """What the queue needs; `SqliteLedger`, or `MemoryLedger` when ledger.enable is false."""

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None: ...

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None: ...

    def reopened(self, prompt_index: int) -> None: ...

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None: ...

    def restore(self, step: int) -> Recovered: ...

    def prune(self, step: int) -> None: ...

    def close(self) -> None: ...


class MemoryLedger:
    """Keeps nothing: a restart begins with an empty buffer."""

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None:
        pass

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None:
        pass

    def reopened(self, prompt_index: int) -> None:
        pass

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None:
        pass

    def restore(self, step: int) -> Recovered:
        return Recovered(buffered=(), done=frozenset(), next_index=0)

    def prune(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class SqliteLedger:
    """One file, one writing process. Raises LedgerError naming the file, what was being written, and the remedy."""

    def __init__(self, path: str, *, fsync: str = "group") -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fsync = fsync
        with self._naming("opening"):
            self._db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
            # EXCLUSIVE keeps a second run out of the same folder for as long as this one lives.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={_FSYNC[fsync]}")
            self._db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute("COMMIT")

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None:
        """Make a finished group durable."""
        header, block = encode_group(group)
        with self._transaction(f"group {group.group_id} (prompt {prompt_index})"):
            self._db.execute(
                "INSERT OR REPLACE INTO groups (prompt_index, group_id, state, finished_version, header, block) VALUES (?, ?, 'buffered', ?, ?, ?)",
                (prompt_index, group.group_id, version, header, block),
            )

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None:
        """A position that will not be trained: filtered or failed."""
        with self._transaction(f"group {group_id} (prompt {prompt_index})"):
            self._db.execute(
                "INSERT OR REPLACE INTO groups (prompt_index, group_id, state, reason) VALUES (?, ?, ?, ?)",
                (prompt_index, group_id, state, reason[:2000]),
            )

    def reopened(self, prompt_index: int) -> None:
        """A finished group was discarded: its prompt is to be generated again."""
        with self._transaction(f"prompt {prompt_index}"):
            self._db.execute("DELETE FROM groups WHERE prompt_index = ?", (prompt_index,))

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None:
        """Step `step` consumed these groups: the step and its groups in one transaction."""
        with self._transaction(f"step {step}"):
            self._db.execute("INSERT OR REPLACE INTO steps (step) VALUES (?)", (step,))
            self._db.executemany(
                "UPDATE groups SET state = 'trained', consumed_step = ? WHERE prompt_index = ?",
                [(step, index) for index in prompt_indexes],
            )
        if self._fsync == "step":
            with self._naming("syncing"):
                self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def restore(self, step: int) -> Recovered:
        """State relative to a restored step: what later steps consumed is available again."""
        with self._transaction(f"restore of step {step}"):
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._db.execute(
                "UPDATE groups SET state = 'buffered', consumed_step = NULL WHERE consumed_step > ?", (step,)
            )
        with self._naming("reading"):
            rows = self._db.execute("SELECT prompt_index, state FROM groups").fetchall()
            stored = self._db.execute(
                "SELECT prompt_index, finished_version, header, block FROM groups WHERE state = 'buffered' ORDER BY group_id"
            ).fetchall()
        buffered = []
        for index, version, header, block in stored:
            if header is None:  # its tokens were pruned by a later checkpoint: generate it again
                self.reopened(index)
                continue
            try:
                buffered.append(
                    StoredGroup(prompt_index=index, finished_version=version, group=decode_group(header, block))
                )
            except ValueError as error:
                raise LedgerError(
                    f"ledger {self._path} is corrupted at prompt {index}: {error}; move the file away to go on without it"
                ) from error
        return Recovered(
            buffered=tuple(buffered),
            done=frozenset(index for index, state in rows if state != "buffered"),
            next_index=max((index for index, _ in rows), default=-1) + 1,
        )

    def prune(self, step: int) -> None:
        """Free the tokens of groups consumed up to a checkpointed step; their accounting stays."""
        with self._transaction(f"pruning up to step {step}"):
            self._db.execute("UPDATE groups SET header = NULL, block = NULL WHERE consumed_step <= ?", (step,))

    def close(self) -> None:
        """Write everything back into the one file."""
        self._db.close()

    @contextmanager
    def _transaction(self, what: str) -> Iterator[None]:
        with self._naming(f"writing {what}"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self._path}: {what} failed: {error}; {_remedy(error)}") from error


def _remedy(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "another run uses it: stop that run, or choose another exp_name"
    if "full" in text or "I/O" in text or "disk" in text:
        return "free space on its disk, or set ledger.path to another one"
    if "malformed" in text or "not a database" in text:
        return "it is corrupted: move the file away to go on without its finished groups"
    if "readonly" in text or "unable to open" in text:
        return "make its folder writable, or set ledger.path"
    return "set ledger.path to another place"
