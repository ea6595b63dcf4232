"""Hugging Face checkpoints to Megatron's torch_dist format and back, one tensor in memory at a time.

Neither Megatron nor a GPU is needed: both formats hold whole tensors, and the family's rows say how they correspond. A
torch_dist checkpoint does not depend on the parallel layout: it loads under any, and one saved under any can be read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from roll_async.checkpoint.folders.find_model import HF_FILES, hf_files_of, torch_dist_in
from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.folders.hf_folder import HfFolder, copy_side_files, write_known_tensors
from roll_async.checkpoint.folders.manifest import recorded_alpha, replaced, sync
from roll_async.checkpoint.folders.megatron_folder import MegatronFolder, Piece, write_megatron_folder
from roll_async.checkpoint.folders.safetensors_files import TensorSpec
from roll_async.checkpoint.folders.stored_keys import StoredKey, extra_states, is_parameter, key_to_write, keys_to_read
from roll_async.checkpoint.hf_names.families import family_for, is_tied
from roll_async.checkpoint.hf_names.table import Family, Match, ModelShape, Transform, shape_of
from roll_async.checkpoint.hf_names.value_head import VALUE_HEAD, has_value_head
from roll_async.checkpoint.lora import LoraAdapter, merged, write_adapter
from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half
from roll_async.checkpoint.tower import tower_shapes
from roll_async.checkpoint.transforms import HeadLayout, rows_of_hf, to_hf, to_megatron

_UP, _DOWN = ".adapter.up", ".adapter.down"

Progress = Callable[[int, int], None]
"""Called with the bytes of each converted tensor, and of all tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionOptions:
    """Options of both directions."""

    dtype: torch.dtype | None = None
    """dtype of the result; None keeps that of each tensor."""
    adapter: Path | None = None
    """A PEFT LoRA adapter to merge into the weights."""
    lora_alpha: float | None = None
    """Merge the adapters that a Megatron folder holds with this alpha; None: with the one its run recorded."""
    file_bytes: int = 4 << 30
    """Files are closed before they grow beyond this."""
    progress: Progress = lambda num_bytes, total: None
    check: Callable[[Path], object] = lambda folder: None
    """Called with the whole result before it gets its name; if it raises, nothing is left of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Description of the tensors, from config.json."""

    family: Family
    shape: ModelShape
    fields: Mapping[str, object]
    """Fields of Megatron's config besides those of every decoder."""
    config: HfConfig
    heads: HeadLayout
    tied: bool
    critic: bool
    """The model has a value head instead of the output layer."""

    @classmethod
    def of(cls, config: HfConfig) -> _Model:
        family = family_for(config)
        fields = family.fields(config)
        return cls(
            family=family,
            shape=shape_of(config.integer("num_hidden_layers"), fields),
            fields=fields,
            config=config,
            heads=HeadLayout.of(config),
            tied=is_tied(config),
            critic=has_value_head(config.architecture()),
        )

    def parameters(self) -> Iterator[Match]:
        """All parameters that a checkpoint of this config holds. A tied output layer is the embedding, a critic's is
        its value head; biases are in every layer or in none.
        """
        if self.family.reads_images:
            yield from map(self.family.match, tower_shapes(self.config))
        for match in self.family.parameters(self.shape):
            # The output layer and the value head have the same name in Megatron.
            if match.name != VALUE_HEAD.name:
                if match.row.is_needed(self.fields):
                    yield match
            elif self.critic:
                yield VALUE_HEAD
            elif not self.tied:
                yield match


