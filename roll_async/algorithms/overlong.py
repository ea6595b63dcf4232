"""Soft overlong punishment of one response, without tensors (DAPO, arXiv 2503.14476); `rewards.overlong_penalty` is the
same for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.config.schema import RLVRConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongShaping:
    """Lengths in generated tokens, the end-of-sequence token included.

    >>> OverlongShaping(max_length=100, buffer_length=20, factor=1.0).penalty(90)
    -0.5
    """

    max_length: int
    buffer_length: int
    factor: float = 1.0

    @classmethod
    def of(cls, config: RLVRConfig) -> OverlongShaping | None:
        """As the config has it; None = off."""
        buffer = config.algorithm.overlong_buffer
        if not buffer.enable:
            return None
        return cls(max_length=config.response_length, buffer_length=buffer.len, factor=buffer.penalty_factor)

    def penalty(self, length: int) -> float:
        """0 up to max_length - buffer_length, then linearly to -factor at max_length and beyond."""
        excess = (length - (self.max_length - self.buffer_length)) / self.buffer_length
        return -self.factor * min(1.0, max(0.0, excess))
