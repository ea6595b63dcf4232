"""Passes over numbers that lie side by side, as a kernel or two each, where Triton is at hand to compile them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


@cache
def compiles(device: str) -> bool:
    """Whether passes on devices of this kind are compiled."""
    if device != "cuda":
        return False
    from torch.utils._triton import has_triton

    if not has_triton():
        logger.warning(
            "log-probs, rotations and SwiGLU run op by op: torch.compile needs Triton, which is not installed"
        )
    return has_triton()


@cache
def compiled(passes: Callable[P, T], device: str) -> Callable[P, T]:
    """A pass in as few kernels as the compiler makes of it; else as it is, op by op."""
    # Once for the first number of rows, once for any: other sizes never change.
    return torch.compile(passes, dynamic=None) if compiles(device) else passes
