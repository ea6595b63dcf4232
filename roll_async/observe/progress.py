"""The live line: one that is rewritten on a terminal, one per step elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class ProgressLine:
    """Prints to stdout."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._first_step: int | None = None
        """The first step of this process; above 0 in a resumed run."""
        self._live = sys.stdout.isatty()
        self._dirty = False

    def show(self, metrics: Mapping[str, float]) -> None:
        """Update the line after a training step."""
        step = int(metrics["step"])
        if self._first_step is None:
            self._first_step = step
        done = step - self._first_step + 1
        eta = metrics["time_s"] / done * (self._max_steps - step)
        what = _of_samples(metrics) if "reward/mean" in metrics else _of_given_rows(metrics)
        line = f"step {step}/{self._max_steps}  {what}  eta {duration(eta)}"
        if self._live:
            width = shutil.get_terminal_size().columns
            # Padded over what is left of a longer line; a column less, because a full one may wrap.
            print("\r" + line[: width - 1].ljust(width - 1), end="", flush=True)
            self._dirty = True
        else:
            print(line, flush=True)

    def end(self) -> None:
        """End the live line, so that later output starts on a new line."""
        if self._dirty:
            print(flush=True)
            self._dirty = False


def _of_samples(metrics: Mapping[str, float]) -> str:
    return (
        f"reward {metrics['reward/mean']:.3f}  {metrics['throughput/samples_per_s']:.0f} samples/s  "
        f"staleness {metrics['staleness/mean']:.2f}/{metrics['staleness/max']:.0f}  "
        f"queue {metrics['groups/buffered']:.0f}+{metrics['groups/in_flight']:.0f}  "
        f"overlap {1 - metrics['idle/trainer']:.0%}"
    )


def _of_given_rows(metrics: Mapping[str, float]) -> str:
    """Of sft and dpo runs."""
    accuracy = f"  accuracy {metrics['rewards/accuracies']:.2f}" if "rewards/accuracies" in metrics else ""
    validation = f"  validation {metrics['validation/loss']:.4f}" if "validation/loss" in metrics else ""
    return (
        f"loss {metrics['trainer/loss']:.4f}{accuracy}{validation}  epoch {metrics['data/epoch']:.2f}  "
        f"{metrics['throughput/tokens_per_s']:.0f} tokens/s"
    )
