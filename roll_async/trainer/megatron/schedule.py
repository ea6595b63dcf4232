"""Learning rates by progress in training."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roll_async.trainer.megatron.settings import OptimizerSettings


class Schedule:
    """Where a role is in its schedule.

    What the learner is given at a time, a batch or a part of one, moves it on by the optimizer steps that the config
    plans for that. Trajectories of several rows make more of them: 3 steps where 1 is planned are taken at the
    positions 0, 1/3 and 2/3, and the next update begins at 1, so that the schedule ends with the run.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._position = 0.0
        self.optimizer_steps = 0
        """Steps taken, which Adam's bias correction counts: those that are skipped pass, but are none."""

    def rates(self, num_steps: int) -> list[float]:
        """The learning rate of each optimizer step of an update, which begins now."""
        planned, start = self._settings.steps_per_update, self._position
        self._position += planned
        return [learning_rate_at(start + i * planned / num_steps, self._settings) for i in range(num_steps)]

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {
            "optimizer_steps": self.optimizer_steps,
            "position": self._position,
            "steps_per_training_step": self._settings.steps_per_training_step,
            "rows_per_training_step": self._settings.rows_per_training_step,
        }

    def restore(self, state: Mapping[str, float], training_step: int) -> None:
        """Go on after `training_step`, maybe with other batches or mini-batches. Checkpoints without a position counted
        all optimizer steps: the actor is no further than the training step, and behind it after a critic has warmed up.
        """
        now = self._settings.steps_per_training_step
        self.optimizer_steps = int(state["optimizer_steps"])
        self._position = float(min(self.optimizer_steps, training_step * now))
        if "position" in state:
            before = state["steps_per_training_step"]
            self._position = state["position"] if before == now else state["position"] / before * now
        rows, rows_before = self._settings.rows_per_training_step, state.get("rows_per_training_step", 0)
        if rows and rows_before:
            self._position *= rows_before / rows


def learning_rate_at(position: float, settings: OptimizerSettings) -> float:
    """The rate after `position` planned optimizer steps: linear warm-up, then constant, linear or cosine to 0 at
    total_steps.
    """
    if position < settings.warmup_steps:
        # + 1: the first step is not taken at a rate of 0.
        return settings.learning_rate * min(position + 1, settings.warmup_steps) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    # A run may be all warm-up.
    span = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (position - settings.warmup_steps) / span)
    if settings.schedule == "linear":
        return settings.learning_rate * (1 - progress)
    if settings.schedule == "cosine":
        return settings.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"lr_scheduler_type {settings.schedule!r} is not one of constant | linear | cosine")
