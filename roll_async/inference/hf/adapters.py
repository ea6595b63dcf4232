"""Low-rank adapters beside the weights of a Transformers model: a layer answers W x + B (A x)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from roll_async.checkpoint.lora_targets import ADAPTER_HALVES, adapter_half
from roll_async.inference.hf.weights import saved_name
from roll_async.weight_sync.adapters import AdapterShape


def add_adapters(model: nn.Module, shape: AdapterShape) -> dict[str, Tensor]:
    """Put an adapter of zeros on every layer that has one; its halves by their names in a push. Copying into one
    changes the model. Raises ValueError when a layer that should have one is no plain linear layer, or not there.
    """
    halves: dict[str, Tensor] = {}
    found: set[str] = set()
    for place, layer in model.named_modules():
        path = saved_name(place)
        kind = path.rpartition(".")[2]
        if kind not in shape.layers or path.startswith("visual."):  # a tower has layers of the same names
            continue
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"weight_sync.adapters: {path} is a {type(layer).__name__}; use merged")
        a = layer.weight.new_zeros(shape.rank, layer.in_features)
        b = layer.weight.new_zeros(layer.out_features, shape.rank)
        layer.register_forward_hook(_adding(a, b))
        halves |= {adapter_half(f"{path}.weight", half): x for half, x in zip(ADAPTER_HALVES, (a, b), strict=True)}
        found.add(kind)
    if missing := set(shape.layers) - found:
        raise ValueError(f"weight_sync.adapters: the model has no layer {sorted(missing)[0]}; use merged")
    return halves


def _adding(a: Tensor, b: Tensor):  # noqa: ANN202 (a forward hook)
    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(inputs[0], a), b)

    return add
