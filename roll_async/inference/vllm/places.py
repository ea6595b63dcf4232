"""Where the tensors of a push go in vLLM's model, learned from a push that vLLM loads itself.

To load a tensor vLLM looks up its name and calls the parameter's loader twice, the first time to count. That takes 0.3
ms, and a mixture of experts has tens of thousands of tensors, while the engine is paused. But the places are the same
at every push: `WriteRecorder` notes what the loaders write where, and `WeightWritePlan` writes it again. What follows
when a layer is complete (packing, quantization, the copy into the tensors that are served) stays vLLM's.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

_COPY, _FILL, _ZERO = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default


@dataclass(frozen=True, slots=True)
class _Region:
    """Part of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements before its first one."""

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> _Region | None:
        """None when it is no part of `whole`."""
        if _storage(part) != _storage(whole) or part.dtype != whole.dtype or not whole.is_contiguous():
            return None
        offset = part.storage_offset() - whole.storage_offset()
        last = offset + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        return cls(tuple(part.shape), part.stride(), offset) if 0 <= offset <= last < whole.numel() else None

    def within(self, whole: Tensor) -> Tensor:
        """The part, as a view."""
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _Write:
    """What a loader writes into a parameter: a part of the tensor that it is given, or a number."""

    layer: nn.Module
    parameter: str
    target: _Region
    source: _Region | float

    def repeat(self, tensor: Tensor) -> None:
        # By name: a reload gives the layer other parameter objects.
        target = self.target.within(getattr(self.layer, self.parameter).data)
        if isinstance(self.source, _Region):
            target.copy_(self.source.within(tensor))
        else:
            target.fill_(self.source)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was made of one tensor."""

    shape: torch.Size
    dtype: torch.dtype
    writes: tuple[_Write, ...]


@dataclass(frozen=True, slots=True)
class _Noted:
    """What was written to one place."""

    name: str
    """Of the tensor that was being loaded."""
    address: int
    """Of what was copied."""
    source: _Region | float


class WriteRecorder(TorchDispatchMode):
    """Notes what loaders write while vLLM loads a push. Made when the model is open for a reload."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners = {_storage(buffer): None for buffer in model.buffers()}
        self._owners |= {
            _storage(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer.named_parameters(recurse=False)
        }
        # Held, so that no other storage gets the address of one.
        self._held = [tensor.untyped_storage() for tensor in (*model.buffers(), *model.parameters())]
        self._tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._writes: dict[tuple[nn.Module, str, _Region], _Noted] = {}
        self._name, self._tensor = "", torch.empty(0)
        self._unknown = ""

    def watched(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, for vLLM to load them while this mode is on."""
        for self._name, self._tensor in tensors:
            self._tensors[self._name] = self._tensor.shape, self._tensor.dtype
            yield self._name, self._tensor
        self._tensor = torch.empty(0)  # what is written after this is no part of a pushed tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 (torch's signature)
        if func._schema.is_mutable and not self._unknown:
            given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            if any(_storage(tensor) in self._owners for tensor in given) and not self._noted(func, args):
                self._unknown = f"{func} with {self._name}"  # one such write is enough to leave all pushes to vLLM
        return func(*args, **(kwargs or {}))

    def _noted(self, func: torch._ops.OpOverload, args: tuple) -> bool:
        """False: what is written cannot be repeated with other values."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        if func not in (_COPY, _FILL, _ZERO):
            return False
        if args[0].numel() == 0:  # the padding of a vocabulary that needs none
            return True
        address = args[1].data_ptr() if func is _COPY else 0
        if address != 0 and address == args[0].data_ptr():  # onto itself
            return True
        if (owner := self._owners.get(_storage(args[0]))) is None or is_deferred_attention_layer(owner[0]):
            return False
        layer, parameter = owner
        if (target := _Region.of(args[0], getattr(layer, parameter))) is None:
            return False
        if func is _COPY:
            source = _Region.of(args[1], self._tensor)
        else:
            source = float(args[1]) if func is _FILL else 0.0
        before = self._writes.get((layer, parameter, target))
        if source is None:  # vLLM makes no second tensor of a bias, and so loads it twice
            return address != 0 and before is not None and before.address == address
        self._writes[layer, parameter, target] = _Noted(self._name, address, source)
        return before is None or before.name == self._name  # of two tensors for one place the order would decide

    def places(self) -> WeightWritePlan | None:
        """What was noted; None when something cannot be repeated."""
        if self._unknown:
            logger.info("Parameter sync: vLLM looks up the tensors of every push: %s", self._unknown)
            return None
        writes = defaultdict(list)
        for place, noted in self._writes.items():
            writes[noted.name].append(_Write(*place, noted.source))
        return WeightWritePlan({name: _Loaded(*form, tuple(writes[name])) for name, form in self._tensors.items()})


class WeightWritePlan:
    """Loads pushes of the tensors that a recorded one had. One push at a time."""

    def __init__(self, loaded: dict[str, _Loaded]) -> None:
        self._loaded = loaded
        self._expected = Counter(layer for tensor in loaded.values() for layer in _layers(tensor))
        self._left: Counter[nn.Module] = Counter()

    def begin(self) -> None:
        """The model is open for a reload."""
        self._left = Counter(self._expected)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises RuntimeError for a tensor that the recorded push did not have, or not in this form."""
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        for name, tensor in tensors:
            known = self._loaded.get(name)
            if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise RuntimeError(f"{name} {list(tensor.shape)} {tensor.dtype} was not in the push before")
            layers = _layers(known)
            for layer in layers:
                if self._left[layer] == self._expected[layer]:  # its first tensor: until now it has no memory
                    materialize_layer(layer, get_layerwise_info(layer))
            self.write(name, tensor)
            self._left.subtract(layers)
            for layer in layers:
                if self._left[layer] == 0:
                    _layerwise_process(layer, get_layerwise_info(layer))

    def write(self, name: str, tensor: Tensor) -> None:
        """Into the parameters as they are."""
        for write in self._loaded[name].writes:
            write.repeat(tensor)

    @property
    def incomplete(self) -> set[nn.Module]:
        """Layers that lack tensors."""
        return {layer for layer, left in self._left.items() if left}


def _storage(tensor: Tensor) -> int:
    """What views of one tensor have in common, also on the meta device."""
    return tensor.untyped_storage()._cdata


def _layers(tensor: _Loaded) -> set[nn.Module]:
    return {write.layer for write in tensor.writes}
