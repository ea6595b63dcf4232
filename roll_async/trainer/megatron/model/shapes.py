"""Which lengths a layout can cut evenly."""

from __future__ import annotations

import math

from roll_async.trainer.megatron.settings import MegatronSettings

_PAD_MULTIPLE = 8


def length_multiple(settings: MegatronSettings) -> int:
    """Row lengths are padded to a multiple of this."""
    if settings.micro_batching == "packed":  # cut by context only; the pack as a whole is cut by sequence parallelism
        return _zigzag_blocks(settings)
    return pack_multiple(settings)


def pack_multiple(settings: MegatronSettings) -> int:
    """A pack of rows is filled up to a multiple of this: zigzag context blocks, each cut by sequence parallelism."""
    parallel = settings.parallel
    return math.lcm(_PAD_MULTIPLE, _zigzag_blocks(settings) * (parallel.tensor if parallel.sequence_parallel else 1))


def _zigzag_blocks(settings: MegatronSettings) -> int:
    return 2 * settings.parallel.context if settings.parallel.context > 1 else 1


def padded_length(length: int, settings: MegatronSettings) -> int:
    """Length of a row after padding."""
    multiple = length_multiple(settings)
    return -(-length // multiple) * multiple
