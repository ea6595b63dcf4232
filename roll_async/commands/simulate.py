"""`roll-async simulate`: the schedule of a config with figures beside theory, or a random world by number."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from roll_async.commands.command_line import HELP, execute, print_pairs
from roll_async.commands.weights import simulated_weights
from roll_async.config.api import ConfigError
from roll_async.config.loading.compose import OVERRIDE
from roll_async.config.schema import RLVRConfig
from roll_async.launch.gate import admit
from roll_async.observe.trace import Trace
from roll_async.simulator.figures import figures_of
from roll_async.simulator.from_config import Speeds, Split, scenario_of, split_of, synchronous, workload_of
from roll_async.simulator.scenario import Scenario, random_killed_scenario, random_scenario
from roll_async.simulator.world import SimOutcome, simulate

_EXIT_BROKEN = 1


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The command line."""

    config: str | None
    overrides: list[str]
    seed: int | None
    kills: bool
    agents: bool
    trace: Path | None
    steps: int
    mean_length: float | None
    sigma: float
    prompt_share: float
    decode_speed: float
    decode_slowdown: float
    train_speed: float
    sync_s: float
    swap_s: float
    reward_s: float
    filtered_share: float | None
    split: Split | None
    json: bool
    weights: bool
    network_gb_s: float


class _Split(click.ParamType):
    name = "TRAIN:INFER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Split:
        train, colon, infer = str(value).partition(":")
        if not colon or not train.isdigit() or not infer.isdigit() or not int(train) or not int(infer):
            self.fail(f"'{value}' is not TRAIN:INFER, as in 16:8", param, ctx)
        return Split(train=int(train), infer=int(infer))


class _Number(click.ParamType):
    """A finite number within bounds; the error message states the bound."""

    name = "NUMBER"

    def __init__(
        self, *, above: float | None = None, at_least: float | None = None, below: float | None = None
    ) -> None:
        self._above, self._at_least, self._below = above, at_least, below

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"'{value}' is not a number", param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        if self._above is not None and number <= self._above:
            self.fail(f"{value} is not above {self._above:g}", param, ctx)
        if self._at_least is not None and number < self._at_least:
            self.fail(f"{value} is below {self._at_least:g}", param, ctx)
        if self._below is not None and number >= self._below:
            self.fail(f"{value} is not below {self._below:g}", param, ctx)
        return number


_POSITIVE, _NOT_NEGATIVE, _SHARE = _Number(above=0), _Number(at_least=0), _Number(at_least=0, below=1)


