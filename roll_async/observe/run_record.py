"""`run.json` of a run folder: which run it is, where it came from, how it ended; and the lock of the folder.

    {"run_id": "3f9a61c2", "started": "2026-11-26T05:01:12", "state": "finished", "branch": 0, ...}

The id is given at the first start and kept by every later one that continues the run. The lock lies beside the folder
(`.NAME.lock`), because the folder itself may be renamed while it is held.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from roll_async.observe.disk import cannot

RECORD = "run.json"
ABANDONED = "abandoned"
"""Folder of what a run left behind when it went back to an earlier step, beside what it left."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""File systems without locks: nothing can be known of a second process there."""


def _now() -> str:
    return datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a folder says of its run."""

    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    started: str = field(default_factory=_now)
    """First start, ISO 8601, UTC. What chat templates are told of the time, too (`template_time`)."""
    command: tuple[str, ...] = ()
    """As typed at the last start."""
    parent: Mapping[str, object] | None = None
    """`run_id` and `checkpoint` of another run from which this one began."""
    branch: int = 0
    """How often the run went back to an earlier step and left something behind."""
    places: tuple[str, ...] = ()
    """Files and folders of the run outside of its folder: `KEY=PATH`."""
    exported_step: int = 0
    """Step of the model in `hf/` and `hf_adapter/`; 0 = there is none, or it was being replaced."""
    state: str = "running"
    """running, finished, interrupted or failed; a run that is running and not locked was killed."""
    reason: str = ""
    """Of a failed run."""

    @property
    def tracker_run(self) -> str:
        """Name of the run for trackers, which cannot go back: each branch is a run of its own there."""
        return self.run_id if not self.branch else f"{self.run_id}-{self.branch}"


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run folder; None where there is none. Raises ValueError for one that cannot be read."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        values |= {name: tuple(values[name]) for name in ("command", "places")}
        # A newer version may say more.
        return RunRecord(**{name: value for name, value in values.items() if name in RunRecord.__dataclass_fields__})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or move the folder away") from error


def state_of(folder: Path, record: RunRecord) -> tuple[str, str]:
    """(state, reason of a failure). A run that is running and not locked was killed: the system releases the lock of a
    process that could not say how it ended.
    """
    killed = record.state == "running" and not is_locked(folder)
    return ("killed" if killed else record.state), record.reason


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record as a whole."""
    partial = folder / f"{RECORD}.partial"
    partial.write_text(json.dumps(asdict(record), indent=1) + "\n")
    partial.replace(folder / RECORD)


def unused(path: Path) -> Path:
    """The first of PATH.1, PATH.2, ... that does not exist."""
    return next(p for n in itertools.count(1) if not os.path.lexists(p := path.with_name(f"{path.name}.{n}")))


def next_abandoned(folder: Path, label: str = "") -> Path:
    """A new folder for what is set aside in `folder`, numbered in order: abandoned/1LABEL, abandoned/2LABEL, ..."""
    known = {path.name.partition("_")[0] for path in (folder / ABANDONED).glob("*")}
    number = next(n for n in itertools.count(1) if str(n) not in known)
    return folder / ABANDONED / f"{number}{label}"


class FolderLock:
    """Keeps a path to one process until it is closed, or the process ends in whatever way."""

    def __init__(self, path: Path, key: str) -> None:
        """Raises ValueError, naming the holder, when another process has it, or when the place cannot be used, and
        Unwritable for a fault of its disk.
        """
        self._path, self._file = path, path.with_name(f".{path.name}.lock")
        while not self._is_in_place(handle := self._locked(key)):
            os.close(handle)
        self._handle = handle

    def _locked(self, key: str) -> int:
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without O_TRUNC: the text names the holder as long as the lock is not ours.
            handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise cannot(f"{key} {path}: cannot be written", error, key) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {_now()} UTC".encode(), 0)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise ValueError(f"{key} {path} is in use by {holder}: wait for that run, or choose another") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise cannot(f"{key} {path}: cannot be locked", error, key) from error
        return handle

    def _is_in_place(self, handle: int) -> bool:
        """False where a holder took the file away after it was opened here: that lock would keep nobody out."""
        try:
            return os.path.samestat(os.fstat(handle), self._file.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Give the path free. Where nothing was made of it, nothing is left of the lock either."""
        if not self._path.exists():
            with suppress(OSError):
                self._file.unlink()
        os.close(self._handle)


def locked_names(path: Path) -> list[Path]:
    """What keeps a path to one process: its own name, under which a new folder may take its place, and that of what it
    is a link to.
    """
    path = path.absolute()
    return list(dict.fromkeys((path.parent.resolve() / path.name, path.resolve())))


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of a path."""
    return any(_is_held(name.with_name(f".{name.name}.lock")) for name in locked_names(path))


def _is_held(file: Path) -> bool:
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that only look do not see each other
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
