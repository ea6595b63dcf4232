"""Environments with long tails: lock-step against asynchronous against redundancy, on the virtual clock.

    python tools/bench/agentic_async.py [--environments 16 128 1024] [--steps 24] [--seeds 1 2 3] [--markdown]

A trajectory is 5 turns of about 1 s of generation, and 6 calls of its world (the reset too) of 10 s on average,
log-normal with sigma 1: one call in a hundred takes a minute. As many trajectories run at once as there are
environments; a group is 8 of them, or 6 kept of 8 with redundancy. A training step takes 20 s. The real rollouter,
server manager, queue and `WorldRunner` run; engines have four times the slots that are needed on average, pushes cost
nothing.

The bound of a setting is what an ideal scheduler of that setting reaches on the same distributions, without the loops.
Lock-step: every turn takes as long as the slowest of all environments, then the step is trained. The others: a list of
events (`ideal_step_s`) in which an environment never idles while the staleness bound admits a group, generation has no
queue, and the trainer takes the first groups that end, those that would become too old before them. With a ratio of 0
that is the slowest trajectory of every step; with a large one, environments / mean seconds of a trajectory.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import exp
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from roll_async.buffer.states import QueueOptions
from roll_async.pipelines.protocol import RunPlan
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.schema import SamplingParams
from roll_async.simulator.figures import WARM_UP, figures_of
from roll_async.simulator.parts.models import EngineFaults, LengthModel, SpeedModel, TrainModel, WorldModel
from roll_async.simulator.scenario import Scenario
from roll_async.simulator.world import simulate
from roll_async.weight_sync.protocol import SyncOptions

BUDGET = 0.9
MOVES, GROUP, CALL_S, SIGMA, TRAIN_S = 5, 8, 10.0, 1.0, 20.0
TOKEN_S, TOKENS, TOKENS_SIGMA, MOST_TOKENS = 0.02, 50.0, 0.6, 400
SLOTS_PER_ENGINE, ENVIRONMENTS_PER_ENGINE = 24, 64
DRAWS, REPEATED_TRAJECTORIES = 1_000_000, 200_000
TRAJECTORIES_AT_MOST = 12_000
"""Of one cell: larger worlds are shown fewer steps."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the environments."""

    name: str
    ratio: float
    lock_step: bool = False
    redundancy: int = 0


SETTINGS = (
    Setting(name="lock-step", ratio=0.0, lock_step=True),
    Setting(name="synchronous", ratio=0.0),
    Setting(name="synchronous, 6 of 8", ratio=0.0, redundancy=2),
    Setting(name="asynchronous, ratio 1", ratio=1.0),
    Setting(name="asynchronous, ratio 3", ratio=3.0),
    Setting(name="asynchronous, ratio 3, 6 of 8", ratio=3.0, redundancy=2),
)


