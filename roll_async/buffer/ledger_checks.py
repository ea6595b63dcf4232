"""Whether the rows of a ledger are those that were written, and agree with the checkpoint that is restored; and how
they are made to agree with it.

Each table has a sum of the checksums of its rows. Triggers change it in the transaction that changes a row, so that a
row which a fault of the disk alters, removes or adds is noticed when the file is opened. The samples of a group have a
checksum of their own, because they can be generated again.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_FROM_CHECKPOINT = "from the checkpoint"
"""Reason of rows that no process wrote when their groups were trained: their step may follow a gap."""
_COLUMNS = {
    "groups": "prompt_index group_id state consumed_step after_step newest_version finished_version rewards reason",
    "steps": "step",
    "facts": "name value",
}
_NAMED = 8
_LOG_HEAD, _FRAME_HEAD = 32, 24
"""Bytes, from SQLite's description of the format."""


def keep_sums(db: sqlite3.Connection) -> None:
    """Create the triggers of this connection. They are not in the file, which other programs can read as before."""
    db.create_function("row_checksum", -1, _row_checksum)  # -1: of any number of columns
    for table in _COLUMNS:
        new, old = _checksum_of(table, "NEW."), _checksum_of(table, "OLD.")
        for event, rows, change in (("INSERT", 1, new), ("DELETE", -1, f"-{old}"), ("UPDATE", 0, f"{new} - {old}")):
            db.execute(
                f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} BEGIN UPDATE sums SET"
                f" num_rows = num_rows + {rows}, checksum = checksum + {change} WHERE name = '{table}'; END"
            )


def take_sums(db: sqlite3.Connection) -> None:
    """Take the rows as they are: those of a new ledger, or of one written before there were sums."""
    db.execute("DELETE FROM sums")
    db.executemany("INSERT INTO sums VALUES (?, ?, ?)", [(table, *_sum_of(db, table)) for table in _COLUMNS])


def damage(db: sqlite3.Connection) -> str:
    """What is wrong with the file, its rows or its steps; empty when nothing is."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()  # also that the index has the rows of its table
    if found != "ok":
        return str(found).splitlines()[-1]
    written = {name: (rows, checksum) for name, rows, checksum in db.execute("SELECT * FROM sums")}
    for table in _COLUMNS:
        rows, checksum = _sum_of(db, table)
        expected, checksum_then = written.get(table, (None, 0))
        if rows != expected:
            return (
                f"table {table} has {rows} rows, {'an unknown number' if expected is None else expected} were written"
            )
        if checksum != checksum_then:
            return f"a row of table {table} is not as it was written"
    gap = db.execute(
        "SELECT min(step) FROM steps AS later WHERE step > 1 AND step - 1 NOT IN (SELECT step FROM steps)"
        " AND NOT EXISTS (SELECT 1 FROM groups WHERE consumed_step = later.step AND reason = ?)",
        (_FROM_CHECKPOINT,),
    ).fetchone()[0]
    return "" if gap is None else f"step {gap} is recorded, and step {gap - 1} is not"


def log_is_cut(db: sqlite3.Connection, log: Path) -> bool:
    """Whether the write-ahead log goes on after the last record that SQLite could read of it, which it does not tell:
    the process ended during a write, or the disk changed something. What follows is lost.
    """
    # SQLite says -1 where there is no log.
    num_read = max(0, db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
    if not log.exists() or log.stat().st_size <= _LOG_HEAD:
        return False
    with log.open("rb") as file:
        head = file.read(_LOG_HEAD)
        # The page size is at bytes 8 to 12, big-endian, as `from_bytes` reads by default.
        file.seek(_LOG_HEAD + num_read * (_FRAME_HEAD + int.from_bytes(head[8:12])))
        next_frame = file.read(_FRAME_HEAD)
    return not num_read or next_frame[8:16] == head[16:24]  # the salts; those of earlier rounds of the log differ


def done_by(state: Mapping[str, object]) -> frozenset[int]:
    """The positions that a checkpoint (`MessageQueue.checkpoint_state`) is done with."""
    next_index, still_open = state["next_index"], state["open"]
    assert isinstance(next_index, int) and isinstance(still_open, list)
    return frozenset(range(next_index)) - frozenset(still_open)


def contradiction(db: sqlite3.Connection, step: int, state: Mapping[str, object]) -> str:
    """In what the rows up to `step` and its checkpoint differ; empty when they agree. A verdict may be newer than the
    position in the checkpoint.
    """
    done = done_by(state)
    rows = dict(
        db.execute(
            "SELECT prompt_index, state FROM groups WHERE consumed_step <= ?"
            " OR (state IN ('filtered', 'failed') AND after_step <= ?)",
            (step, step),
        ).fetchall()
    )
    not_here = done - rows.keys()
    not_there = {index for index, fate in rows.items() if fate == "trained"} - done
    if not_here:
        return f"the checkpoint of step {step} is done with {_prompts(not_here)}, which the ledger has open"
    return f"{_prompts(not_there)} are trained, which the checkpoint of step {step} has open" if not_there else ""


def take_position(db: sqlite3.Connection, step: int, state: Mapping[str, object]) -> None:
    """Take the accounting of a checkpoint where the ledger has no record of its step. The checkpoint decides which
    positions are done. Records of these that the ledger has (an earlier step that trained them, filtered, failed) stay,
    the others are recorded as trained by `step`.
    """
    db.execute("CREATE TEMP TABLE done (prompt_index INTEGER PRIMARY KEY)")
    db.executemany("INSERT INTO done VALUES (?)", [(index,) for index in sorted(done_by(state))])
    db.execute("DELETE FROM groups WHERE state = 'trained' AND prompt_index NOT IN done")
    db.execute(
        "UPDATE groups SET state = 'trained', consumed_step = ?, reason = ? WHERE prompt_index IN done AND"
        " (state = 'buffered' OR consumed_step > ?)",
        (step, _FROM_CHECKPOINT, step),
    )
    db.execute(
        "UPDATE groups SET after_step = ? WHERE prompt_index IN done AND state IN ('filtered', 'failed')"
        " AND after_step > ?",
        (step, step),
    )
    db.execute(
        "INSERT INTO groups (prompt_index, group_id, state, consumed_step, after_step, reason)"
        # Group -1: the checkpoint knows positions alone.
        " SELECT prompt_index, -1, 'trained', ?, ?, ? FROM done"
        " WHERE prompt_index NOT IN (SELECT prompt_index FROM groups)",
        (step, step, _FROM_CHECKPOINT),
    )
    db.execute("DROP TABLE done")
    db.execute("INSERT INTO steps (step) VALUES (?)", (step,))


def _prompts(indexes: Iterable[int]) -> str:
    first = sorted(indexes)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return f"prompts {', '.join(map(str, first[:_NAMED]))}{more}"


def _checksum_of(table: str, row: str = "") -> str:
    return f"row_checksum({', '.join(row + column for column in _COLUMNS[table].split())})"


def _sum_of(db: sqlite3.Connection, table: str) -> tuple[int, int]:
    """(rows, sum of their checksums)."""
    return db.execute(f"SELECT count(*), coalesce(sum({_checksum_of(table)}), 0) FROM {table}").fetchone()


def _row_checksum(*values: object) -> int:
    return zlib.crc32(json.dumps(values).encode())  # JSON tells 1 from '1', and NULL from ''
