"""Compares a converted checkpoint with its source, tensor by tensor and byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from roll_async.checkpoint.conversion import ConversionOptions, MegatronAsHf
from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.folders.tensor_bytes import bytes_of
from roll_async.checkpoint.lora import LoraAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Digests of both sides."""

    num_tensors: int
    expected: str
    found: str
    differing: tuple[str, ...]
    """Names of tensors that differ."""
    merged_adapters: bool
    """The Megatron checkpoint has adapters, which are merged into the weights of the other."""


def compare(megatron: Path, hf: Path, config: Path, options: ConversionOptions, *, source_is_hf: bool) -> Comparison:
    """Read both checkpoints again, apply the options to the source, compare digests. Needs the memory of one tensor.

    `config` is the folder with config.json. Raises ValueError for a checkpoint that cannot be read or lacks a tensor.
    """
    one, other = MegatronAsHf(megatron, HfFolder(config).config, options.lora_alpha), HfFolder(hf)
    adapter = LoraAdapter(options.adapter) if options.adapter else None

    def pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensor in one.tensors():
            source, target = (other.tensor(name), tensor) if source_is_hf else (tensor, other.tensor(name))
            source = source if adapter is None else adapter.merge(name, source)
            # The conversion may have been asked for another dtype.
            yield name, source.to(target.dtype), target

    return _compared(pairs(), merged_adapters=one.has_adapters)


def compare_adapter(megatron: Path, adapter: Path, config: Path, options: ConversionOptions) -> Comparison:
    """The halves of the adapter that a run's checkpoint holds, and those of a folder in PEFT's format."""
    one, other = MegatronAsHf(megatron, HfFolder(config).config, options.lora_alpha), LoraAdapter(adapter)
    return _compared(((name, x, other.half(name)) for name, x in one.adapters()), merged_adapters=False)


def _compared(pairs: Iterable[tuple[str, Tensor, Tensor]], *, merged_adapters: bool) -> Comparison:
    """`pairs`: name, expected tensor, found tensor."""
    sides = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    differing, count = [], 0
    for name, *pair in pairs:
        digests = [_digest(tensor) for tensor in pair]
        for side, digest in zip(sides, digests, strict=True):
            side.update(name.encode() + digest)
        if digests[0] != digests[1]:
            differing.append(name)
        count += 1
    return Comparison(
        num_tensors=count,
        expected=sides[0].hexdigest(),
        found=sides[1].hexdigest(),
        differing=tuple(differing),
        merged_adapters=merged_adapters,
    )


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).digest()
