"""Weights that vLLM's CPU build packs for its kernels. A reload as it is leaves a tied output layer at the old weights,
because it gets no tensor of its own, and experts in the wrong order, because they are packed at the first load only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def unpack(model: nn.Module) -> None:
    """Before a reload: experts whose packed form is padded get the shape that they are loaded in."""
    for layer, _ in _experts(model):
        for name, parameter in _as_loaded(layer).items():
            if getattr(layer, name).shape != parameter.shape:
                plain = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(layer, name, nn.Parameter(plain, requires_grad=False))


def pack(model: nn.Module) -> None:
    """After a reload."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer, kernel in _experts(model):
        kernel.process_weights_after_loading(layer)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and not module.weight.is_cuda:
            module.quant_method.process_weights_after_loading(module)


def packed_bytes(module: nn.Module) -> int:
    """Weights of a linear layer that are held in packed form alone, out of sight of torch."""
    weight = module._parameters.get("weight")
    # With elements it is counted as a parameter.
    if "cpu_linear" not in vars(module) or weight is None or weight.numel():
        return 0
    return _as_loaded(module)["weight"].nbytes


def _as_loaded(layer: nn.Module) -> Mapping[str, Tensor]:
    """Parameters of a layer in the shape that weights are loaded into, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer).restore_metadata[0]


def _experts(model: nn.Module) -> Iterator[tuple[nn.Module, CPUUnquantizedExperts]]:
    """Layers of experts, and what computes each."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            kernel = layer.quant_method.moe_kernel
            if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
                yield layer, kernel.fused_experts
