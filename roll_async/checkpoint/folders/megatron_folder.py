"""Megatron `torch_dist` checkpoint folders without Megatron: whole tensors read by slice, written one at a time.

The format is torch's distributed checkpoint (`.metadata`, `*.distcp`) plus Megatron's `metadata.json` (names the
format) and `common.pt` (objects that are no tensors). What is written here loads with `dist_checkpointing.load` under
any layout.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from roll_async.checkpoint.folders.find_model import TORCH_DIST
from roll_async.checkpoint.folders.safetensors_files import split_files

INDEX = ".metadata"
COMMON = "common.pt"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class MegatronFolder:
    """Reads one checkpoint. Raises ValueError naming the file for what is missing or unreadable."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._check_format()
        try:
            metadata = FileSystemReader(str(folder)).read_metadata()
        except FileNotFoundError as error:
            raise ValueError(f"{folder / INDEX} is missing: the checkpoint was never completed") from error
        except (EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:  # a pickle of torch's classes
            raise ValueError(f"{folder / INDEX} is truncated or damaged: {error}") from error
        self._check_files(metadata)
        self._storage = metadata.storage_data or {}
        self._places: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        entries = metadata.state_dict_metadata
        self._tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.has_extra_states = any("._extra_state" in key for key in entries)
        """Whether it holds what Transformer Engine's layers keep beside their weights, if only empty."""

    def _check_format(self) -> None:
        try:
            config = json.loads((self.path / TORCH_DIST).read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} is not a Megatron checkpoint: {TORCH_DIST} is missing") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / TORCH_DIST} is truncated or not JSON: {error}") from error
        if config.get("sharded_backend") != "torch_dist":
            raise ValueError(f"{self.path} has format {config.get('sharded_backend')!r}, only torch_dist is supported")

    def _check_files(self, metadata: Metadata) -> None:
        """Each data file is there and long enough for what the index says is in it."""
        ends: dict[str, int] = {}
        for info in (metadata.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            if not file.is_file():
                raise ValueError(f"checkpoint file {file} is missing")
            if file.stat().st_size < end:
                raise ValueError(f"checkpoint file {file} is truncated: {file.stat().st_size} of {end} bytes")

    def keys(self) -> set[str]:
        """Keys of all tensors, optimizer state included."""
        return set(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole stored tensor."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Of the stored tensor."""
        return self._tensors[key].properties.dtype

    def tensor(self, key: str, index: Sequence[int] = ()) -> Tensor:
        """`stored[index]`, put together from the chunks that hold it."""
        entry = self._tensors[key]
        rest = tuple(entry.size[len(index) :])
        # [1, ..., 1, *rest]: chunks are boxes in all dimensions of the stored tensor.
        wanted = ChunkStorageMetadata(
            offsets=torch.Size((*index, *(0 for _ in rest))), sizes=torch.Size((*(1 for _ in index), *rest))
        )
        near = TensorStorageMetadata(entry.properties, entry.size, self._chunks_at(key, tuple(index)))
        items = create_read_items_for_chunk_list(key, near, [wanted])
        if sum(item.lengths.numel() for item in items) != wanted.sizes.numel():
            raise ValueError(f"{self.path}: the chunks of {key} do not cover it")
        if len(items) == 1:
            return _part(self._chunk(items[0]), items[0].storage_offsets, items[0].lengths).reshape(rest)
        target = torch.empty(wanted.sizes, dtype=entry.properties.dtype)
        for item in items:
            part = _part(self._chunk(item), item.storage_offsets, item.lengths)
            _part(target, item.dest_offsets, item.lengths).copy_(part)
        return target.reshape(rest)

    def _chunks_at(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """The chunks that may hold a part of `stored[index]`. A stack of experts has thousands, each in one place."""
        depth = len(index)
        if (key, depth) not in self._places:
            places: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self._tensors[key].chunks:
                spans = (range(o, o + n) for o, n in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for place in product(*spans):
                    places.setdefault(place, []).append(chunk)
            self._places[key, depth] = places
        return self._places[key, depth].get(index, [])

    def _chunk(self, item: ReadItem) -> Tensor:
        """One chunk as it was saved."""
        info = self._storage[item.storage_index]
        path = self.path / info.relative_path
        if info.transform_descriptors:
            raise ValueError(f"{path} is compressed ({info.transform_descriptors}), which is not supported")
        try:
            with open(path, "rb") as file:
                # A chunk is a file of torch.save inside the data file. weights_only: a pickle could run code.
                return torch.load(cast(IO[bytes], _View(file, info.offset, info.length)), weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged at byte {info.offset}: {error}") from error


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class _View(io.RawIOBase):
    """A range of a file as a file object."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return count

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor to write: `stored[index]` of `key`, whose leading axes have the sizes `stack`."""

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    shape: tuple[int, ...]
    """Of this tensor, leading axes excluded."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def offsets(self) -> torch.Size:
        """Position in the stored tensor."""
        return torch.Size((*self.index, *(0 for _ in self.shape)))


def write_megatron_folder(
    folder: Path,
    pieces: Sequence[Piece],
    load: Callable[[Piece], Tensor],
    *,
    empty_objects: Sequence[str] = (),
    file_bytes: int = 4 << 30,
    on_file: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write the pieces, each loaded just before it is written, so that `load` may return the same memory every time.
    `folder` exists and is empty. `empty_objects` are names that hold None. `on_file` is called with each data file when
    it is complete, but not yet synced to disk.

    Raises ValueError when pieces of one key differ in dtype or shape, which one stored tensor cannot hold.
    """
    outline: dict[str, STORAGE_TYPES] = {**_outline(pieces), **{name: BytesStorageMetadata() for name in empty_objects}}
    metadata = Metadata(state_dict_metadata=outline)
    planner = cast(SavePlanner, _LazyPlanner(pieces, load))
    # No copies ahead: `load` may return the same memory every time. The caller syncs.
    writer = FileSystemWriter(
        str(folder), single_file_per_rank=True, sync_files=False, thread_count=1, per_thread_copy_ahead=0
    )
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan([_item(piece) for piece in group]) for group in split_files(pieces, file_bytes)]
    plans.append(SavePlan([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in empty_objects]))
    plans = writer.prepare_global_plan(plans)
    with _no_checksums():
        results = []
        for plan in plans:
            results.append(writer.write_data(plan, planner).wait())
            for name in {result.storage_data.relative_path for result in results[-1]}:
                on_file(folder / name)
    writer.finish(metadata, results)
    # Megatron opens it on every load.
    torch.save({}, folder / COMMON)
    # Last: a folder with this file is taken for a checkpoint.
    (folder / TORCH_DIST).write_text(json.dumps(FORMAT))


def _outline(pieces: Sequence[Piece]) -> dict[str, TensorStorageMetadata]:
    outline: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        size = torch.Size((*piece.stack, *piece.shape))
        entry = outline.setdefault(
            piece.key, TensorStorageMetadata(properties=TensorProperties(dtype=piece.dtype), size=size, chunks=[])
        )
        if (entry.size, entry.properties.dtype) != (size, piece.dtype):
            raise ValueError(
                f"{piece.key} is one tensor for all layers and experts, but is {entry.properties.dtype} "
                f"{tuple(entry.size)} in one and {piece.dtype} {tuple(size)} in another; --dtype makes dtypes equal"
            )
        entry.chunks.append(_chunk(piece))
    return outline


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=piece.offsets, sizes=torch.Size((*(1 for _ in piece.index), *piece.shape)))


def _item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, piece.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size((*piece.stack, *piece.shape)),
        ),
    )


class _LazyPlanner:
    """The part of a save planner that torch's writer uses: it loads a tensor just before it is written."""

    def __init__(self, pieces: Sequence[Piece], load: Callable[[Piece], Tensor]) -> None:
        self._pieces = {(piece.key, piece.offsets): piece for piece in pieces}
        self._load = load

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        piece = self._pieces[write_item.index.fqn, cast(torch.Size, write_item.index.offset)]
        tensor = self._load(piece).contiguous()
        return tensor.reshape((*(1 for _ in piece.index), *piece.shape))


@contextmanager
def _no_checksums() -> Iterator[None]:
    """torch.save spends most of its time on zip checksums that torch.load does not look at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
