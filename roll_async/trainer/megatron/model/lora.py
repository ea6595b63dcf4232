"""Low-rank adapters on Megatron's linear layers: W x + scale * up (down x), where only up and down train.

The adapter is a path of its own beside W, and its halves are float32 whatever W is: the sum W + scale * up @ down in
bfloat16 would be W again for most elements of a small adapter. Both paths meet in the accumulator of one product, so
that what the layer answers is rounded once. What a layer does with its input and output under tensor, sequence and
expert parallelism stays as it is; the half of an adapter that every tensor rank holds whole gets its gradient summed
over them once a step (`sum_shared_gradients`). The base policy is the same layer with the adapter off.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from roll_async.checkpoint.lora_targets import ALL_LINEAR, target_layers
from roll_async.trainer.megatron.ranks import rng_tracker

ADAPTER = ".adapter."
"""In the names of an adapter's parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Which layers get adapters, and how large."""

    rank: int
    alpha: float
    """The scale is alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
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
        self.group = group
        self.columns = isinstance(layer, ColumnParallelLinear)
        """Whether tensor ranks split the layer's outputs, and `up` with them; otherwise its inputs, and `down`."""
        self._scale = settings.alpha / settings.rank
        self._dropout = settings.dropout
        self._shares_input = self.columns and (layer.is_expert or not layer.config.sequence_parallel)
        self.on = True
        whole = in_size if self.columns else in_size * group.size()
        # The same numbers in every layout, from the layer's name in the whole model.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        # As PEFT begins: kaiming_uniform_(a=sqrt(5)), whose bound is 1 / sqrt(in).
        down = (torch.rand(settings.rank, whole, generator=generator) * 2 - 1) / math.sqrt(whole)
        if not self.columns:
            down = down.chunk(group.size(), 1)[group.rank()]
        self.down = torch.nn.Parameter(down.contiguous())
        # Zeros: the run begins with the base model.
        self.up = torch.nn.Parameter(torch.zeros(out_size, settings.rank))
        for parameter in (self.down, self.up):
            # Gradients of experts are summed over data-parallel groups of their own.
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
        cut, cut_dim = (self.up, 0) if self.columns else (self.down, 1)
        cut.tensor_model_parallel = True  # type: ignore[attr-defined]
        cut.partition_dim, cut.partition_stride = cut_dim, 1  # type: ignore[attr-defined]
        if group.size() == 1:
            # Of experts that tensor ranks do not split: the gradient norm is that of each rank's own, and would lack
            # this half on all but the first, so that ranks clipped copies of a dense layer's half unequally.
            self.shared.tensor_model_parallel = True  # type: ignore[attr-defined]

    @property
    def shared(self) -> torch.nn.Parameter:
        """The half that every rank of the group holds whole. Each computes its share of the gradient."""
        return self.down if self.columns else self.up

    @torch.no_grad()
    def delta(self) -> Tensor:
        """float32, what is added to this rank's weight on export."""
        return self._scale * (self.up @ self.down)

    @torch.no_grad()
    def halves(self, *, scaled: bool) -> tuple[Tensor, Tensor]:
        """float32, this rank's `down` and `up`; `scaled`: scale * `up`, whose product with the former is `delta`."""
        return self.down.detach(), self._scale * self.up if scaled else self.up.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., rank] of the layer's input [..., in]; in a training step without what dropout leaves out."""
        if self._dropout and self.training:
            x = self._dropped(x)
        return x @ self.down.to(x.dtype).t()

    def added_to_product(self, x: Tensor, weight: Tensor, low: Tensor) -> Tensor:
        """[..., out] of weight @ x + scale * up @ low, rounded once."""
        delta = low.flatten(0, -2) @ (self._scale * self.up).to(low.dtype).t()
        return torch.addmm(delta, x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    def _dropped(self, x: Tensor) -> Tensor:
        """Ranks that hold the same input drop the same; where each holds a part of it, each draws for itself."""
        if self._shares_input:
            return torch.nn.functional.dropout(x, self._dropout)
        with rng_tracker().fork():
            return torch.nn.functional.dropout(x, self._dropout)


class _Adapted:
    """Mixed into a layer's class: between what the layer does with its input and its output, the product is ours."""

    adapter: Adapter
    gated: bool

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **others: object,
    ) -> Tensor:
        """The layer's product. Names as Megatron's layers call it: `allreduce_dgrad` where ranks hold the same input,
        `sequence_parallel` where each holds its positions.
        """
        adapter = self.adapter
        if not adapter.on:
            more = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
            return super()._forward_impl(input=input, weight=weight, bias=bias, **more, **others)  # type: ignore[misc]
        if allreduce_dgrad:
            # Identity; its backward sums over the ranks, which the layer's own product would do.
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        # Before positions are gathered: what is kept for the backward pass is this rank's share of them.
        # Called as a module: with overlap_param_gather, Megatron waits there for the shards of other ranks.
        low = adapter(input)
        if sequence_parallel:
            input, low = (gather_from_sequence_parallel_region(x, group=tp_group) for x in (input, low))
        output = adapter.added_to_product(input, weight, low)
        return output if bias is None else output + bias

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
            # Gate and up are one weight, of which each rank has a slice of both.
            parts = {name: apply_swiglu_sharded_factory(part, sharded_offsets) for name, part in parts.items()}
        return {**content, **parts}


