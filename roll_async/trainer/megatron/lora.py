"""Low-rank adapters on Megatron's linear layers: W + scale * up @ down, where only up and down train.

The sum is formed on the weights, not on the activations: any parallel layout of the layer stays as it is, the exported
weight is exactly the one the forward pass used, and the base policy is the same layer with the adapter off. Only with
dropout a training step runs the layer twice, once with W and once, on the dropped input, with the adapter's part.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from roll_async.trainer.megatron.ranks import rng_tracker

ADAPTER = ".adapter."
"""In the names of an adapter's parameters."""

_ALL = "all-linear"
# Hugging Face names of what Megatron keeps in one layer: an adapter covers all of them or none.
_FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Which layers get adapters, and how large."""

    rank: int
    alpha: float
    """The scale is alpha / rank."""
    targets: tuple[str, ...] = (_ALL,)
    """`all-linear`, or names of layers: q_proj, k_proj and v_proj together, o_proj, gate_proj and up_proj together,
    down_proj."""
    dropout: float = 0.0
    """Share of an adapter's inputs that a training step leaves out; the others count 1 / (1 - dropout)."""


class Adapter(torch.nn.Module):
    """The low-rank part of one linear layer, cut as the layer's weight is."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear, settings: LoraSettings, name: str) -> None:
        super().__init__()
        weight, group = layer.weight, layer.tp_group
        assert weight is not None and isinstance(group, dist.ProcessGroup)
        out_size, in_size = weight.shape
        self._columns = isinstance(layer, ColumnParallelLinear)
        self._group = group
        self._scale = settings.alpha / settings.rank
        self.dropout = settings.dropout
        self._shares_input = self._columns and (layer.is_expert or not layer.config.sequence_parallel)
        self.on = True
        whole = in_size if self._columns else in_size * self._group.size()
        # The same numbers in every layout, from the layer's name in the whole model.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        down = (torch.rand(settings.rank, whole, generator=generator) * 2 - 1) / math.sqrt(whole)
        if not self._columns:
            down = down.chunk(self._group.size(), 1)[self._group.rank()]
        self.down = torch.nn.Parameter(down.to(weight.dtype).contiguous())
        self.up = torch.nn.Parameter(torch.zeros(out_size, settings.rank, dtype=weight.dtype))
        for parameter in (self.down, self.up):
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        cut, cut_dim = (self.up, 0) if self._columns else (self.down, 1)
        cut.tensor_model_parallel = True  # type: ignore[attr-defined]
        cut.partition_dim, cut.partition_stride = cut_dim, 1  # type: ignore[attr-defined]

    def delta(self) -> Tensor:
        """What is added to this rank's weight. The half that every rank holds collects its gradient over them."""
        down, up = self.down, self.up
        if self._group.size() > 1:
            if self._columns:
                down = copy_to_tensor_model_parallel_region(down, self._group)
            else:
                up = copy_to_tensor_model_parallel_region(up, self._group)
        return self._scale * (up @ down)

    def dropped(self, x: Tensor) -> Tensor:
        """The layer's input without the share that dropout leaves out. Ranks that hold the same input drop the same;
        where each holds a part of it, each draws for itself.
        """
        if self._shares_input:
            return torch.nn.functional.dropout(x, self.dropout)
        with rng_tracker().fork():
            return torch.nn.functional.dropout(x, self.dropout)


class _Part(Enum):
    """What a layer with an adapter multiplies with."""

    SUM = "sum"
    BASE = "base"
    DELTA = "delta"