def scenario_of(setting: Setting, environments: int, steps: int, seed: int) -> Scenario:
    """A batch is what runs at once in a synchronous run."""
    groups, kept = environments // GROUP, GROUP - setting.redundancy
    engines = -(-environments // ENVIRONMENTS_PER_ENGINE)
    return Scenario(
        seed=seed,
        queue=QueueOptions(
            groups_per_batch=groups, async_generation_ratio=setting.ratio, trigger_parameter_sync_step=1
        ),
        scheduler=SchedulerOptions(samples_per_group=kept, sampling=SamplingParams(max_new_tokens=MOST_TOKENS)),
        manager=ManagerOptions(max_concurrent_per_server=SLOTS_PER_ENGINE),
        sync=SyncOptions(transport="shm", interrupt_mode="keep", interrupt_timeout_s=600.0),
        plan=RunPlan(
            first_step=1,
            max_steps=steps,
            sync_every=1,
            save_every=0,
            eval_every=0,
            groups_per_batch=groups,
            samples_per_group=kept,
            groups_per_part=groups,
        ),
        engines=(EngineFaults(),) * engines,
        lengths=LengthModel(mean_tokens=TOKENS, sigma=TOKENS_SIGMA, max_tokens=MOST_TOKENS),
        speed=SpeedModel(token_s=TOKEN_S),
        train=TrainModel(step_s=TRAIN_S),
        worlds=WorldModel(
            moves=MOVES,
            fewest_moves=MOVES,
            seconds=CALL_S,
            sigma=SIGMA,
            timeout_s=1e6,
            redundancy=setting.redundancy,
            max_worlds=environments,
            max_turns=MOVES + 1,
            max_context=10**6,
            lock_step=setting.lock_step,
        ),
    )


class Draws:
    """The distributions of the worlds, without the loops."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def call_s(self) -> float:
        return CALL_S * exp(self._rng.gauss(-(SIGMA**2) / 2, SIGMA))

    def generation_s(self) -> float:
        tokens = TOKENS * exp(self._rng.gauss(-(TOKENS_SIGMA**2) / 2, TOKENS_SIGMA))
        return TOKEN_S * min(MOST_TOKENS, max(1, round(tokens)))

    def turn_s(self) -> float:
        return self.generation_s() + self.call_s()

    def trajectory_s(self) -> float:
        return self.call_s() + sum(self.turn_s() for _ in range(MOVES))


@dataclass(eq=False)
class IdealGroup:
    """Trajectories that began under one weight version."""

    version: int
    to_start: int = GROUP
    running: int = 0
    ended: int = 0


def ideal_step_s(setting: Setting, environments: int, steps: int, seed: int) -> float:
    """Seconds of a step after the warm-up, when nothing but worlds, generation, training and the staleness bound takes
    time. The bound is that of docs_roll/design.md: a group that began under version v is trained by step v + 1 + ratio.
    """
    draws, kept, batch, ahead = Draws(seed), GROUP - setting.redundancy, environments // GROUP, round(setting.ratio)
    events: list[tuple[float, int, IdealGroup | None]] = []  # seconds, order, the group of a trajectory or a step's end
    order, now, free, published, admitted = count(), 0.0, environments, 0, 0
    starting: deque[IdealGroup] = deque()
    waiting: list[IdealGroup] = []
    unfinished: Counter[int] = Counter()
    trains, ends = False, [0.0]
    while published < steps:
        while free and (starting or admitted < batch * (published + 1 + ahead)):
            if not starting:
                starting.append(IdealGroup(published))
                unfinished[published] += 1
                admitted += 1
            group = starting[0]
            group.to_start -= 1
            group.running += 1
            free -= 1
            heappush(events, (now + draws.trajectory_s(), next(order), group))
            if not group.to_start:
                starting.popleft()
        if not trains and len(waiting) >= batch and not any(n for v, n in unfinished.items() if v + ahead <= published):
            waiting.sort(key=lambda group: group.version + ahead > published)  # stable: else in the order they ended
            del waiting[:batch]
            trains = True
            heappush(events, (now + TRAIN_S, next(order), None))
        now, _, ended = heappop(events)
        if ended is None:
            trains, published = False, published + 1
            ends.append(now)
        elif ended.ended < kept:
            ended.ended, ended.running, free = ended.ended + 1, ended.running - 1, free + 1
            if ended.ended == kept:  # the others are cut off
                free, unfinished[ended.version] = free + ended.running, unfinished[ended.version] - 1
                waiting.append(ended)
                if ended.to_start:
                    starting.remove(ended)
    first = max(1, int(WARM_UP * steps))
    return (ends[-1] - ends[first]) / (steps - first)


def bound_per_minute(setting: Setting, environments: int, steps: int, seed: int) -> float:
    """Trained trajectories a minute at best: the mean of enough runs of as many steps."""
    draws, trained = Draws(seed), environments // GROUP * (GROUP - setting.redundancy)
    if not setting.lock_step:
        repeats = max(3, REPEATED_TRAJECTORIES // (environments * steps))
        return 60 * trained / fmean(ideal_step_s(setting, environments, steps, seed + i) for i in range(repeats))

    def slowest_turns() -> float:
        first = max(draws.call_s() + draws.turn_s() for _ in range(environments))
        return first + sum(max(draws.turn_s() for _ in range(environments)) for _ in range(MOVES - 1))

    times = (slowest_turns() for _ in range(max(20, DRAWS // (environments * (2 * MOVES + 1)))))
    return 60 * trained / (TRAIN_S + fmean(times))


def cell(setting: Setting, environments: int, steps: int, seeds: list[int]) -> dict[str, object]:
    """Means over runs of different seeds: with tails like these one run scatters by a tenth."""
    steps = max(6, min(steps, TRAJECTORIES_AT_MOST // environments))
    runs = []
    for seed in seeds:
        outcome = simulate(scenario_of(setting, environments, steps, seed), check=False)
        if outcome.findings:
            raise SystemExit(f"the simulation broke an invariant: {outcome.findings[0]}")
        runs.append(figures_of(outcome))
    kept = environments // GROUP * (GROUP - setting.redundancy)
    found, bound = 60 * kept / fmean(f.step_s for f in runs), bound_per_minute(setting, environments, steps, seeds[0])
    line: dict[str, object] = {
        "name": f"agentic_{environments}_{setting.name}",
        "value": round(found, 2),
        "unit": "trained trajectories/min",
        "bound": round(bound, 2),
        "ratio": round(found / bound, 3),
        "staleness_mean": round(fmean(f.staleness_mean for f in runs), 2),
        "staleness_max": max(f.staleness_max for f in runs),
        "steps": steps,
        "budget": BUDGET,
        "ok": found >= BUDGET * bound,
    }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--settings", type=int, nargs="+", choices=range(len(SETTINGS)), default=range(len(SETTINGS)))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    logging.getLogger("roll_async").setLevel(logging.CRITICAL)  # that a batch takes minutes is no news here
    for environments in args.environments:
        first = 0.0
        if args.markdown:
            print(f"\n{environments} environments\n")
            print("| setting | trajectories/min | times the first | bound | of it |")
            print("|---|---|---|---|---|", flush=True)
        for setting in (SETTINGS[i] for i in args.settings):
            line = cell(setting, environments, args.steps, args.seeds)
            found = float(str(line["value"]))
            first = first or found
            if args.markdown:
                share = f"{line['ratio']:.0%}"
                print(f"| {setting.name} | {found} | {found / first:.1f} | {line['bound']} | {share} |", flush=True)
            else:
                print(json.dumps({**line, "speedup": round(found / first, 2)}), flush=True)


if __name__ == "__main__":
    main()