@click.command(context_settings=HELP)
@click.argument("items", nargs=-1, metavar="[CONFIG [KEY=VALUE]...]")
@click.option("--seed", type=int, help="Without CONFIG: the random world of this number.")
@click.option("--kills", is_flag=True, help="With --seed: the process is killed and started again.")
@click.option("--agents", is_flag=True, help="With --seed: groups are trajectories in worlds, whatever the seed says.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the spans of the run for ui.perfetto.dev.")
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Training steps.")
@click.option("--mean-length", type=_POSITIVE, help="Tokens of an answer; default: a quarter of response_length.")
@click.option("--sigma", type=_NOT_NEGATIVE, default=1.0, show_default=True, help="Spread of the log of the length.")
@click.option(
    "--prompt-share",
    type=_SHARE,
    default=0.0,
    show_default=True,
    help="Of that spread, what the answers to a prompt have in common.",
)
@click.option("--decode-speed", type=_POSITIVE, default=50.0, show_default=True, help="Tokens/s of a request alone.")
@click.option("--decode-slowdown", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Per further request.")
@click.option("--train-speed", type=_POSITIVE, default=20000.0, show_default=True, help="Tokens/s of all trainers.")
@click.option("--sync-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Seconds of a weight push.")
@click.option("--swap-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Of it with engines stopped.")
@click.option("--reward-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Seconds to score a sample.")
@click.option("--filtered-share", type=_SHARE, help="Of groups, by filter_groups; default: 1 - G / gen_batch_size.")
@click.option("--split", type=_Split(), help="Devices of both sides instead of the config's.")
@click.option("--weights", is_flag=True, help="Alone: weight pushes of 7B to 1T on 16 to 1,024 devices.")
@click.option("--network-gb-s", type=_POSITIVE, default=50.0, show_default=True, help="With --weights: per device.")
@click.option("--json", is_flag=True, help="One JSON object instead of the table.")
def command(items: tuple[str, ...], **options: Any) -> int:
    """The schedule of CONFIG on a virtual clock: step time, staleness and how busy both sides are, beside theory.

    With --seed N alone: the random world N of the property tests, whose invariants are checked. With --weights alone:
    what weight pushes of models from 7B to 1T send over which link, and how long that takes.

    \b
    Example:
      roll-async simulate configs/fully_async_cpu.yaml async_generation_ratio=2 --decode-speed 80
      roll-async simulate --seed 17 --trace trace.json
      roll-async simulate --weights --network-gb-s 25

    Exit codes: 0 simulated, 1 a random world broke an invariant, 2 bad usage or config.
    """
    config = items[0] if items else None
    if options["weights"]:
        if items or options["seed"] is not None:
            raise click.UsageError("--weights stands alone; the push of a CONFIG: roll-async show CONFIG --weights")
        print("\n".join(simulated_weights(options["network_gb_s"])))
        return 0
    if config is None and options["seed"] is None:
        raise click.UsageError("give a CONFIG, or --seed N")
    for flag in ("kills", "agents"):
        if config is not None and options[flag]:
            raise click.UsageError(f"--{flag} goes with --seed alone")
    for override in items[1:]:
        if not OVERRIDE.match(override):
            raise click.UsageError(f"'{override}' is not KEY=VALUE")
    return _simulate(_Options(config=config, overrides=list(items[1:]), **options))


def run_simulate(args: Sequence[str]) -> int:
    """The command; returns the exit code."""
    return execute(command, args, "roll-async simulate")


def _simulate(options: _Options) -> int:
    logger = logging.getLogger("roll_async")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # simulated faults are expected and not worth a warning
    try:
        if options.config is None:
            return _random_world(options)
        return _config(options, options.config)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"roll-async simulate: {error}", file=sys.stderr)
    finally:
        logger.setLevel(level)
    return 2


def _random_world(options: _Options) -> int:
    """Replay one schedule of the property tests."""
    assert options.seed is not None
    make = random_killed_scenario if options.kills else random_scenario
    scenario = make(options.seed, agents=options.agents or None)
    outcome = simulate(scenario)
    if options.trace is not None:
        _write_trace(outcome, options.trace)
    for name in scenario.__slots__:
        print(f"{name}: {getattr(scenario, name)}")
    print(f"end: {outcome.end} at {outcome.ended_s:.3f} s, {outcome.rounds} rounds, {len(outcome.steps)} steps")
    if outcome.queue is not None:
        print(f"groups: {outcome.queue}")
    for finding in outcome.findings:
        print(f"BROKEN {finding}")
    if not outcome.findings:
        print("invariants 1 to 9 hold")
    return _EXIT_BROKEN if outcome.findings else 0


