"""Which lengths a layout can cut evenly."""

from __future__ import annotations

import math

from roll_async.trainer.megatron.settings import MegatronSettings

_PAD_MULTIPLE = 8


def length_multiple(settings: MegatronSettings) -> int:
    """Row lengths are padded to a multiple of this: zigzag context blocks, each cut by sequence parallelism."""
    parallel = settings.parallel
    context = 2 * parallel.context if parallel.context > 1 else 1
    tensor = parallel.tensor if parallel.sequence_parallel else 1
    packed = settings.micro_batching == "packed"
    # A packed row is cut by context only; the pack as a whole is cut by sequence parallelism (see `pack_multiple`).
    return context if packed else math.lcm(_PAD_MULTIPLE, context * tensor)


def pack_multiple(settings: MegatronSettings) -> int:
    """A pack of rows is filled up to a multiple of this."""
    parallel = settings.parallel
    context = 2 * parallel.context if parallel.context > 1 else 1
    return math.lcm(_PAD_MULTIPLE, context * (parallel.tensor if parallel.sequence_parallel else 1))


def padded_length(length: int, settings: MegatronSettings) -> int:
    """Length of a row after padding."""
    multiple = length_multiple(settings)
    return -(-length // multiple) * multiple
