"""Durable log of groups: SQLite in WAL mode, one row per position of the prompt stream, and in a second table its
tokens until the step that trained them is checkpointed.

A finished group is durable before its producer goes on, and before the step that trains it counts. "Consumed by step t"
is written in the same transaction that records step t. A position is done, buffered, or to be generated, never two of
them: it is the primary key. Positions to be generated have no row: they are those below the first unknown position that
no row names.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from roll_async.buffer.errors import DamagedLedger, LedgerError
from roll_async.buffer.fingerprint import Fingerprint
from roll_async.buffer.freshness import newest_version
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.buffer.ledger_checks import (
    contradiction,
    damage,
    done_by,
    keep_sums,
    log_is_cut,
    take_position,
    take_sums,
)
from roll_async.buffer.log_sync import LogSync
from roll_async.schema import Group, WeightVersion

logger = logging.getLogger(__name__)

_FORMAT = 3
_WITHOUT_SUMS = 2
"""The format before: its rows are taken as they are, once."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    prompt_index INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('buffered', 'trained', 'filtered', 'failed')),
    consumed_step INTEGER,            -- trained by this step
    after_step INTEGER NOT NULL,      -- last step recorded when the row was written
    newest_version INTEGER,           -- of its tokens
    finished_version INTEGER,         -- held by the engines when it finished
    rewards TEXT,                     -- JSON list, one score per sample, for readers of the file
    reason TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS tokens (   -- a table of its own, so that a change of state does not rewrite the tokens
    prompt_index INTEGER PRIMARY KEY,
    header TEXT NOT NULL,
    block BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sums (name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_step ON groups (consumed_step);
"""
_FSYNC = {"group": "NORMAL", "step": "NORMAL", "never": "OFF"}
"""SQLite's `synchronous`. With NORMAL a commit is in the log, and what makes the log durable makes every commit so."""
_PAGE_BYTES = 16384
"""A group of long samples spans many pages, and each costs time; larger pages waste space on short groups."""
_WAL_PAGES = 4096
"""64 MiB of log before a WAL checkpoint: a group of 16 long samples is more than half a MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A finished group that waits for the trainer."""

    prompt_index: int
    finished_version: WeightVersion
    group: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The accounting of a ledger relative to a restored step."""

    buffered: tuple[StoredGroup, ...] = ()
    done: frozenset[int] = frozenset()
    """Positions trained up to the restored step, filtered, or quarantined."""
    next_index: int = 0
    """First position above all that the ledger has a record of."""
    next_group_id: int = 0
    filtered: int = 0
    failed: int = 0


class Ledger(Protocol):
    """The log that the queue uses: `SqliteLedger`, or `MemoryLedger` when ledger.enable is false."""

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None: ...

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None: ...

    def reopened(self, prompt_index: int) -> None: ...

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None: ...

    def restore(self, step: int, state: Mapping[str, object] | None = None) -> Recovered: ...

    def prune(self, step: int) -> None: ...

    def fingerprint(self) -> Fingerprint:
        """The stored fingerprint; empty when none was stored."""
        ...

    def remember(self, fingerprint: Fingerprint) -> None: ...

    async def durable(self) -> None:
        """Return when all groups written so far are as durable as they are to be."""
        ...

    def close(self) -> None: ...


class MemoryLedger:
    """Stores nothing: after a restart finished groups are generated again. Refuses a second use of a position."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None:
        self._use(prompt_index)

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None:
        self._use(prompt_index)

    def reopened(self, prompt_index: int) -> None:
        self._used.discard(prompt_index)

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None:
        assert self._used.issuperset(prompt_indexes), f"step {step} trained groups that were never finished"

    def restore(self, step: int, state: Mapping[str, object] | None = None) -> Recovered:
        """From a checkpoint's `state` (`MessageQueue.checkpoint_state`). Raises LedgerError for a later step without
        it.
        """
        if state is None:
            if step:
                raise LedgerError(
                    f"step {step} cannot be restored without its position in the prompt stream: the ledger is off "
                    "(ledger.enable: false) and the checkpoint does not hold it; start fresh, or enable the ledger"
                )
            return Recovered()
        done, next_index = done_by(state), state["next_index"]
        assert isinstance(next_index, int)
        self._used |= done
        return Recovered(done=done, next_index=next_index)

    def prune(self, step: int) -> None:
        pass

    def fingerprint(self) -> Fingerprint:
        return {}

    def remember(self, fingerprint: Fingerprint) -> None:
        pass

    async def durable(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _use(self, prompt_index: int) -> None:
        assert prompt_index not in self._used, f"prompt {prompt_index} is finished twice"
        self._used.add(prompt_index)


class SqliteLedger:
    """One file, used by one process. Raises LedgerError naming the file, what was being written, and the remedy.

    fsync: `group`: a finished group is on the disk before its producer goes on (`durable`), many of them by one call of
    the disk; `step`: at the latest with the step that trains it; `never`: the operating system decides, and a crash of
    the machine may cost groups, which are generated again, but does not damage the file.
    """

    def __init__(self, path: str | Path, *, fsync: str = "group", can_rebuild: bool = False) -> None:
        """`can_rebuild`: a checkpoint holds the position. A file that is damaged, or contradicts that position, is then
        moved to `PATH.damaged`, a new one starts from the position, and finished groups are generated again. Otherwise
        it raises DamagedLedger.
        """
        self._path, self._log_path = Path(path), Path(f"{path}-wal")
        self._fsync, self._can_rebuild, self._began_anew = fsync, can_rebuild, False
        if fsync not in _FSYNC:
            raise ValueError(f"ledger.fsync {fsync!r}: expected group, step or never")
        try:
            self._connect()
        except DamagedLedger as error:
            if not can_rebuild:
                raise
            self._start_over(error)

    def _start_over(self, reason: DamagedLedger) -> None:
        """Move a damaged file away and begin a new one."""
        moved, self._began_anew = _move(self._path, ".damaged"), True
        logger.warning("%s; it is now %s, finished groups are generated again", reason, moved)
        self._connect()

    def _connect(self) -> None:
        with self._naming("opening"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # `isolation_level` None: Python's sqlite3 begins no transaction of its own.
            self._db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
            try:
                self._open()
                self._step = int(self._db.execute("SELECT coalesce(max(step), 0) FROM steps").fetchone()[0])
                self._log = LogSync(self._log_path)
            except BaseException:  # also an interrupt: the file is locked until it is closed
                self._db.close()
                raise

    def _disconnect(self) -> None:
        self._log.close()
        self._db.close()

    def _open(self) -> None:
        # EXCLUSIVE keeps a second run from using the file as long as this one lives.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._db.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # before WAL, in which it cannot be changed
        mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(f"ledger {self._path}: its file system has no write-ahead log ({mode}); use a local disk")
        if log_is_cut(self._db, self._log_path):
            logger.warning("ledger %s: its log breaks off; what it said after that is generated again", self._path)
        self._db.execute(f"PRAGMA synchronous={_FSYNC[self._fsync]}")
        self._db.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
        self._db.execute("BEGIN IMMEDIATE")  # takes the write lock now, not with the first write
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        known = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
        if known and found not in (_FORMAT, _WITHOUT_SUMS):
            raise LedgerError(f"ledger {self._path} has format {found}, this version writes {_FORMAT}; move it away")
        for statement in _SCHEMA.split(";\n"):  # `executescript` would commit the transaction first
            self._db.execute(statement)
        keep_sums(self._db)
        if found != _FORMAT:
            take_sums(self._db)
        if problem := damage(self._db):
            raise DamagedLedger(f"ledger {self._path} is damaged: {problem}; {_WITHOUT_IT}")
        self._db.execute(f"PRAGMA user_version={_FORMAT}")
        self._db.execute("COMMIT")

    def finished(self, group: Group, prompt_index: int, version: WeightVersion) -> None:
        """Record a finished group; `durable` waits for the disk."""
        header, block = encode_group(group)
        rewards = json.dumps([None if s.reward is None else s.reward.score for s in group.samples])
        # INSERT without OR REPLACE: a position that finishes twice violates the primary key.
        with self._transaction(f"group {group.group_id} (prompt {prompt_index})"):
            self._db.execute(
                "INSERT INTO groups (prompt_index, group_id, state, after_step, newest_version, finished_version,"
                " rewards) VALUES (?, ?, 'buffered', ?, ?, ?, ?)",
                (prompt_index, group.group_id, self._step, newest_version(group), version, rewards),
            )
            self._db.execute(
                "INSERT INTO tokens (prompt_index, header, block, checksum) VALUES (?, ?, ?, ?)",
                (prompt_index, header, block, _checksum(header.encode(), block)),
            )

    def closed(self, prompt_index: int, group_id: int, state: str, reason: str) -> None:
        """A position that will not be trained: filtered or failed."""
        with self._transaction(f"group {group_id} (prompt {prompt_index})"):
            self._db.execute(
                "INSERT INTO groups (prompt_index, group_id, state, after_step, reason) VALUES (?, ?, ?, ?, ?)",
                (prompt_index, group_id, state, self._step, reason[:2000]),
            )

    def reopened(self, prompt_index: int) -> None:
        """A finished group was discarded: its prompt is to be generated again."""
        with self._transaction(f"prompt {prompt_index}"):
            self._db.execute("DELETE FROM groups WHERE prompt_index = ?", (prompt_index,))
            self._db.execute("DELETE FROM tokens WHERE prompt_index = ?", (prompt_index,))

    def trained(self, step: int, prompt_indexes: Sequence[int]) -> None:
        """Step `step` consumed these groups: the step and its groups in one transaction."""
        if self._fsync != "never":  # a synchronized commit makes all earlier commits of the log durable, too
            self._db.execute("PRAGMA synchronous=FULL")  # SQLite does not change it inside a transaction
        with self._transaction(f"step {step} (prompts {', '.join(map(str, prompt_indexes[:8]))} ...)"):
            self._db.execute("INSERT INTO steps (step) VALUES (?)", (step,))
            changed = self._db.executemany(
                "UPDATE groups SET state = 'trained', consumed_step = ? WHERE prompt_index = ? AND state = 'buffered'",
                [(step, index) for index in prompt_indexes],
            ).rowcount
            assert changed == len(prompt_indexes), (  # inside the transaction, which it rolls back
                f"step {step}: {changed} of {len(prompt_indexes)} groups were buffered"
            )
        if self._fsync != "never":
            self._db.execute("PRAGMA synchronous=NORMAL")
        self._step = step  # once it is committed: what is written from now on comes after it

    def restore(self, step: int, state: Mapping[str, object] | None = None) -> Recovered:
        """Go back to a restored step: groups that later steps consumed are available again, groups filtered or failed
        later are to be generated again, and groups of newer weights are deleted. A ledger without a record of the step,
        because it was lost or the step was saved without it, takes the position from the checkpoint's `state`; so does
        one that is damaged or contradicts it.
        """
        try:
            return self._restore(step, state)
        except DamagedLedger as error:
            if state is None or not self._can_rebuild:
                raise
            self._disconnect()  # before the file is moved: it is open, and locked
            self._start_over(error)
            return self._restore(step, state)

    def _restore(self, step: int, state: Mapping[str, object] | None) -> Recovered:
        with self._transaction(f"restore of step {step}"):
            known = self._db.execute("SELECT count(*) FROM steps WHERE step = ?", (step,)).fetchone()[0]
            if step and not known and state is not None:
                if not self._began_anew:  # else there is one warning already
                    logger.warning("ledger %s has no record of step %d: the checkpoint's is used", self._path, step)
                take_position(self._db, step, state)
            elif step and not known:
                raise LedgerError(
                    f"ledger {self._path} has no record of step {step}, which the checkpoint names: it belongs "
                    "to another run or was moved; put it back, resume from another checkpoint, or start fresh "
                    "under another exp_name"
                )
            elif state is not None and (differs := contradiction(self._db, step, state)):
                raise DamagedLedger(f"ledger {self._path}: {differs}; {_WITHOUT_IT}")
            self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._db.execute("DELETE FROM groups WHERE state IN ('filtered', 'failed') AND after_step > ?", (step,))
            self._db.execute(
                # Version v is the weights after step v: those of later steps do not exist any more.
                "DELETE FROM groups WHERE (state = 'buffered' OR consumed_step > ?) AND newest_version > ?",
                (step, step),
            )
            lost = self._db.execute(
                "DELETE FROM groups WHERE (state = 'buffered' OR consumed_step > ?)"
                " AND prompt_index NOT IN (SELECT prompt_index FROM tokens)",
                (step,),
            ).rowcount
            if lost:  # deleted after a later checkpoint, or by a fault of the disk
                logger.warning(
                    "ledger %s: %d finished groups have no samples any more: generated again", self._path, lost
                )
            self._db.execute("DELETE FROM tokens WHERE prompt_index NOT IN (SELECT prompt_index FROM groups)")
            self._db.execute(
                "UPDATE groups SET state = 'buffered', consumed_step = NULL, after_step = ? WHERE consumed_step > ?",
                (step, step),
            )
        self._step = step
        return self._read()

    def _read(self) -> Recovered:
        with self._naming("reading"):
            rows = self._db.execute("SELECT prompt_index, state FROM groups").fetchall()
            last_id = self._db.execute("SELECT coalesce(max(group_id), -1) FROM groups").fetchone()[0]
            # As BLOB: of a damaged text that is not UTF-8 sqlite3 raises before a checksum is compared.
            stored = self._db.execute(
                "SELECT prompt_index, group_id, finished_version, CAST(header AS BLOB), CAST(block AS BLOB), checksum"
                " FROM groups JOIN tokens USING (prompt_index) WHERE state = 'buffered' ORDER BY group_id"
            ).fetchall()
        states = [state for _, state in rows]
        return Recovered(
            buffered=tuple(found for row in stored if (found := self._decoded(*row)) is not None),
            done=frozenset(index for index, state in rows if state != "buffered"),
            next_index=max((index for index, _ in rows), default=-1) + 1,
            next_group_id=last_id + 1,
            filtered=states.count("filtered"),
            failed=states.count("failed"),
        )

    def _decoded(
        self, index: int, group_id: int, version: int, header: bytes, block: bytes, checksum: int
    ) -> StoredGroup | None:
        problem = "checksum differs" if _checksum(header, block) != checksum else ""
        if not problem:
            try:
                group = decode_group(header.decode(), block)
                if group.group_id == group_id:
                    return StoredGroup(prompt_index=index, finished_version=version, group=group)
                problem = f"its samples are those of group {group.group_id}, not of {group_id}"
            except ValueError as error:
                problem = str(error)
        if self._can_rebuild:
            logger.warning("ledger %s, prompt %d: %s; it is generated again", self._path, index, problem)
            self.reopened(index)
            return None
        raise LedgerError(f"ledger {self._path} is corrupted at prompt {index}: {problem}; {_WITHOUT_IT}")

    def prune(self, step: int) -> None:
        """Delete the tokens of groups consumed up to a checkpointed step; their accounting stays. The file reuses the
        space.
        """
        with self._transaction(f"pruning up to step {step}"):
            self._db.execute(
                "DELETE FROM tokens WHERE prompt_index IN (SELECT prompt_index FROM groups WHERE consumed_step <= ?)",
                (step,),
            )

    def fingerprint(self) -> Fingerprint:
        """The stored fingerprint; empty when none was stored."""
        with self._naming("reading the fingerprint"):
            return dict(self._db.execute("SELECT name, value FROM facts").fetchall())

    def remember(self, fingerprint: Fingerprint) -> None:
        """Store the fingerprint of the positions and groups in the ledger."""
        with self._transaction("the fingerprint"):
            self._db.execute("DELETE FROM facts")
            self._db.executemany("INSERT INTO facts (name, value) VALUES (?, ?)", list(fingerprint.items()))

    async def durable(self) -> None:
        """Return when all groups written so far are as durable as they are to be: with `group` on the disk."""
        if self._fsync == "group":
            with self._naming("bringing finished groups to the disk"):
                await self._log.reached()

    def close(self) -> None:
        """Merge the write-ahead log into the file and release it."""
        with self._naming("closing"):
            self._disconnect()

    @contextmanager
    def _transaction(self, what: str) -> Iterator[None]:
        with self._naming(f"writing {what}"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:  # also an interrupt: no transaction may be left open
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            kind = DamagedLedger if _error_name(error).startswith(_DAMAGE) else LedgerError
            raise kind(f"ledger {self._path}: {what} failed: {error}; {_remedy(error)}") from error


def move_to_previous(path: str | Path) -> Path | None:
    """Move an older ledger (file, log, index) to `PATH.previous`, None when there is none. Raises LedgerError when a
    run still uses it.
    """
    source = Path(path)
    if not source.exists():
        return None
    with suppress(DamagedLedger):
        SqliteLedger(source, fsync="never").close()  # raises where a run still uses it, and merges its log
    return _move(source, ".previous")


def _move(source: Path, ending: str) -> Path:
    """Rename file, log and index to the name with this ending."""
    target = source.with_name(source.name + ending)
    for suffix in ("", "-wal", "-shm"):
        part, moved = Path(f"{source}{suffix}"), Path(f"{target}{suffix}")
        moved.unlink(missing_ok=True)  # an older log of that name would be taken for part of the moved file
        if part.exists():
            part.rename(moved)
    return target


def _checksum(header: bytes, block: bytes) -> int:
    return zlib.crc32(block, zlib.crc32(header))


def _error_name(error: Exception) -> str:
    return getattr(error, "sqlite_errorname", "") or type(error).__name__


def _remedy(error: Exception) -> str:
    name = _error_name(error)
    for names, remedy in _REMEDIES.items():
        if name.startswith(names):
            return remedy
    return "set ledger.path to another place"


_WITHOUT_IT = "move the file away to go on without its finished groups"
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "OperationalError", "UnicodeDecodeError")
"""ERROR: a name in the schema has changed, for the statements are constant. The last two: a text is not UTF-8, or what
SQLite says of the damage.
"""
_REMEDIES: dict[tuple[str, ...], str] = {
    ("SQLITE_BUSY", "SQLITE_LOCKED"): "another run uses it: stop that run, or choose another exp_name",
    ("SQLITE_FULL", "SQLITE_IOERR"): "free space on its disk, or set ledger.path to another one, then resume",
    _DAMAGE: f"it is corrupted: {_WITHOUT_IT}",
    ("SQLITE_READONLY", "SQLITE_CANTOPEN", "PermissionError", "FileExistsError", "NotADirectoryError"): (
        "make its folder writable, or set ledger.path"
    ),
    ("SQLITE_CONSTRAINT",): "two groups of one prompt finished: this is a defect of the program, please report it",
}
