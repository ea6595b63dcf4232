"""Transport by files in a folder that every host sees, for hosts that share nothing faster than a disk."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from roll_async.weight_sync.transfer import PlannedBlock
from roll_async.weight_sync.transport.shm import FileWriter


class FolderWriter:
    """`FileWriter` in one folder; a file is flushed to the disk before it is announced. `location`: the file's path."""

    def __init__(self, folder: str) -> None:
        path = Path(folder).resolve()
        path.mkdir(parents=True, exist_ok=True)
        self._files = FileWriter(folders=(path,))

    def write(self, index: int, planned: PlannedBlock, num_bytes: int) -> tuple[str, Tensor]:
        location, data = self._files.write(index, planned, num_bytes)
        handle = os.open(location, os.O_RDONLY)
        try:
            os.fsync(handle)  # also writes out the pages dirtied through the mapping
        finally:
            os.close(handle)
        return location, data

    def close(self) -> None:
        self._files.close()
