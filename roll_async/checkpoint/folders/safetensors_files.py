"""Safetensors files without holding one in memory: headers checked up front, tensors read and written one at a time.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
Unlike `safetensors.torch.save_file`, the writer knows names, shapes and dtypes beforehand and writes each tensor as
it comes, so that a shard costs the memory of its largest tensor.

gpt-oss has all experts of a layer in one tensor, a stack, `mlp.experts.down_proj` [E, ...]. Here each is a tensor of
its own, `mlp.experts.3.down_proj`: in a file they lie one after another.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from roll_async.checkpoint.folders.tensor_bytes import bytes_of

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor that is not in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def stack_name(name: str) -> str:
    """Of the tensor in the file that a part of a stack is in; any other name is its own."""
    return re.sub(r"(?<=\.experts\.)\d+\.(?=[^.]+$)", "", name)


def by_stack(names: Iterable[str]) -> list[str]:
    """Sorted, the parts of each stack one after another in the order of the experts."""
    return sorted(names, key=lambda name: (stack_name(name), len(name), name))


def parts_of(spec: TensorSpec) -> list[TensorSpec]:
    """Of a stack, in order; of any other tensor, itself."""
    layer, experts, kind = spec.name.rpartition(".experts.")
    if not experts or "." in kind:
        return [spec]
    return [replace(spec, name=f"{layer}.experts.{e}.{kind}", shape=spec.shape[1:]) for e in range(spec.shape[0])]


class SafetensorsFile:
    """One file to read from. Raises ValueError that names it when it is truncated or something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb")
        self._specs: dict[str, tuple[TensorSpec, int]] = {}
        header, start = self._header()
        for name, entry in header.items():
            if name != "__metadata__":
                spec, offset = self._entry(name, entry, start)
                for part in parts_of(spec):
                    self._specs[part.name] = part, offset
                    offset += part.num_bytes

    def _header(self) -> tuple[dict, int]:
        size = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        # {} is the shortest header.
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{self.path} is truncated or not a safetensors file")
        try:
            header = json.loads(self._file.read(length))
            entries = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            end = max((int(stop) for _, stop in entries), default=0)
        except (ValueError, AttributeError, KeyError, TypeError) as error:  # any JSON may stand there
            raise ValueError(f"{self.path} is not a safetensors file: its header is damaged ({error})") from error
        if 8 + length + end != size:
            raise ValueError(f"{self.path} is truncated: it has {size} bytes, its header describes {8 + length + end}")
        return header, 8 + length

    def _entry(self, name: str, entry: Mapping, start: int) -> tuple[TensorSpec, int]:
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{self.path}: {name} has dtype {entry['dtype']}, which is not supported")
        spec = TensorSpec(name=name, shape=tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]])
        first, last = entry["data_offsets"]
        if last - first != spec.num_bytes:
            raise ValueError(f"{self.path}: {name} has {last - first} bytes, its shape and dtype need {spec.num_bytes}")
        return spec, start + first

    def specs(self) -> list[TensorSpec]:
        """All tensors, in the order of the header."""
        return [spec for spec, _ in self._specs.values()]

    def tensor(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """One tensor, in memory of its own or in `buffer` (uint8, of its size)."""
        spec, offset = self._specs[name]
        data = torch.empty(spec.num_bytes, dtype=torch.uint8) if buffer is None else buffer
        assert data.numel() == spec.num_bytes
        if spec.num_bytes:
            self._file.seek(offset)
            if self._file.readinto(bytes_of(data)) != spec.num_bytes:
                raise ValueError(f"{self.path} is truncated: {name} ends early")
        return data.view(spec.dtype).reshape(spec.shape)

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class SafetensorsWriter:
    """Writes one file of known tensors, given in order. The caller syncs it to disk."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._expected: Iterator[TensorSpec] = iter(specs)
        # transformers refuses a file that does not name its format.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, run in groupby(specs, key=lambda spec: stack_name(spec.name)):
            parts = list(run)
            stack = replace(parts[0], name=name, shape=(len(parts), *parts[0].shape))
            whole = parts[0] if name == parts[0].name else stack
            assert parts_of(whole) == parts, f"{name} has holes, or parts of several forms"
            end = offset + sum(part.num_bytes for part in parts)
            header[name] = {"dtype": _NAMES[parts[0].dtype], "shape": whole.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned
        self._file = open(path, "wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor of the list."""
        spec = next(self._expected)
        assert (name, tuple(tensor.shape), tensor.dtype) == (spec.name, spec.shape, spec.dtype), (name, spec)
        if tensor.numel():
            self._file.write(bytes_of(tensor))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert next(self._expected, None) is None, "fewer tensors than announced"
                self._file.flush()
        finally:
            self._file.close()


class Sized(Protocol):
    """Anything that goes into a file."""

    @property
    def num_bytes(self) -> int: ...


SizedItem = TypeVar("SizedItem", bound=Sized)


def split_files(
    items: Sequence[SizedItem],
    file_bytes: int,
    together: Callable[[SizedItem, SizedItem], bool] = lambda one, next_one: False,
) -> Iterator[list[SizedItem]]:
    """Split into runs of consecutive items, as many as fit `file_bytes`, at least one and what is `together`."""
    group: list[SizedItem] = []
    size = 0
    for item in items:
        if group and size + item.num_bytes > file_bytes and not together(group[-1], item):
            yield group
            group, size = [], 0
        group.append(item)
        size += item.num_bytes
    yield group
