"""One step's metrics from what the roles report. Keys as in docs_roll/metrics.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from roll_async.schema import Group
from roll_async.trainer.protocol import StepReport


class StepClock:
    """Seconds of one step, by what they were spent on; time of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self.spent: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        started = self._loop.time()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + self._loop.time() - started

    @property
    def total_s(self) -> float:
        """Seconds since the step began."""
        return self._loop.time() - self._started


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """Numbers of a batch that need no tensor."""

    rewards: tuple[float, ...]
    accuracies: tuple[float, ...]
    lengths: tuple[int, ...]
    staleness: tuple[int, ...]
    """Per trained token run, weighted below."""
    staleness_weights: tuple[int, ...]


def sample_facts(groups: Sequence[Group], step: int) -> SampleFacts:
    """Rewards, lengths and token staleness of a batch trained at `step` (from weights of step - 1)."""
    samples = [s for g in groups for s in g.samples]
    lags, weights = [], []
    for sample in samples:
        position = 0
        for version, count in sample.version_runs:
            trained = sum(sample.loss_mask[position : position + count])
            position += count
            if trained:
                lags.append(step - 1 - version)
                weights.append(trained)
    scores = [s.reward.score for s in samples if s.reward is not None]
    return SampleFacts(
        rewards=tuple(scores),
        accuracies=tuple(s.reward.metrics.get("acc", float(s.reward.score > 0)) for s in samples if s.reward is not None),
        lengths=tuple(sum(s.loss_mask) for s in samples),
        staleness=tuple(lags),
        staleness_weights=tuple(weights),
    )


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """The part of a step's metrics that the batch alone determines."""
    facts = sample_facts(groups, step)
    total = sum(facts.staleness_weights)
    weighted = sum(lag * n for lag, n in zip(facts.staleness, facts.staleness_weights, strict=True))
    return {
        "reward/mean": _mean(facts.rewards),
        "reward/accuracy": _mean(facts.accuracies),
        "response/length_mean": _mean(facts.lengths),
        "response/length_max": float(max(facts.lengths, default=0)),
        "staleness/mean": weighted / total if total else 0.0,
        "staleness/max": float(max(facts.staleness, default=0)),
    }


def throughput_metrics(report: StepReport, clock: StepClock) -> Mapping[str, float]:
    """Times, rates and idle shares of a step."""
    total = clock.total_s
    wait = clock.spent.get("wait_batch", 0.0)
    return {
        "time/step_s": total,
        "time/wait_batch_s": wait,
        "time/train_s": report.train_s,
        "time/logprobs_s": report.logprobs_s,
        "time/weight_sync_s": clock.spent.get("weight_sync", 0.0),
        "throughput/samples_per_s": report.num_samples / total,
        "throughput/tokens_per_s": report.num_tokens / total,
        "idle/trainer": wait / total,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
