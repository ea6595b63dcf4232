"""Assertions on top of the certificates' bounds: what rounding explains, and no more."""

import torch

from roll_async.commands.certify.rounding import Bounds, apart, reordered

__all__ = ["Bounds", "assert_near", "reordered"]


def assert_near(found: object, wanted: object, relative: float, *, of: float | None = None) -> None:
    """`found` (numbers or tensors) is `wanted`, up to `relative` of the size `of`; without it, of the largest number of
    `wanted`.
    """
    difference = apart(found, wanted)
    bound = relative * (float(torch.as_tensor(wanted, dtype=torch.float64).abs().max()) if of is None else of)
    assert difference <= bound, f"{difference:.2e} apart, and rounding explains {bound:.2e}"
