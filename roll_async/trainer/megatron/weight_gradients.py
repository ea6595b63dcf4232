"""Weight gradients of linear layers, added to a step's float32 sums by the product that makes them.

Else a product writes a gradient in the model's dtype, and a second kernel reads it and adds: for bf16 12 bytes a
parameter and micro-batch instead of 8, one more launch for each weight, memory for the gradient between the two, and a
rounding to bf16. Megatron leaves that product to an extension of Apex; cuBLAS can do it, too, where torch lets the sum
have another dtype than the factors.
"""

from __future__ import annotations

import logging
from functools import cache
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

logger = logging.getLogger(__name__)


def add_product(inputs: Tensor, gradients: Tensor, sums: Tensor) -> None:
    """`sums` [O,I] += `gradients` [N,O]ᵀ `inputs` [N,I]; sums of bf16 factors may be float32 (on CUDA)."""
    if inputs.dtype == sums.dtype:
        sums.addmm_(gradients.t(), inputs)
    else:
        torch.addmm(sums, gradients.t(), inputs, out_dtype=sums.dtype, out=sums)


TORCH_PRODUCTS = SimpleNamespace(wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
"""By the names of Apex's extension, as Megatron calls it: one for float32 sums, one for sums of 16 bits."""


def use_torch_products() -> None:
    """Megatron's layers of this process find these in the place of Apex's extension."""
    layers.fused_weight_gradient_mlp_cuda = TORCH_PRODUCTS  # pyright: ignore[reportAttributeAccessIssue]
    layers._grad_accum_fusion_available = True


@cache
def fused(device: str) -> bool:
    """Whether products on devices of this kind add to the sums; logged once with the reason."""
    if device != "cuda":
        return False
    if layers._grad_accum_fusion_available:
        logger.info("weight gradients are added in their product (Apex's extension)")
        return True
    if (problem := _problem_of(torch.device(device))) is not None:
        logger.warning("weight gradients are added by a kernel of their own: %s", problem)
        return False
    use_torch_products()
    logger.info("weight gradients are added in their product (torch.addmm)")
    return True


def _problem_of(device: torch.device) -> str | None:
    """Why torch does not add products of bf16 to float32 here; None: it does."""
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    sums = torch.full((16, 16), 1000.5, device=device)
    try:
        add_product(ones, ones, sums)
    except (RuntimeError, TypeError) as error:  # another torch may lack the operator, or take it for other dtypes
        return f"torch {torch.__version__} refuses it ({str(error).splitlines()[0]})"
    # bf16 in between would give 1016.
    return None if bool((sums == 1016.5).all()) else f"torch {torch.__version__} rounds the sum"
