"""Weights through shared memory of one host: the sender fills two files in turn, receivers map them.

The files live in /dev/shm (a temporary folder where there is none) and carry the run's marker in their name, so that
the
reaper removes them when a process is killed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from roll_async.weight_sync.bucket import Bucket, TensorSlot, UpdatePlan
from roll_async.weight_sync.digest import Digest, as_bytes
from roll_async.weight_sync.packing import plan_buckets, size_of, unpack

FILE_PREFIX = "roll_async-"
_NUM_SLOTS = 2


def shared_folder() -> Path:
    """Where shared files live."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class _SharedFile:
    """One growing file mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def tensor(self, num_bytes: int) -> Tensor:
        """uint8 [>= num_bytes] over the file. Raises ValueError when the host has no room for it."""
        if self._map is None or len(self._map) < num_bytes:
            self.close()
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, num_bytes)
            except OSError as error:
                free = shutil.disk_usage(self.path.parent).free
                self.path.unlink(missing_ok=True)
                raise ValueError(
                    f"shared memory {self.path.parent} has {free >> 20} MiB free and a bucket needs {num_bytes >> 20} MiB "
                    f"({error.strerror}); lower weight_sync.bucket_size_mb"
                ) from error
            else:
                self._map = mmap.mmap(handle, num_bytes)
            finally:
                os.close(handle)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        # The mapping itself goes with the last tensor over it; an exported buffer must not be closed.
        self._map = None
        self.path.unlink(missing_ok=True)


class ShmSender:
    """Sends one weight version. Every rank iterates (gathering is collective); only `is_sender` writes."""

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        plan: UpdatePlan,
        bucket_bytes: int,
        *,
        is_sender: bool,
    ) -> None:
        self._is_sender = is_sender
        self._plan = plan
        self._planned = plan_buckets(tensors(), bucket_bytes)
        self._digest = Digest(plan.verify)
        self._index = 0
        marker = os.environ.get("ROLL_ASYNC_RUN", "solo")
        stem = f"{FILE_PREFIX}{marker}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._files = [_SharedFile(shared_folder() / f"{stem}-{i}") for i in range(_NUM_SLOTS)]

    @property
    def plan(self) -> UpdatePlan | None:
        """The announcement; None on ranks that only take part in the gathering."""
        return self._plan if self._is_sender else None

    @property
    def digest(self) -> str:
        """Digest of every tensor sent so far."""
        return self._digest.hexdigest()

    def next_bucket(self) -> Bucket | None:
        """Write the next bucket over the one before last. None at the end, also on ranks that do not send."""
        planned = next(self._planned, None)
        if planned is None:
            return None
        index, self._index = self._index, self._index + 1
        if not self._is_sender:
            return Bucket(index=index, slots=(), num_bytes=0, location="")
        num_bytes = size_of(planned)
        file = self._files[index % _NUM_SLOTS]
        target = file.tensor(num_bytes)
        for slot, tensor in planned:
            view = target[slot.offset : slot.offset + slot.num_bytes]
            view.copy_(as_bytes(tensor))
            self._digest.update(slot, view)
        return Bucket(index=index, slots=tuple(s for s, _ in planned), num_bytes=num_bytes, location=str(file.path))

    def close(self) -> None:
        """Remove the files; receivers that still map them keep their view."""
        for file in self._files:
            file.close()


def open_bucket(bucket: Bucket) -> Iterator[tuple[TensorSlot, Tensor, Tensor]]:
    """(slot, bytes, tensor) of a bucket written by `ShmSender`; read-only views, valid while the sender keeps the
    bucket.
    """
    with open(bucket.location, "rb") as file:
        mapped = mmap.mmap(file.fileno(), bucket.num_bytes, access=mmap.ACCESS_COPY)
    yield from unpack(bucket, torch.frombuffer(mapped, dtype=torch.uint8))
