"""Somebody asks a run for another number of replicas or another bound of its queue, through `replicas/` in its folder.

    roll-async scale  -- request.json -->  the run
                     <-- answer.json  --

Files and not a socket: the folder may lie on a file system that the two sides share and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRequest:
    """One question."""

    id: str
    replicas: int | None = None
    """None = as many as there are."""
    max_queue_size: int | None = None
    """None = the bound that it has."""


class ReplicaRequests:
    """Both ends; `path` is the folder of the run."""

    def __init__(self, path: Path) -> None:
        self._folder = path / "replicas"
        self._run, self._request, self._answer = (
            self._folder / name for name in ("run.json", "request.json", "answer.json")
        )

    # The run

    def open(self) -> None:
        """From now on this process answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()  # a process that was killed has left its files
        _write(self._run, {"host": socket.gethostname(), "pid": os.getpid()})

    def take(self) -> ReplicaRequest | None:
        """The newest question, once."""
        found = _read(self._request)
        if found is None:
            return None
        self._request.unlink(missing_ok=True)
        wanted = {key: int(str(found[key])) for key in ("replicas", "max_queue_size") if found.get(key) is not None}
        return ReplicaRequest(id=str(found["id"]), **wanted)

    def answer(self, request: ReplicaRequest, text: str, *, refused: bool) -> None:
        """In words."""
        _write(self._answer, {"id": request.id, "text": text, "refused": refused})

    def close(self) -> None:
        """Nobody answers any more."""
        for path in (self._run, self._request, self._answer):
            path.unlink(missing_ok=True)

    # Who asks

    def ask(self, timeout_s: float, *, replicas: int | None = None, max_queue_size: int | None = None) -> str:
        """What the run says. Raises ValueError when it is not running, refuses, or says nothing in time."""
        run = _read(self._run)
        if run is None:
            raise ValueError(f"{self._folder.parent} is not running: only a run under way has replicas")
        pid, host = int(str(run["pid"])), str(run["host"])
        # Of a process of another host only the time-out tells.
        if host == socket.gethostname() and not Path(f"/proc/{pid}").exists():
            raise ValueError(f"{self._folder.parent} is not running: its process {pid} is gone")
        request = ReplicaRequest(id=uuid.uuid4().hex, replicas=replicas, max_queue_size=max_queue_size)
        _write(self._request, asdict(request))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = _read(self._answer)
            if found is not None and found["id"] == request.id:  # the answer to an earlier question may still be there
                if found["refused"]:
                    raise ValueError(str(found["text"]))
                return str(found["text"])
            time.sleep(_LOOK_EVERY_S)
        self._request.unlink(missing_ok=True)
        raise ValueError(f"{self._folder.parent}: no answer within {timeout_s:g} s from process {pid} on host {host}")


def _read(path: Path) -> dict[str, object] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _write(path: Path, content: dict[str, object]) -> None:
    """All of it or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)
