"""Hugging Face checkpoint folders: read tensors lazily, write shards with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from roll_async.checkpoint.hf_config import HfConfig

_SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "added_tokens.json", "tokenizer.model",
)  # fmt: skip


class HfFolder:
    """Reads one checkpoint. Raises ValueError naming the file for what is missing or unreadable."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{folder} is not a Hugging Face checkpoint folder: config.json is missing")
        try:
            values = json.loads((self.path / "config.json").read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / 'config.json'} is truncated or not JSON: {error}") from error
        self.config = HfConfig(values, str(self.path / "config.json"))
        self._file_of = self._read_index()

    def _read_index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{self.path} holds neither model.safetensors nor model.safetensors.index.json")
        try:
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise ValueError(f"{single} is truncated or not a safetensors file: {error}") from error

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """One tensor, read on demand."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise ValueError(f"{self.path} has no tensor {name}")
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)


def write_hf_folder(
    target: str, tensors: Iterator[tuple[str, Tensor]], *, like: str, dtype: str, shard_bytes: int = 4 << 30
) -> None:
    """Stream tensors into a folder with the configuration and tokenizer of `like`. Peak memory: one shard. `dtype` is
    a torch name.
    """
    from safetensors.torch import save_file

    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        path = folder / f"part-{len(shards):05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending, pending_bytes = {}, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > shard_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous().clone()
        pending_bytes += size
        total_bytes += size
    flush()
    weight_map = {}
    for number, (path, names) in enumerate(shards, 1):
        final = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads((Path(like) / "config.json").read_text())
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in _SIDE_FILES:
        if (Path(like) / name).is_file():
            shutil.copyfile(Path(like) / name, folder / name)
