"""LoRA adapters merged into weights, W + scale * B A: a run's own, and those in PEFT's format."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.folders.safetensors_files import SafetensorsFile, SafetensorsWriter, TensorSpec
from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half

_LOW_BITS = (1 << 16) - 1
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def merged(weight: Tensor, delta: Tensor, name: str, places: Tensor | None = None) -> Tensor:
    """weight + delta in the weight's dtype; the sum is float32, and bfloat16 is rounded stochastically.

    Rounding to nearest would give back the weight for most elements where delta is small, for every input, so that the
    adapter would be lost. Stochastic rounding is exact on average, so sums over many elements keep the adapter. The
    random number is a function of the tensor's name and the element's position: the same on every device and in every
    layout. `places`: int32, like `weight`, positions of its elements in the whole tensor; None for the whole. Where
    delta is 0 nothing changes.
    """
    exact = weight.float() + delta
    if weight.dtype != torch.bfloat16:
        return exact.to(weight.dtype)
    # bfloat16 is the upper half of a float32: noise in the lower half carries over with the right probability.
    if places is None:
        places = torch.arange(exact.numel(), dtype=torch.int32, device=exact.device).view(exact.shape)
    # crc32, because Python's hash of a string differs from process to process.
    noise = _noise(places, zlib.crc32(name.encode()))
    # Bits are sign and magnitude: noise moves away from 0, for either sign.
    bits = noise.add_(exact.contiguous().view(torch.int32)).bitwise_and_(~_LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def _noise(places: Tensor, seed: int) -> Tensor:
    """int32 like `places`, uniform in [0, 65536): the finaliser of MurmurHash3; products wrap around."""
    # 2^32 over the golden ratio (Knuth's multiplicative hash), for neighbours far apart.
    mixed = places.mul(_signed(0x9E3779B1)).add_(_signed(seed))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        # A shift of int32 keeps the sign: the mask makes it one of unsigned bits.
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return (mixed >> 16).bitwise_and_(_LOW_BITS)


def _signed(bits: int) -> int:
    """32 bits as Python's int of the same bits in int32."""
    return bits - (1 << 32) if bits >> 31 else bits


def write_adapter(folder: Path, halves: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> None:
    """Write an adapter as PEFT does. `halves`: A [rank, in] and B [out, rank], without the scale, by their names
    (`adapter_half`); `base`: the model that it is of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specs = [TensorSpec(name=_PREFIX + name, shape=tuple(x.shape), dtype=x.dtype) for name, x in halves.items()]
    with SafetensorsWriter(folder / _WEIGHTS, specs) as writer:
        for spec, tensor in zip(specs, halves.values(), strict=True):
            writer.add(spec.name, tensor.contiguous())
    # One rank for all: adapter_config.json has one r.
    (rank,) = {len(x) for name, x in halves.items() if name.endswith(adapter_half("", ADAPTER_HALVES[0]))}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        # LAYER in LAYER.lora_A.weight.
        "target_modules": sorted({name.split(".")[-3] for name in halves}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


class LoraAdapter:
    """One adapter. Raises ValueError for kinds of adapter that are no plain LoRA."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        if not (folder / "adapter_config.json").is_file():
            raise ValueError(f"{folder} is not a LoRA adapter: adapter_config.json is missing")
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{folder} is not a LoRA adapter: {_WEIGHTS} is missing")
        try:
            values = json.loads((folder / "adapter_config.json").read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{folder / 'adapter_config.json'} is truncated or not JSON: {error}") from error
        self._config = HfConfig(values, str(folder / "adapter_config.json"))
        self._config.require(peft_type="LORA", use_dora=False, fan_in_fan_out=False, bias="none", lora_bias=False)
        self._file = SafetensorsFile(folder / _WEIGHTS)
        self._names = {spec.name for spec in self._file.specs()}
        self._used: set[str] = set()

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The tensor called `name` in the base model, with the adapter's part; itself where the adapter has none.

        Computed in float32 and rounded once. A tensor the adapter holds in full (modules_to_save) takes its place.
        """
        whole = _PREFIX + name
        if whole in self._names:
            self._used.add(whole)
            return self._file.tensor(whole).to(weight.dtype)
        module = whole.removesuffix(".weight")
        down, up = (adapter_half(whole, half) for half in ADAPTER_HALVES)
        if down not in self._names or not name.endswith(".weight"):
            return weight
        if up not in self._names:
            raise ValueError(f"{self.path / _WEIGHTS} has {down} without lora_B")
        self._used |= {down, up}
        a, b = self._file.tensor(down).float(), self._file.tensor(up).float()
        if (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise ValueError(f"{self.path / _WEIGHTS}: {down} and lora_B do not fit {name} {tuple(weight.shape)}")
        # The rank is that of the half itself, so PEFT's rank_pattern need not be read.
        return torch.addmm(weight.float(), b, a, alpha=self._scale(module, rank=a.shape[0])).to(weight.dtype)

    def half(self, name: str) -> Tensor:
        """One half, by its name without PEFT's prefix."""
        return self._file.tensor(_PREFIX + name)

    def check_all_used(self) -> None:
        """Raises ValueError naming a tensor that belongs to no weight of the model."""
        left = sorted(self._names - self._used)
        if left:
            raise ValueError(
                f"{self.path / _WEIGHTS}: {left[0]} fits no weight of the model ({len(left)} such tensors)"
            )

    def _scale(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters."""
        alpha = self._config.number("lora_alpha")
        for pattern, value in self._config.section("alpha_pattern").values.items():
            # As PEFT matches the keys of alpha_pattern.
            if re.match(rf"(.*\.)?{pattern}$", module):
                assert isinstance(value, int | float)
                alpha = float(value)
                break
        return alpha / rank**0.5 if self._config.flag("use_rslora") else alpha / rank
