"""What another setting would have made of a run: the simulator, fed with the run's own lengths and times.

metrics.jsonl --> Measured --> the run as it was, simulated --> off by more than a quarter: nothing is said
                               the same with one change, over the same seeds --> how much shorter a step is
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd, log, sqrt
from statistics import mean, pstdev, stdev

from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import RLVRConfig, roles_on_engine_devices
from roll_async.simulator.figures import WARM_UP, Figures, figures_of
from roll_async.simulator.from_config import Speeds, scenario_of, split_of
from roll_async.simulator.parts.models import EngineFaults, TrainModel
from roll_async.simulator.scenario import Scenario
from roll_async.simulator.world import simulate

logger = logging.getLogger(__name__)

_FEWEST_STEPS = 8
_FURTHEST_OFF = 0.25
_SEEDS = 4
_BUDGET_S = 5.0
"""After which no further seed is simulated; after three times as long nothing more is."""
_SAMPLES = 1000
"""Of one simulated run, about a CPU second; a larger batch is simulated in fewer steps, and smaller if it can be."""
_BATCH = 128
_MEAN_TOKENS = 50
"""Of a simulated answer: longer ones are simulated in larger units, because every token costs time."""
_SHARED = (0.05, 0.5, 0.9)
"""Parts of a token's time that are due to the other requests on its replica: of reading weights nothing, of computing
all. No metric has it; those whose simulation agrees with the run are taken.
"""
_ALIKE = 0.05
_LEAST_GAIN, _NAMED = 0.03, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Means over the steps of a run after its warm-up. Times in seconds."""

    step_s: float
    """Without validations and saves."""
    learn_s: float
    """The trainer's own work of a step."""
    learn_jitter: float
    """A step takes between learn_s * (1 - half of it) and learn_s * (1 + half of it)."""
    push_s: float
    swap_s: float
    """Part of push_s in which engines stand still."""
    scoring_s: float
    mean_length: float
    sigma: float
    """Of the logarithm of the length."""
    running: float
    """Requests at once on a replica, while it has any."""
    token_s: float
    """Per token of one of them."""
    filtered: float
    """Share of groups that the filter dropped."""

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, float]], *, slots: int, devices_per_engine: int) -> Measured | None:
        """From the records of the steps; None for too few of them, or of engines that reported nothing. `slots`: most
        requests at once on a replica.
        """
        steps = [m for m in metrics[max(1, int(WARM_UP * len(metrics))) :] if "engine/token_s" in m]
        rates = [_decode_rate(m, slots, devices_per_engine) for m in steps]
        points = [point for point in rates if point is not None]
        if len(steps) < _FEWEST_STEPS or len(points) < _FEWEST_STEPS:
            return None
        learns = [_own_s(m) - m["time/wait_batch_s"] - m["time/weight_sync_s"] for m in steps]
        pushes = [m for m in steps if "weights/sent_bytes" in m]
        lengths = [m["response/length_mean"] for m in steps]
        spreads = [m["response/length_std"] / max(1.0, m["response/length_mean"]) for m in steps]
        last = metrics[-1]
        decided = last["groups/trained"] + last["groups/filtered"]
        return cls(
            step_s=mean(map(_own_s, steps)),
            learn_s=mean(learns),
            learn_jitter=min(1.0, sqrt(12) * pstdev(learns) / max(1e-9, mean(learns))),
            push_s=mean([m["time/weight_sync_s"] for m in pushes]) if pushes else 0.0,
            swap_s=mean([m["time/pause_s"] for m in pushes]) if pushes else 0.0,
            scoring_s=mean([m["time/scoring_mean_s"] for m in steps]),
            mean_length=mean(lengths),
            sigma=sqrt(log(1 + mean(spreads) ** 2)),
            running=mean([running for running, _ in points]),
            token_s=mean([token_s for _, token_s in points]),
            filtered=last["groups/filtered"] / decided if decided else 0.0,
        )


def _own_s(m: Mapping[str, float]) -> float:
    return m["time/step_s"] - m["time/validation_s"] - m["time/save_s"]


