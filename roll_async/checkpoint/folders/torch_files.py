"""`pytorch_model.bin` files, read lazily: the zip of torch.save is mapped into memory, only tensors are unpickled."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from roll_async.checkpoint.folders.safetensors_files import TensorSpec
from roll_async.checkpoint.folders.tensor_bytes import bytes_of


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """OSError with the folder when a file in it cannot be written, where torch.save may raise a RuntimeError about
    positions in its zip.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(folder)) from error
        raise


class TorchFile:
    """One file to read from, as `SafetensorsFile`. Raises ValueError that names it when it is truncated, of the old
    format, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(f"{path} cannot be read as a file of tensors: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError(f"{path} holds something else than named tensors")
        self._tensors: dict[str, Tensor] = found

    def specs(self) -> list[TensorSpec]:
        """All tensors, in the order of the file."""
        return [TensorSpec(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in self._tensors.items()]

    def tensor(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """One tensor, in memory of its own or in `buffer` (uint8, of its size)."""
        source = self._tensors[name].contiguous()
        data = torch.empty(source.nbytes, dtype=torch.uint8) if buffer is None else buffer
        assert data.numel() == source.nbytes
        if source.nbytes:
            bytes_of(data)[:] = bytes_of(source)
        return data.view(source.dtype).reshape(source.shape)

    def close(self) -> None:
        """Release the file."""
        self._tensors = {}
