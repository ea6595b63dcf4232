"""Undoing the framework's averaging, in this one place.

With a (loss, metrics) loss function Megatron-Core multiplies by the context-parallel size, divides by the number of
micro-batches, and its DDP averages gradients over data- and context-parallel ranks. Our aggregates are already shares
of the whole
batch, to be summed; context parallelism cancels because every rank back-propagates its own tokens only.
"""

from __future__ import annotations


def framework_scale(*, num_micro_batches: int, data_parallel_size: int) -> int:
    """Factor for an aggregate so that the optimizer sees the plain sum of all aggregates."""
    return num_micro_batches * data_parallel_size