def add_adapters(module: torch.nn.Module, settings: LoraSettings, name_of: dict[str, str]) -> set[str]:
    """Freeze a model part and give its target layers adapters; the kinds of layers (linear_qkv, ...) that took one.
    `name_of`: name in the whole model by local name of each layer's weight. Raises ValueError for unknown targets.
    """
    module.requires_grad_(False)
    found: set[str] = set()
    wanted = target_layers(settings.targets)
    for name, layer in list(module.named_modules()):
        if f"{name}.weight" not in name_of or not name.startswith("decoder."):
            continue
        if wanted is None or name.rpartition(".")[2] in wanted:
            # Norms, routers and latent attention's down projections, which tensor ranks hold whole, take none.
            if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                continue
            layer.adapter = Adapter(layer, settings, name_of[f"{name}.weight"])
            layer.gated = name.endswith("linear_fc1") and layer.config.gated_linear_unit  # type: ignore[assignment]
            # A class of the layer's own, which is all that Python asks for; the checker wants the very same one.
            layer.__class__ = type(f"Adapted{type(layer).__name__}", (_Adapted, type(layer)), {})  # pyright: ignore[reportAttributeAccessIssue]
            found.add(name.rpartition(".")[2])
    return found


def adapter_of(module: torch.nn.Module, parameter_name: str) -> Adapter | None:
    """The adapter that adds to a parameter, if any."""
    path, _, last = parameter_name.rpartition(".")
    layer = module.get_submodule(path)
    return layer.adapter if last == "weight" and isinstance(layer, _Adapted) else None


def sum_shared_gradients(modules: Sequence[torch.nn.Module]) -> None:
    """Sum the gradients of halves that tensor ranks share, group by group in one message. Collective."""
    gradients: dict[dist.ProcessGroup, list[Tensor]] = {}
    for adapter in _adapters(modules):
        if adapter.group.size() > 1 and adapter.shared.requires_grad:
            # `main_grad`: Megatron's flat buffer, into which the hooks of its DDP add.
            gradients.setdefault(adapter.group, []).append(adapter.shared.main_grad)  # type: ignore[attr-defined]
    for group, parts in gradients.items():
        whole = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(whole, group=group)
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def _adapters(modules: Sequence[torch.nn.Module]) -> list[Adapter]:
    return [m for module in modules for m in module.modules() if isinstance(m, Adapter)]


@contextmanager
def adapters_off(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, the model is the one the adapters were put on."""
    adapters = _adapters(modules)
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True
