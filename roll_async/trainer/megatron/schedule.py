"""Learning rate by optimizer step."""

from __future__ import annotations

import math

from roll_async.trainer.megatron.settings import OptimizerSettings


def learning_rate_at(step: int, settings: OptimizerSettings) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine to 0 at total_steps."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    span = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - progress)
    if settings.schedule == "cosine":
        return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"lr_scheduler_type {settings.schedule!r} is not one of constant | linear | cosine")
