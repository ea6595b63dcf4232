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
    shift: float = 0.0
    scale: float = 1.0
    """`reward_shift` and `reward_scale`, which come before the penalty."""

    @classmethod
    def of(cls, config: RLVRConfig) -> OverlongShaping | None:
        """As the config has it; None = off."""
        buffer = config.algorithm.overlong_buffer
        if not buffer.enable:
            return None
        return cls(
            max_length=config.response_length,
            buffer_length=buffer.len,
            factor=buffer.penalty_factor,
            shift=config.algorithm.reward_shift,
            scale=config.algorithm.reward_scale,
        )

    def shaped(self, score: float, length: int) -> float:
        """The score shifted and scaled, with the penalty of this length.

        >>> OverlongShaping(max_length=100, buffer_length=20, shift=-0.5, scale=2.0).shaped(1.0, 100)
        0.0
        """
        return (score + self.shift) * self.scale + self.penalty(length)

    def penalty(self, length: int) -> float:
        """0 up to max_length - buffer_length, then linearly to -factor at max_length and beyond."""
        excess = (length - (self.max_length - self.buffer_length)) / self.buffer_length
        return -self.factor * min(1.0, max(0.0, excess))
