"""The worlds behind the tables of the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.buffer.states import QueueOptions
from roll_async.pipelines.protocol import RunPlan
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.schema import SamplingParams
from roll_async.simulator.figures import Workload
from roll_async.simulator.parts.models import EngineFaults, LengthModel, RewardModel, SpeedModel, TrainModel
from roll_async.simulator.scenario import Scenario
from roll_async.weight_sync.protocol import SyncOptions

_MEAN_TOKENS, _TOKEN_S = 50.0, 0.02
"""Generation of a sample takes a second on average."""
SAMPLES_PER_GROUP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One row: how far generation runs ahead, and what a push does to it."""

    name: str
    ratio: float = 0.0
    sync_every: int = 1
    interrupt: str = "wait"
    max_versions: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much there is of everything. Each sample takes 1 s to generate on average."""

    engines: int
    slots_per_engine: int
    groups: int
    train_s: float
    sigma: float
    longest_s: float


OVERTAKING = ((0.0, None, 18.3), (1.0, 1, 10.1), (1.0, 5, 4.3), (1.0, 8, 3.3), (2.0, 8, 2.8), (4.0, 4, 4.7))
"""(ratio, max_versions, seconds per step) of the table that shows what max_versions above the ratio is worth."""
OVERTAKING_SIZE = Size(engines=4, slots_per_engine=128, groups=32, train_s=1.0, sigma=1.3, longest_s=30.0)

MODES = (
    Mode(name="synchronous, all devices in turn"),
    Mode(name="synchronous, same split"),
    Mode(name="one-step-off", ratio=1.0),
    Mode(name="ROLL async, ratio 2", ratio=2.0, interrupt="resume"),
    Mode(name="ROLL async, ratio 2, 8 versions", ratio=2.0, interrupt="resume", max_versions=8),
    Mode(name="stream off-policy, k = 4", sync_every=4),
    Mode(name="fully async, ratio 0.5, k = 2", ratio=0.5, sync_every=2),
    Mode(name="fully async + partial rollout, ratio 1, k = 2, 8 versions", ratio=1.0, sync_every=2,
         interrupt="keep", max_versions=8),
)  # fmt: skip
TAILS = {"light": (0.6, 6.0), "heavy": (1.3, 30.0)}
"""Name to (sigma, seconds of the longest sample)."""
_TRAIN_DEVICES = 0.5
"""Training devices per engine."""


def world(mode: Mode, size: Size, *, steps: int, seed: int) -> Scenario:
    """A run of this mode at this size; scoring and weight pushes cost nothing."""
    return Scenario(
        seed=seed,
        queue=QueueOptions(
            groups_per_batch=size.groups,
            async_generation_ratio=mode.ratio,
            trigger_parameter_sync_step=mode.sync_every,
            max_versions=mode.max_versions,
        ),
        scheduler=SchedulerOptions(
            samples_per_group=SAMPLES_PER_GROUP,
            sampling=SamplingParams(max_new_tokens=round(size.longest_s / _TOKEN_S)),
        ),
        manager=ManagerOptions(max_concurrent_per_server=size.slots_per_engine),
        sync=SyncOptions(transport="shm", interrupt_mode=mode.interrupt, interrupt_timeout_s=4 * size.longest_s),
        plan=RunPlan(
            first_step=1,
            max_steps=steps,
            sync_every=mode.sync_every,
            save_every=0,
            eval_every=0,
            groups_per_batch=size.groups,
            samples_per_group=SAMPLES_PER_GROUP,
            groups_per_part=size.groups,
        ),
        engines=(EngineFaults(),) * size.engines,
        lengths=LengthModel(mean_tokens=_MEAN_TOKENS, sigma=size.sigma, max_tokens=round(size.longest_s / _TOKEN_S)),
        speed=SpeedModel(token_s=_TOKEN_S),
        rewards=RewardModel(seconds=0.0),
        train=TrainModel(step_s=size.train_s),
    )


def overtaking_world(ratio: float, max_versions: int | None, *, steps: int, seed: int) -> Scenario:
    """A row of `OVERTAKING`: weights are swapped under running requests, which costs nothing here."""
    mode = Mode(name="", ratio=ratio, interrupt="keep", max_versions=max_versions)
    return world(mode, OVERTAKING_SIZE, steps=steps, seed=seed)


def size_of(engines: int, tail: str, *, in_turn: bool) -> Size:
    """Engines with 4 slots and 4 samples a step each, half as many training devices, 1 s of training: both sides are
    equally busy when no sample is long. `in_turn`: all devices generate, then all train.
    """
    sigma, longest_s = TAILS[tail]
    devices = round(engines * (1 + _TRAIN_DEVICES)) if in_turn else engines
    train_s = _TRAIN_DEVICES / (1 + _TRAIN_DEVICES) if in_turn else 1.0
    groups = engines * 4 // SAMPLES_PER_GROUP
    return Size(engines=devices, slots_per_engine=4, groups=groups, train_s=train_s, sigma=sigma, longest_s=longest_s)


def workload(engines: int, tail: str) -> Workload:
    """What theory sees of `size_of`."""
    split = size_of(engines, tail, in_turn=False)
    lengths = LengthModel(mean_tokens=_MEAN_TOKENS, sigma=split.sigma, max_tokens=round(split.longest_s / _TOKEN_S))
    samples, train_slots = split.groups * SAMPLES_PER_GROUP, 4 * engines * _TRAIN_DEVICES
    return Workload(
        num_slots=round(4 * engines + train_slots),
        num_samples=samples,
        longest_s=split.longest_s,
        generation_s=lengths.mean_of_cut() * _TOKEN_S,
        training_s=split.train_s * train_slots / samples,
    )