class MegatronAsHf:
    """A Megatron checkpoint as Hugging Face tensors, converted one at a time on demand.

    A run with `model_args.lora_rank` stores each adapter beside its weight, as `adapter.up` [out, rank] and
    `adapter.down` [rank, in]; they are merged, with the alpha in the manifest of the checkpoint or, without one, the
    `lora_alpha` given.
    """

    def __init__(self, folder: Path, config: HfConfig, lora_alpha: float | None = None) -> None:
        self._source, self._model = MegatronFolder(folder), _Model.of(config)
        self._found: list[tuple[Match, StoredKey]] = []
        keys = {key for key in self._source.keys() if is_parameter(key)}
        self._adapters = {key for key in keys if key.endswith((_UP, _DOWN))}
        self._alpha = self._known_alpha(folder, lora_alpha)
        keys -= self._adapters
        for match in self._model.parameters():
            stored = next((k for k in keys_to_read(match, self._model.shape) if self._fits(k, keys)), None)
            if stored is None:
                raise ValueError(f"{folder} has no {match.name}, which a {self._model.family.name} model needs")
            self._found.append((match, stored))
        weights = {stored.key for _, stored in self._found}
        beside = {
            key.removesuffix(suffix) + ".weight"
            for key in self._adapters
            for suffix in (_UP, _DOWN)
            if key.endswith(suffix)
        }
        # An adapter beside a weight that this model lacks would be left out without a word.
        unknown = sorted((keys - weights) | (beside - weights))
        if unknown:
            raise ValueError(f"{folder}: {unknown[0]} has no Hugging Face name ({len(unknown)} such tensors)")

    def _known_alpha(self, folder: Path, given: float | None) -> float | None:
        if not self._adapters:
            if given is not None:
                raise ValueError(f"{folder} holds no LoRA adapters: --lora-alpha has no effect; leave it out")
            return None
        recorded = recorded_alpha(folder)
        if recorded is None and given is None:
            raise ValueError(f"{folder} holds LoRA adapters: pass --lora-alpha, model_args.lora_alpha of the run")
        if recorded is not None and given not in (None, recorded):
            raise ValueError(f"{folder}: --lora-alpha {given:g} is not the run's {recorded:g}; leave it out")
        return given if recorded is None else recorded

    @property
    def has_adapters(self) -> bool:
        """Whether the tensors differ from the stored ones."""
        return bool(self._adapters)

    def _fits(self, stored: StoredKey, keys: set[str]) -> bool:
        # The key alone would also fit a model of another number of layers or experts.
        return stored.key in keys and self._source.shape(stored.key)[: len(stored.index)] == stored.stack

    def specs(self, dtype: torch.dtype | None) -> list[TensorSpec]:
        """Names, shapes and dtypes, in the order of `tensors`."""
        specs = []
        for match, stored in self._found:
            own = self._source.dtype(stored.key)
            kept = own if dtype is None or match.row.float32 else dtype
            shape = self._source.shape(stored.key)[len(stored.index) :]
            shape = shape[::-1] if match.row.transform.transposes else shape
            rows = self._rows(match, shape)
            specs += [
                TensorSpec(name=name, shape=(n, *shape[1:]), dtype=kept)
                for name, n in zip(match.hf_names, rows, strict=True)
            ]
        return specs

    def _rows(self, match: Match, shape: tuple[int, ...]) -> list[int]:
        """First dimension of each HF tensor."""
        if match.row.transform.groups_heads:
            return [sum(rows) for rows in rows_of_hf(match.row, self._model.heads)]
        return [shape[0] // len(match.hf_names)] * len(match.hf_names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and tensor, each in the dtype it is stored in."""
        for match, stored in self._found:
            full = self._merged(self._source.tensor(stored.key, stored.index), stored, match.hf_names[0])
            yield from zip(match.hf_names, to_hf(match.row, full, self._model.heads), strict=True)

    def _merged(self, weight: Tensor, stored: StoredKey, name: str) -> Tensor:
        """The weight with the run's adapter merged as the run's own export does it. `name`: the tensor's first name in
        the exported folder.
        """
        halves = self._halves(stored)
        if halves is None:
            return weight
        down, up = halves
        return merged(weight, self.alpha / down.shape[0] * (up.float() @ down.float()), name)

    def _halves(self, stored: StoredKey) -> tuple[Tensor, Tensor] | None:
        """A [rank, in] and B [out, rank] of a weight's adapter, B without the scale."""
        layer = stored.key.removesuffix(".weight")
        if layer + _UP not in self._adapters:
            return None
        return self._source.tensor(layer + _DOWN, stored.index), self._source.tensor(layer + _UP, stored.index)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The halves alone, by their names as PEFT has them."""
        for match, stored in self._found:
            if (halves := self._halves(stored)) is not None:
                down, up = halves
                for name, part in zip(match.hf_names, to_hf(match.row, up, self._model.heads), strict=True):
                    yield from zip((adapter_half(name, half) for half in ADAPTER_HALVES), (down, part), strict=True)

    @property
    def alpha(self) -> float:
        """Of the adapters."""
        assert self._alpha is not None
        return self._alpha


def hf_to_megatron(source: Path, target: Path, options: ConversionOptions) -> list[str]:
    """Write `target`; returns the names of tensors that were left out. Raises ValueError for what cannot be converted,
    OSError when the disk is full; in both cases nothing is left under `target`.
    """
    folder = HfFolder(source)
    model = _Model.of(folder.config)
    unused = _check_names(folder, model)
    adapter = LoraAdapter(options.adapter) if options.adapter else None
    pieces, matches, objects = [], {}, []
    for match in model.parameters():
        piece = _piece(match, folder, model, options.dtype)
        pieces.append(piece)
        matches[piece.key, piece.index] = match
        objects += extra_states(key_to_write(match, model.shape))

    total = sum(piece.num_bytes for piece in pieces)

    scratch = _Scratch()

    def load(piece: Piece) -> Tensor:
        match = matches[piece.key, piece.index]
        whole, parts = scratch.read(folder, match.hf_names)
        options.progress(piece.num_bytes, total)
        if adapter is not None:
            parts = [adapter.merge(name, part) for name, part in zip(match.hf_names, parts, strict=True)]
        elif match.row.transform in (Transform.COPY, Transform.GATE_UP):
            return whole.to(piece.dtype)  # the concatenated parts are the Megatron tensor
        return to_megatron(match.row, parts, model.heads).to(piece.dtype)

    with _complete(target, total, options.check) as (temporary, on_file):
        # A norm that is fused into a linear layer is named with it: both ask for the state of one module.
        names = list(dict.fromkeys(objects))
        write_megatron_folder(
            temporary, pieces, load, empty_objects=names, file_bytes=options.file_bytes, on_file=on_file
        )
        if adapter is not None:
            # Before the folder gets its name: an error leaves nothing of it.
            adapter.check_all_used()
        (temporary / HF_FILES).mkdir()
        copy_side_files(source, temporary / HF_FILES, dtype=options.dtype)
    return unused


def megatron_to_hf(source: Path, target: Path, options: ConversionOptions, *, like: Path | None = None) -> None:
    """The inverse of `hf_to_megatron`. `like` is a folder with config.json and tokenizer, by default that inside the
    checkpoint.
    """
    folder = torch_dist_in(source)
    files = hf_files_of(folder, like)
    reader = MegatronAsHf(folder, HfFolder(files).config, options.lora_alpha)
    adapter = LoraAdapter(options.adapter) if options.adapter else None
    specs = reader.specs(options.dtype)
    wanted = {spec.name: spec for spec in specs}
    total = sum(spec.num_bytes for spec in specs)

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in reader.tensors():
            merged = tensor if adapter is None else adapter.merge(name, tensor)
            yield name, merged.to(wanted[name].dtype)
            options.progress(wanted[name].num_bytes, total)

    with _complete(target, total, options.check) as (temporary, on_file):
        write_known_tensors(temporary, specs, converted(), shard_bytes=options.file_bytes, on_file=on_file)
        if adapter is not None:
            adapter.check_all_used()
        copy_side_files(files, temporary, dtype=options.dtype)


def write_run_adapter(source: Path, target: Path, options: ConversionOptions, *, like: Path | None = None) -> None:
    """Write the adapter that a run's checkpoint holds, in PEFT's format. Raises ValueError for one without."""
    folder = torch_dist_in(source)
    reader = MegatronAsHf(folder, HfFolder(hf_files_of(folder, like)).config, options.lora_alpha)
    halves = dict(reader.adapters())
    if not halves:
        raise ValueError(f"{folder} holds no LoRA adapter; leave out --adapter-only")
    with _complete(target, sum(x.nbytes for x in halves.values()), options.check) as (temporary, _):
        write_adapter(temporary, halves, alpha=reader.alpha)


def _check_names(folder: HfFolder, model: _Model) -> list[str]:
    """Names of tensors that the family knows and leaves out. Raises ValueError for other tensors outside the model."""
    needed = {name for match in model.parameters() for name in match.hf_names}
    unused, unknown = [], []
    for name in folder.names():
        if name not in needed:
            is_known = (model.tied and name == "lm_head.weight") or model.family.is_unused(name, model.shape.num_layers)
            (unused if is_known else unknown).append(name)
    if unknown:
        raise ValueError(
            f"{folder.path}: {unknown[0]} is unknown to the family {model.family.name} ({len(unknown)} such tensors)"
        )
    return unused


def _spec(name: str, folder: HfFolder, model: _Model) -> TensorSpec:
    """Raises ValueError for a tensor that is missing or that the config's model could not hold."""
    if name not in folder:
        raise ValueError(f"{folder.path} has no tensor {name}, which config.json asks for")
    spec = folder.spec(name)
    hidden = model.config.integer("hidden_size")
    wanted: tuple[int, ...] | None = None
    # Names whose shape is the same in every family; others are compared with their neighbours.
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        wanted = (model.config.integer("vocab_size"), hidden)
    elif name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
        wanted = (hidden,)
    if wanted is not None and spec.shape != wanted:
        raise ValueError(f"{folder.path}: {name} has shape {list(spec.shape)}, config.json says {list(wanted)}")
    return spec


def _piece(match: Match, folder: HfFolder, model: _Model, dtype: torch.dtype | None) -> Piece:
    specs = [_spec(name, folder, model) for name in match.hf_names]
    own = specs[0].dtype
    for spec in specs[1:]:
        if (spec.shape[1:], spec.dtype) != (specs[0].shape[1:], own):
            raise ValueError(f"{folder.path}: {spec.name} and {specs[0].name} do not fit each other in shape and dtype")
    grouped = match.row.transform.groups_heads
    if grouped and [spec.shape[0] for spec in specs] != [sum(rows) for rows in rows_of_hf(match.row, model.heads)]:
        raise ValueError(f"{folder.path}: {specs[0].name} and its neighbours do not have the heads of config.json")
    stored = key_to_write(match, model.shape)
    # A fused Megatron tensor has the rows of all of its HF tensors.
    shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
    return Piece(
        key=stored.key,
        index=stored.index,
        stack=stored.stack,
        shape=shape[::-1] if match.row.transform.transposes else shape,
        dtype=own if dtype is None or match.row.float32 else dtype,
    )


class _Scratch:
    """A buffer that is reused for reading, because fresh pages cost more than the reads."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, folder: HfFolder, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """(concatenation, tensors): tensors that differ at most in their first dimension, along which they are
        concatenated. Valid until the next call.
        """
        specs = [folder.spec(name) for name in names]
        size = sum(spec.num_bytes for spec in specs)
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        buffers = self._bytes[:size].split([spec.num_bytes for spec in specs])
        parts = [folder.tensor(name, buffer) for name, buffer in zip(names, buffers, strict=True)]
        whole = self._bytes[:size].view(specs[0].dtype).reshape(-1, *specs[0].shape[1:])
        return whole, parts


@contextmanager
def _complete(
    target: Path, num_bytes: int, check: Callable[[Path], object]
) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """A folder that gets its final name when all is written and on disk; on any error it is removed. The second value
    is a function that syncs complete files to disk while the next are written.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; choose another target or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ValueError(f"{target} needs {num_bytes / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free")
    with replaced(target) as temporary:
        with ThreadPoolExecutor(1) as disk:
            syncing = []
            yield temporary, lambda path: syncing.append(disk.submit(sync, path))
            for done in syncing:
                # Raises what the sync has raised.
                done.result()
        check(temporary)
