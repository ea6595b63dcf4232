"""Transport by shared memory of one host: the sender fills one file per block, which receivers map without a copy.

The files are kept for the next version, because fresh pages cost several times the copy into them. They are in /dev/shm
(a temporary folder where that is missing or full), and their names contain the run's marker, by which the reaper
removes them after a kill.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import Block, TensorSlot, UpdatePlan
from roll_async.weight_sync.transfer import PlannedBlock, pack, unpack

logger = logging.getLogger(__name__)

FILE_PREFIX = "roll_async-"


def shared_folder() -> Path:
    """The folder of shared files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class MappedFile:
    """One growing file mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def tensor(self, num_bytes: int) -> Tensor:
        """uint8 [>= num_bytes] over the file. Raises OSError when there is no room for it."""
        if self._map is None or len(self._map) < num_bytes:
            self.close()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # Otherwise the first write to a full /dev/shm kills the process.
                os.posix_fallocate(handle, 0, num_bytes)
                self._map = mmap.mmap(handle, num_bytes)
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)  # the mapping needs no open file
        return torch.frombuffer(self._map, dtype=torch.uint8)  # keeps the mapping alive

    def close(self) -> None:
        """Remove the file; existing mappings of it stay valid."""
        # The mapping itself ends with the last tensor over it; an exported buffer must not be closed.
        self._map = None
        self.path.unlink(missing_ok=True)


class FileWriter:
    """One file per block, in the first of `folders` that has room. `location`: the file's path."""

    def __init__(self, folders: tuple[Path, ...] | None = None) -> None:
        fallback = Path(tempfile.gettempdir())
        self._folders = list(folders or dict.fromkeys((shared_folder(), fallback)))  # once, where they are the same
        marker = os.environ.get("ROLL_ASYNC_RUN", "solo")
        # `cluster/reaper.py` finds the files of a run by this beginning of their names.
        self._stem = f"{FILE_PREFIX}{marker}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._files: list[MappedFile] = []

    def write(self, index: int, planned: PlannedBlock, num_bytes: int) -> tuple[str, Tensor]:
        data = self._room(index, num_bytes)
        pack(planned, data)
        return str(self._files[index].path), data

    def _room(self, index: int, num_bytes: int) -> Tensor:
        """uint8 [>= num_bytes] over file `index`. Raises ValueError when no folder has room."""
        if index == len(self._files):
            self._files.append(MappedFile(self._folders[0] / f"{self._stem}-{index}"))
        while True:
            try:
                return self._files[index].tensor(num_bytes)
            except OSError as error:
                full = self._folders[0]
                free = shutil.disk_usage(full).free
                needs = f"block {index} needs {num_bytes >> 20} MiB ({error.strerror})"
                reason = f"{full} has {free >> 20} MiB free and {needs}"
                if len(self._folders) == 1:
                    raise ValueError(
                        f"weight sync: {reason}; it must hold one copy of the weights: enlarge it (docker: --shm-size)"
                    ) from error
                self._folders.pop(0)  # for all later blocks, too: it stays full
                logger.warning("weight sync: %s; continuing in %s", reason, self._folders[0])
                self._files[index] = MappedFile(self._folders[0] / f"{self._stem}-{index}")

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()


class FileReader:
    """Maps the sender's files privately, so that a write here does not change the sender's."""

    def read(self, block: Block, rank: int) -> Iterator[tuple[TensorSlot, Tensor]]:
        if not any(rank in slot.ranks for slot in block.slots):
            return
        with open(block.location, "rb") as file:
            # Of this size: a file that served larger blocks before is longer.
            mapped = mmap.mmap(file.fileno(), block.num_bytes, access=mmap.ACCESS_COPY)
        yield from unpack(block, torch.frombuffer(mapped, dtype=torch.uint8), rank)

    def close(self) -> None:
        """Nothing to do: a mapping ends with the last tensor over it."""


def reader(plan: UpdatePlan, rank: int) -> FileReader:
    """The same for every rank."""
    return FileReader()