def _config(options: _Options, path: str) -> int:
    """Simulate the schedule of a config and compare it with the synchronous schedule and with theory."""
    config = admit(path, options.overrides).config
    if not isinstance(config, RLVRConfig):
        raise ValueError(f"{path}: only rlvr configs are simulated, this one is agentic")
    speeds = Speeds(
        mean_length=options.mean_length or config.response_length / 4,
        sigma=options.sigma,
        prompt_share=options.prompt_share,
        decode_tokens_per_s=options.decode_speed,
        decode_slowdown=options.decode_slowdown,
        train_tokens_per_s=options.train_speed,
        sync_s=options.sync_s,
        swap_s=options.swap_s,
        reward_s=options.reward_s,
        filtered_share=options.filtered_share,
    )
    split = options.split or split_of(config)
    scenario = scenario_of(config, speeds, split=split, steps=options.steps, seed=options.seed or config.seed)
    outcome = simulate(scenario, check=False)
    if outcome.findings:
        raise ValueError(f"the simulated run broke an invariant: {outcome.findings[0]}")
    figures = figures_of(outcome)
    in_turn = figures_of(simulate(synchronous(scenario), check=False))
    everywhere = Split(train=split.train + split.infer, infer=split.train + split.infer)
    shared = scenario_of(config, speeds, split=everywhere, steps=options.steps, seed=scenario.seed)
    colocated = figures_of(simulate(synchronous(shared), check=False))
    if options.trace is not None:
        _write_trace(outcome, options.trace)
    result = {
        **figures.to_json(),
        "filtered_share": round(scenario.rewards.flat_share, 4),
        "synchronous_step_s": round(in_turn.step_s, 4),
        "speedup": round(in_turn.step_s / figures.step_s, 3),
        "colocated_step_s": round(colocated.step_s, 4),
        "speedup_colocated": round(colocated.step_s / figures.step_s, 3),
        **_theory(scenario, split),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print_pairs(_rows(scenario, result, split))
    return 0


def _theory(scenario: Scenario, split: Split) -> dict[str, float]:
    """Speed-up over the synchronous schedule, in which all devices generate and train in turns."""
    workload = workload_of(scenario, split=split)
    return {
        "theory_speedup_bound": round(workload.speedup_bound, 3),
        "theory_speedup_at_ratio": round(workload.speedup_at(scenario.queue.async_generation_ratio), 3),
        "theory_colocated_bound_s": round(workload.synchronous_s, 3),
    }


def _rows(scenario: Scenario, result: dict[str, float], split: Split) -> list[tuple[str, str]]:
    queue, sync = scenario.queue, scenario.sync
    mean = scenario.lengths.mean_of_cut()
    return [
        ("devices", f"{split.train} train, {split.infer} generate in {len(scenario.engines)} replicas"),
        ("batch", f"{queue.groups_per_batch} groups of {scenario.scheduler.samples_per_group}"),
        ("slots", f"{scenario.slots}, answers {mean:.0f} tokens on average, at most {scenario.lengths.max_tokens}"),
        ("ratio, versions", f"{queue.async_generation_ratio:g}, at most {queue.bound_versions}, {queue.policy.value}"),
        ("push", f"every {queue.trigger_parameter_sync_step} steps, interrupt {sync.interrupt_mode}"),
        ("step time", f"{result['step_s']:.3f} s"),
        ("synchronous", f"{result['synchronous_step_s']:.3f} s with this split, {result['speedup']:.2f} times as long"),
        (
            "in turn, all devices",
            f"{result['colocated_step_s']:.3f} s, {result['speedup_colocated']:.2f} times as long",
        ),
        ("busy", f"engines {result['engines_busy']:.0%} of their slots, trainer {result['trainer_busy']:.0%}"),
        ("staleness of tokens", f"mean {result['staleness_mean']:.2f}, max {result['staleness_max']:.0f} versions"),
        ("since admission", f"mean {result['lag_mean']:.2f}, max {result['lag_max']:.0f} versions"),
        ("dropped, masked", f"{result['dropped_share']:.1%} of groups, {result['masked_share']:.1%} of tokens"),
        ("filtered", _filter_line(scenario)),
        ("length bias", f"{result['length_bias']:.3f}"),
        ("theory, any ratio", f"{result['theory_speedup_bound']:.2f} = 1 + K*L/(N*(mu + mu_train)) over all in turn"),
        ("theory, this ratio", f"{result['theory_speedup_at_ratio']:.2f} with the best split"),
    ]


def _filter_line(scenario: Scenario) -> str:
    if not scenario.scheduler.filter_enabled:
        return "no filter"
    share, extra = scenario.rewards.flat_share, scenario.queue.oversample_groups
    return f"{share:.1%} of groups are assumed to have no spread (--filtered-share), {extra} groups over-sampled"


def _write_trace(outcome: SimOutcome, path: Path) -> None:
    """Write the spans, and the metrics of every step as separate events."""
    trace = Trace(path)
    for track, name, start, end, args in outcome.spans:
        trace.span(track, name, start, end, **args)
    for metrics in outcome.steps:
        now = metrics["time_s"]
        trace.span("steps", f"step {metrics['step']:.0f}", now - metrics["time/step_s"], now, **metrics)
    trace.write()