def _decode_rate(m: Mapping[str, float], slots: int, devices_per_engine: int) -> tuple[float, float] | None:
    """Requests that ran at once on a replica, and the seconds per token of each."""
    busy = 1 - m["idle/engines"]
    tokens_per_s = m["engine/tokens_per_device_s"] * devices_per_engine / busy if busy > 0 else 0.0
    if tokens_per_s <= 0:
        return None
    # Little: what is under way is the rate times how long each takes. Above the slots, the rest waits in the engine.
    running = min(float(slots), max(1.0, tokens_per_s * m["engine/token_s"]))
    return running, running / tokens_per_s


FEWER = "one engine fewer"


def as_it_was(config: RLVRConfig, measured: Measured, shared: float) -> Scenario:
    """The run as a scenario, made smaller where that keeps its shape: fewer groups on as many fewer slots. `shared`:
    the part of a token's time that is due to the other requests on the replica.
    """
    alone_s = measured.token_s * (1 - shared)
    further_s = measured.token_s * shared / max(1.0, measured.running - 1)
    unit = max(1, round(measured.mean_length / _MEAN_TOKENS))
    speeds = Speeds(
        mean_length=measured.mean_length / unit,
        sigma=measured.sigma,
        decode_tokens_per_s=1 / (alone_s * unit),
        decode_slowdown=further_s / alone_s,
        sync_s=max(0.0, measured.push_s - measured.swap_s),
        swap_s=measured.swap_s,
        reward_s=measured.scoring_s,
        filtered_share=measured.filtered if config.algorithm.filter_groups.enable else 0.0,
    )
    whole = scenario_of(config, speeds, split=split_of(config), steps=1, seed=0)
    smaller = _divisor(gcd(whole.queue.groups_per_batch, whole.plan.groups_per_part), whole.samples_per_batch / _BATCH)
    queue, slots = whole.queue, whole.manager.max_concurrent_per_server
    samples = whole.samples_per_batch // smaller
    return replace(
        whole,
        lengths=replace(whole.lengths, max_tokens=max(1, whole.lengths.max_tokens // unit)),
        queue=replace(
            queue,
            groups_per_batch=queue.groups_per_batch // smaller,
            oversample_groups=queue.oversample_groups // smaller,
            max_queue_size=None if queue.max_queue_size is None else ceil(queue.max_queue_size / smaller),
        ),
        plan=replace(
            whole.plan,
            max_steps=min(16, max(_FEWEST_STEPS, _SAMPLES // samples)),
            groups_per_batch=whole.plan.groups_per_batch // smaller,
            groups_per_part=whole.plan.groups_per_part // smaller,
        ),
        manager=replace(whole.manager, max_concurrent_per_server=max(1, slots // smaller)),
        # As many times fewer requests, each of which slows the others down as many times as much.
        speed=replace(whole.speed, token_s_per_request=whole.speed.token_s_per_request * smaller),
        train=TrainModel(
            step_s=measured.learn_s / (1 + measured.learn_jitter / 2),
            jitter=measured.learn_jitter,
            transfer_s=speeds.sync_s,
            swap_s=speeds.swap_s,
        ),
    )


def _divisor(number: int, wanted: float) -> int:
    """The smallest divisor that is at least as large as wanted, or the largest there is."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return next((d for d in divisors if d >= wanted), number)


def changes_of(scenario: Scenario, config: RLVRConfig, measured: Measured) -> dict[str, Scenario]:
    """What may be worth trying, as a user types it. Engines on CPU share its cores: another one brings none."""
    queue, a, replicas = scenario.queue, config.async_training, len(scenario.engines)
    ratio = queue.async_generation_ratio + 1
    more = replace(queue, async_generation_ratio=ratio, max_versions=None, max_queue_size=None)
    more = replace(more, max_versions=max(more.bound_versions, queue.bound_versions))
    given, key = QueueOptions.of(config), f"async_generation_ratio={ratio:g}"
    if given.queue_limit != replace(given, max_queue_size=None).queue_limit:  # the user's own, which would hold it up
        key += " async_training.max_queue_size=null"
    changes = {key: replace(scenario, queue=more)}
    if queue.async_generation_ratio:
        later = replace(queue, max_versions=queue.bound_versions + 2)
        changes[f"async_training.staleness.max_versions={later.max_versions}"] = replace(scenario, queue=later)
    if measured.running > 0.8 * a.max_concurrent_per_server:
        slots = 2 * scenario.manager.max_concurrent_per_server
        manager = replace(scenario.manager, max_concurrent_per_server=slots)
        key = f"async_training.max_concurrent_per_server={2 * a.max_concurrent_per_server}"
        changes[key] = replace(scenario, manager=manager)
    if config.actor_infer.device_mapping is not None:
        changes["one engine more"] = replace(scenario, engines=(EngineFaults(),) * (replicas + 1))
        if replicas > 1:
            changes[FEWER] = replace(scenario, engines=(EngineFaults(),) * (replicas - 1))
    return changes


def advice(config: RLVRConfig, metrics: Sequence[Mapping[str, float]]) -> str | None:
    """One line: the two changes that make a step shortest, with the spread over seeds. None where nothing can be said:
    too few steps, roles that take turns on their devices, or a simulation that does not agree with the run.
    """
    if roles_on_engine_devices(config):
        return None
    a = config.async_training
    measured = Measured.of(
        metrics, slots=a.max_concurrent_per_server, devices_per_engine=config.actor_infer.model_parallel_size
    )
    if measured is None:
        return None
    started, worlds = time.monotonic(), list[tuple[float, Scenario, Figures]]()
    for shared in _SHARED:
        world = as_it_was(config, measured, shared)
        if (figures := _figures(world, 0)) is not None:
            worlds.append((figures.step_s / measured.step_s - 1, world, figures))
    worlds.sort(key=lambda found: abs(found[0]))
    logger.info("a step took %.3f s; simulated it is off by %s", measured.step_s, [f"{w[0]:+.0%}" for w in worlds])
    if not worlds or abs(worlds[0][0]) > _FURTHEST_OFF:
        return None
    # What one run cannot tell apart is part of the spread.
    likely = [found for found in worlds if abs(found[0]) < abs(worlds[0][0]) + _ALIKE]
    changes: dict[str, list[tuple[Figures, Figures]]] = {}
    for seed in range(_SEEDS):
        _, world, before = likely[seed % len(likely)]
        before = _figures(world, seed) if seed else before
        for name, changed in changes_of(world, config, measured).items():
            if time.monotonic() - started > 3 * _BUDGET_S:
                return _told(changes, worlds[0][0], _limit(metrics))
            after = _figures(changed, seed)
            if before is not None and after is not None:
                changes.setdefault(name, []).append((before, after))
        if seed and time.monotonic() - started > _BUDGET_S:  # two at least: one seed has no spread
            break
    return _told(changes, worlds[0][0], _limit(metrics))


def _figures(scenario: Scenario, seed: int) -> Figures | None:
    parts = logging.getLogger("roll_async")
    level = parts.level
    parts.setLevel(logging.CRITICAL)  # what the real parts log of a simulated run is none of this run
    try:
        outcome = simulate(replace(scenario, seed=seed), check=False)
    finally:
        parts.setLevel(level)
    return None if outcome.findings or len(outcome.steps) < _FEWEST_STEPS else figures_of(outcome)


def _limit(metrics: Sequence[Mapping[str, float]]) -> str:
    """Which side the run waits for, where it is clear."""
    trainer, engines = (1 - mean([m[key] for m in metrics]) for key in ("idle/trainer", "idle/engines"))
    if engines > 0.85 > trainer:
        return f"the engines are the limit (busy {engines:.0%}, the trainer {trainer:.0%}); "
    return f"the trainer is the limit (busy {trainer:.0%}); " if trainer > 0.9 else ""


def _told(changes: Mapping[str, Sequence[tuple[Figures, Figures]]], off: float, limit: str) -> str | None:
    shorter = {
        name: [after.step_s / before.step_s - 1 for before, after in runs]
        for name, runs in changes.items()
        if len(runs) > 1
    }
    if not shorter:
        return None
    parts: list[str] = []
    for name, gains in sorted(shorter.items(), key=lambda found: mean(found[1])):
        change, spread = mean(gains), stdev(gains)
        helps = change < -_LEAST_GAIN and -change > 2 * spread
        if (helps and len(parts) < _NAMED) or (name == FEWER and change < _LEAST_GAIN):
            was, becomes = (
                mean(figures.staleness_mean for figures in side) for side in zip(*changes[name], strict=True)
            )
            parts.append(f"{name}: {change:+.0%} +- {spread * 100:.0f} a step, staleness {was:.1f} -> {becomes:.1f}")
    told = "; ".join(parts) or f"none of {', '.join(shorter)} makes a step clearly shorter"
    return f"{limit}{told} (simulated with the times of this run, whose own step comes out {off:+.0%})"
