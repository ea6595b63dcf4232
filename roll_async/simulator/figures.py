"""Speed and freshness of a simulated run, and what theory predicts for the same world."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from math import sqrt
from statistics import stdev

from roll_async.simulator.world import SimOutcome

WARM_UP = 0.2
"""Share of the steps left out at the start, while the queue fills."""
_BLOCKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means over the steps after the warm-up. Times in seconds."""

    step_s: float
    step_error_s: float
    """Standard error of step_s, from the means of blocks of steps: neighbouring steps share their long samples."""
    engines_busy: float
    """Share of all decoding slots that generated."""
    trainer_busy: float
    staleness_mean: float
    """Versions, over trained tokens."""
    staleness_max: float
    lag_mean: float
    """Versions between admission and training, over trained groups."""
    lag_max: int
    dropped_share: float
    """Finished groups discarded over the bound, of all finished groups."""
    masked_share: float
    """Tokens taken out of the loss over the bound."""
    length_bias: float
    """Mean length of trained samples / mean length of generated samples."""

    def to_json(self) -> dict[str, float]:
        """Plain numbers, rounded to what is worth reading."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def figures_of(outcome: SimOutcome) -> Figures:
    """Raises ValueError for a run too short to have figures."""
    steps, queue, scenario = outcome.steps, outcome.queue, outcome.scenario
    if len(steps) < 3 or queue is None:
        raise ValueError(f"{len(steps)} simulated steps are too few for figures: the run ended with {outcome.end!r}")
    first = max(1, int(WARM_UP * len(steps)))  # one step at least before the window: it begins at the end of that one
    start, end, window = steps[first - 1], steps[-1], steps[first:]
    seconds, count = end["time_s"] - start["time_s"], len(window)
    lags = [lag for step, lag in outcome.group_lags if step > start["step"]]
    finished = queue.trained + queue.dropped_stale
    return Figures(
        step_s=seconds / count,
        step_error_s=_standard_error([m["time_s"] for m in steps[first - 1 :]]),
        engines_busy=(end["busy/engines_s"] - start["busy/engines_s"]) / (scenario.slots * seconds),
        trainer_busy=(end["busy/trainer_s"] - start["busy/trainer_s"]) / seconds,
        staleness_mean=sum(m["staleness/mean"] for m in window) / count,
        staleness_max=max(m["staleness/max"] for m in steps),  # of the warm-up, too: its bound holds there as well
        lag_mean=sum(lags) / max(1, len(lags)),
        lag_max=max((lag for _, lag in outcome.group_lags), default=0),
        dropped_share=queue.dropped_stale / max(1, finished),
        masked_share=outcome.masked_share,
        length_bias=queue.length_bias,
    )


def _standard_error(ends_s: list[float]) -> float:
    """Of the mean step, from when the steps ended. 0 for fewer steps than two blocks need."""
    size = (len(ends_s) - 1) // _BLOCKS
    if not size:
        return 0.0
    edges = ends_s[::size][: _BLOCKS + 1]  # steps that do not fill a block are left out
    return stdev([(after - before) / size for before, after in pairwise(edges)]) / sqrt(_BLOCKS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the theory looks at. Slots are places that decode one request at constant speed; training is counted in the
    slots its devices would be.
    """

    num_slots: int
    """K: of both sides together."""
    num_samples: int
    """N: per training step."""
    longest_s: float
    """L: generation of the longest sample."""
    generation_s: float
    """mu: mean generation of one sample."""
    training_s: float
    """mu_train: training of one sample, in seconds of one slot: step time * K_train / N."""

    @property
    def synchronous_s(self) -> float:
        """Upper bound on a step when all K slots generate, then all train: N * (mu + mu_train) / K + L."""
        return self._work_s + self.longest_s

    @property
    def _work_s(self) -> float:
        return self.num_samples * (self.generation_s + self.training_s) / self.num_slots

    @property
    def speedup_bound(self) -> float:
        """1 + K * L / (N * (mu + mu_train)): unlimited ratio, the slots split so that neither side waits."""
        return 1 + self.longest_s / self._work_s

    def speedup_at(self, ratio: float) -> float:
        """The finite-ratio form. (1 + r) * N samples are under way, so the longest one delays (1 + r) batches and each
        of them by L / (1 + r): with a share b of the slots for training a step takes the longer of
        N * mu / ((1 - b) * K) + L / (1 + r) and N * mu_train / (b * K), and the best b makes them equal.
        """
        generate = self.num_samples * self.generation_s / self.num_slots
        train, tail = self._work_s - generate, self.longest_s / (1 + ratio)
        total = generate + train + tail
        # With b = train / T: T^2 - total * T + train * tail = 0; the larger root, because b < 1.
        return self.synchronous_s / ((total + sqrt(total**2 - 4 * train * tail)) / 2)
