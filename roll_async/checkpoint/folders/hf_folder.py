"""Hugging Face checkpoint folders: read tensors lazily, write shards with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from roll_async.checkpoint.folders.hf_config import HfConfig, read_json
from roll_async.checkpoint.folders.safetensors_files import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
    by_stack,
    split_files,
    stack_name,
)
from roll_async.checkpoint.folders.torch_files import TorchFile
from roll_async.checkpoint.hf_names.value_head import as_critic

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TORCH_INDEX, _TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_WEIGHTS = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data",
    "*.distcp", "*.index.json",
)  # fmt: skip
_OTHER_FOLDERS = (".*", "__pycache__", "original", "onnx", "runs", "checkpoint-*", "huggingface", "optimizer*")
"""Hidden files, and folders that hold weights in other formats or the state of a training."""


class HfFolder:
    """Reads one checkpoint. Raises ValueError naming the file for what is missing or unreadable."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{folder} is not a Hugging Face checkpoint folder: config.json is missing")
        self.config = HfConfig(read_json(self.path / "config.json"), str(self.path / "config.json"))
        self._open: SafetensorsFile | TorchFile | None = None

    @cached_property
    def _specs(self) -> dict[str, tuple[TensorSpec, Path]]:
        specs: dict[str, tuple[TensorSpec, Path]] = {}
        for path in self._files():
            if not path.is_file():
                raise ValueError(f"{path} is missing")
            file = _opened(path)
            specs |= {spec.name: (spec, path) for spec in file.specs()}
            file.close()
        absent = self._promised() - {stack_name(name) for name in specs}
        if absent:
            raise ValueError(f"{self.path / self._index} names {sorted(absent)[0]}, which no file has")
        return specs

    def _files(self) -> list[Path]:
        if self._index:
            # The map names a file once for each of its tensors.
            return [self.path / name for name in dict.fromkeys(self._weight_map().values())]
        for name in (SINGLE, _TORCH_SINGLE):
            if (self.path / name).is_file():
                return [self.path / name]
        raise ValueError(f"{self.path} holds neither {SINGLE} nor {INDEX}, nor {_TORCH_SINGLE} or its index")

    @cached_property
    def _index(self) -> str:
        """Name of the index in use; empty = a single file. Safetensors have precedence, as in transformers."""
        order = (INDEX, SINGLE, _TORCH_INDEX, _TORCH_SINGLE)
        found = next((name for name in order if (self.path / name).is_file()), "")
        return found if found in (INDEX, _TORCH_INDEX) else ""

    def _weight_map(self) -> dict[str, str]:
        weight_map = read_json(self.path / self._index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{self.path / self._index} has no weight_map")
        return weight_map

    def _promised(self) -> set[str]:
        return set(self._weight_map()) if self._index else set()

    def names(self) -> list[str]:
        """All tensor names, file by file."""
        return list(self._specs)

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor."""
        if name not in self._specs:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self._specs[name][0]

    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec, _ in self._specs.values())

    def tensor(self, name: str, buffer: Tensor | None = None) -> Tensor:
        """One tensor, read on demand, into `buffer` (uint8, of its size) if given. The last file stays open, because
        the next tensor is mostly in it.
        """
        self.spec(name)  # for its error, which names the folder
        path = self._specs[name][1]
        if self._open is None or self._open.path != path:
            self.close()
            self._open = _opened(path)
        return self._open.tensor(name, buffer)

    def close(self) -> None:
        """Release the open file."""
        if self._open is not None:
            self._open.close()
            self._open = None


def copy_side_files(source: Path, target: Path, *, dtype: torch.dtype | None = None, critic: bool = False) -> None:
    """Copy config.json (with another dtype, if given, and for a critic the architecture of one), and every file of the
    folder that holds no weights: tokenizer, chat templates, generation settings, remote code, licence, model card.
    """
    config = read_json(source / "config.json")
    if critic:
        config = as_critic(config)
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name of `dtype`: the two would differ
        config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ignored = shutil.ignore_patterns(*_WEIGHTS, *_OTHER_FOLDERS)
    names = sorted(path.name for path in source.iterdir())
    for name in set(names) - ignored(str(source), names) - {"config.json"}:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
        elif _is_side_folder(source / name, target):
            shutil.copytree(source / name, target / name, ignore=ignored, dirs_exist_ok=True)


def _is_side_folder(folder: Path, target: Path) -> bool:
    """Whether a folder holds code or templates of the model: it has no weights and is not the target."""
    if target.resolve().is_relative_to(folder.resolve()):
        return False
    # .metadata is in every torch_dist checkpoint.
    return not any(path.match(pattern) for path in folder.rglob("*") for pattern in (*_WEIGHTS, ".metadata"))


def _opened(path: Path) -> SafetensorsFile | TorchFile:
    return TorchFile(path) if path.suffix == ".bin" else SafetensorsFile(path)


def write_known_tensors(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    *,
    shard_bytes: int,
    on_file: Callable[[Path], object] = lambda path: None,
) -> None:
    """Write shards and index of tensors that come in the order of `specs`. Peak memory: one tensor. `on_file` is called
    with each shard when it is complete, but not yet synced to disk.
    """
    shards = list(split_files(specs, shard_bytes, lambda one, other: stack_name(one.name) == stack_name(other.name)))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with SafetensorsWriter(folder / name, shard) as writer:
            for _ in shard:
                writer.add(*next(tensors))
        on_file(folder / name)
        weight_map |= {stack_name(spec.name): name for spec in shard}
    if len(shards) > 1:
        _write_index(folder, weight_map, sum(spec.num_bytes for spec in specs))


def write_hf_folder(
    target: str | Path,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    like: str,
    dtype: str,
    critic: bool = False,
    shard_bytes: int = 4 << 30,
) -> None:
    """Stream tensors whose names and shapes are not known beforehand into a folder with the configuration (of a critic:
    with its head) and tokenizer of `like`. Peak memory: one shard, or the experts of a layer where they are one tensor.
    `dtype` is a torch name.
    """
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    before = ""

    def flush() -> None:
        nonlocal pending, pending_bytes
        # The final name holds the number of shards, which is known at the end.
        path = folder / f"part-{len(shards):05d}.safetensors"
        sorted_names = by_stack(pending)
        specs = [TensorSpec(name=n, shape=tuple(pending[n].shape), dtype=pending[n].dtype) for n in sorted_names]
        with SafetensorsWriter(path, specs) as writer:
            for name in sorted_names:
                writer.add(name, pending[name])
        shards.append((path, [stack_name(name) for name in sorted_names]))
        pending, pending_bytes = {}, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        # The stacks of a layer come mixed, expert by expert, with nothing else between them.
        layer = name.partition(".experts.")[0] if stack_name(name) != name else ""
        if pending and pending_bytes + size > shard_bytes and not (layer and layer == before):
            flush()
        before = layer
        pending[name] = tensor.detach().cpu().contiguous().clone()
        pending_bytes += size
        total_bytes += size
    flush()
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        final = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(shards) > 1:
        _write_index(folder, weight_map, total_bytes)
    copy_side_files(Path(like), folder, dtype=getattr(torch, dtype), critic=critic)


def _write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