class _Adapted:
    """Mixed into a layer's class: its weight is the sum, its parameters and its place in checkpoints stay."""

    adapter: Adapter
    gated: bool
    part = _Part.SUM

    @property
    def weight(self) -> Tensor:
        base = self._parameters["weight"]  # type: ignore[attr-defined]
        if not self.adapter.on or self.part is _Part.BASE:
            return base
        delta = self.adapter.delta()
        return delta if self.part is _Part.DELTA else base + delta

    @property
    def bias(self) -> Tensor | None:
        return None if self.part is _Part.DELTA else self._parameters["bias"]  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """The layer's (output, bias to be added)."""
        adapter = self.adapter
        if not (adapter.on and adapter.dropout and self.training):  # type: ignore[attr-defined]
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        try:
            self.part = _Part.BASE
            output, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            self.part = _Part.DELTA
            delta, _ = super().forward(adapter.dropped(x), *args, **kwargs)  # type: ignore[misc]
        finally:
            self.part = _Part.SUM
        return output + delta, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, object]:
        """The layer's, with the halves of the adapter cut as they are."""
        content = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        cut = {"adapter.up": 0} if isinstance(self, ColumnParallelLinear) else {"adapter.down": 1}
        own = {name: value for name, value in self.state_dict(prefix="", keep_vars=True).items() if name in cut}  # type: ignore[attr-defined]
        parts = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            cut,
            sharded_offsets,
            tp_group=self.tp_group,  # type: ignore[attr-defined]
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        if self.gated:
            parts = {name: apply_swiglu_sharded_factory(part, sharded_offsets) for name, part in parts.items()}
        return {**content, **parts}


def add_adapters(module: torch.nn.Module, settings: LoraSettings, name_of: dict[str, str]) -> set[str]:
    """Freeze a model part and give its target layers adapters; the kinds of layers (linear_qkv, ...) that took one.
    `name_of`: name in the whole model by local name of each layer's weight. Raises ValueError for unknown targets, and
    for a target that is a layer no adapter fits.
    """
    module.requires_grad_(False)
    found: set[str] = set()
    wanted = target_layers(settings.targets)
    for name, layer in list(module.named_modules()):
        if f"{name}.weight" not in name_of or not name.startswith("decoder."):
            continue
        if wanted is None or name.rpartition(".")[2] in wanted:
            if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                if wanted is not None:
                    raise ValueError(f"LoRA on {name} needs transformer_impl: local")
                continue
            layer.adapter = Adapter(layer, settings, name_of[f"{name}.weight"])
            layer.gated = name.endswith("linear_fc1")  # type: ignore[assignment]
            # A class of the layer's own, which is all that Python asks for; the checker wants the very same one.
            layer.__class__ = type(f"Adapted{type(layer).__name__}", (_Adapted, type(layer)), {})  # pyright: ignore[reportAttributeAccessIssue]
            found.add(name.rpartition(".")[2])
    return found


def target_layers(targets: Sequence[str]) -> set[str] | None:
    """Megatron's layer names; None: every linear layer. Raises ValueError for unknown names and for a part of a fused
    layer.
    """
    if _ALL in targets:
        return None
    layers = set()
    for layer, parts in _FUSED.items():
        named = [part for part in parts if part in targets]
        if named and len(named) < len(parts):
            fused = ", ".join(parts)
            raise ValueError(f"model_args.lora_target: Megatron keeps {fused} in one layer; name all of them or none")
        if named or layer in targets:
            layers.add(layer)
    unknown = set(targets) - {part for parts in _FUSED.values() for part in parts} - set(_FUSED)
    if unknown:
        known = ", ".join([_ALL, *(part for parts in _FUSED.values() for part in parts)])
        raise ValueError(f"model_args.lora_target {sorted(unknown)[0]!r} is not one of {known}")
    return layers


def adapter_of(module: torch.nn.Module, parameter_name: str) -> Adapter | None:
    """The adapter that adds to a parameter, if any."""
    path, _, last = parameter_name.rpartition(".")
    layer = module.get_submodule(path)
    return layer.adapter if last == "weight" and isinstance(layer, _Adapted) else None


@contextmanager
def adapters_off(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, the model is the one the adapters were put on."""
    adapters = [m for module in modules for m in module.modules() if isinstance(m, Adapter)]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True
