"""The bytes of a tensor, without numpy, which a minimal installation of torch lacks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The data of a tensor on the CPU, uint8 [num_bytes]; not copied if it is contiguous and on the CPU already."""
    # view(-1) first: a scalar cannot be viewed as numbers of another size.
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    window = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    window.tensor = flat  # pyright: ignore[reportAttributeAccessIssue]  # the view keeps the memory it looks at
    return memoryview(window).cast("B")
