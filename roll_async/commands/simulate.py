"""`roll-async simulate`: the schedule of a config with figures beside theory, or a random world by number."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from roll_async.commands.command_line import HELP, POSITIVE, Number, print_pairs
from roll_async.commands.configs.weights import simulated_weights
from roll_async.config.api import ConfigError
from roll_async.config.schema import RLVRConfig, roles_on_engine_devices
from roll_async.config.yaml.compose import OVERRIDE
from roll_async.launch.checks.gate import check_supported
from roll_async.observe.trace import Trace
from roll_async.simulator.figures import figures_of
from roll_async.simulator.from_config import Speeds, Split, scenario_of, split_of, synchronous, workload_of
from roll_async.simulator.scenario import Scenario, random_branched_scenario, random_killed_scenario, random_scenario
from roll_async.simulator.world import SimOutcome, simulate

_EXIT_BROKEN = 1
_TYPED = click.core.ParameterSource.COMMANDLINE


class _Split(click.ParamType):
    name = "TRAIN:INFER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Split:
        train, colon, infer = str(value).partition(":")
        if not colon or not train.isdigit() or not infer.isdigit() or not int(train) or not int(infer):
            self.fail(f"'{value}' is not TRAIN:INFER, as in 16:8", param, ctx)
        return Split(train=int(train), infer=int(infer))


_NOT_NEGATIVE, _SHARE = Number(min=0), Number(min=0, max=1, max_open=True)


@click.command(context_settings=HELP)
@click.argument("items", nargs=-1, metavar="[CONFIG [KEY=VALUE]...]")
@click.option("--seed", type=int, help="Without CONFIG: the random world of this number.")
@click.option("--kills", is_flag=True, help="With --seed: the process is killed and started again.")
@click.option(
    "--branches",
    is_flag=True,
    help="With --seed: as --kills, and runs go back to a checkpoint, or others take the folder.",
)
@click.option("--agents", is_flag=True, help="With --seed: groups are trajectories in worlds, whatever the seed says.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the spans of the run for ui.perfetto.dev.")
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Training steps.")
@click.option("--mean-length", type=POSITIVE, help="Tokens of an answer; default: a quarter of response_length.")
@click.option("--sigma", type=_NOT_NEGATIVE, default=1.0, show_default=True, help="Spread of the log of the length.")
@click.option(
    "--prompt-share",
    type=_SHARE,
    default=0.0,
    show_default=True,
    help="Of that spread, what the answers to a prompt have in common.",
)
@click.option(
    "--decode-speed",
    "decode_tokens_per_s",
    type=POSITIVE,
    default=50.0,
    show_default=True,
    help="Tokens/s of a request alone.",
)
@click.option("--decode-slowdown", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Per further request.")
@click.option(
    "--train-speed",
    "train_tokens_per_s",
    type=POSITIVE,
    default=20000.0,
    show_default=True,
    help="Tokens/s of all trainers.",
)
@click.option("--sync-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Seconds of a weight push.")
@click.option("--swap-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Of it with engines stopped.")
@click.option("--reward-s", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Seconds to score a sample.")
@click.option("--filtered-share", type=_SHARE, help="Of groups, by filter_groups; default: 1 - G / gen_batch_size.")
@click.option("--split", type=_Split(), help="Devices of both sides instead of the config's.")
@click.option("--weights", is_flag=True, help="Alone: weight pushes of 7B to 1T on 16 to 1,024 devices.")
@click.option("--network-gb-s", type=POSITIVE, default=50.0, show_default=True, help="With --weights: per device.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def command(
    items: tuple[str, ...],
    seed: int | None,
    weights: bool,
    network_gb_s: float,
    kills: bool,
    branches: bool,
    agents: bool,
    **options: Any,
) -> int:
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
    if weights and items:
        raise click.UsageError("--weights stands alone; the push of a CONFIG: roll-async show CONFIG --weights")
    if not weights and not items and seed is None:
        raise click.UsageError("give a CONFIG, or --seed N")
    context = click.get_current_context()
    typed = [p for p in context.command.params if context.get_parameter_source(p.name or "") is _TYPED]
    mode, effective = "--seed alone", {"seed", "kills", "branches", "agents", "trace"}
    if weights:
        mode, effective = "--weights", {"weights", "network_gb_s"}
    elif items:
        mode, effective = "CONFIG", {"items", "seed", *options}
    if idle := [param.opts[0] for param in typed if param.name not in effective]:
        raise click.UsageError(f"{', '.join(idle)}: no effect with {mode}")
    if weights:
        print("\n".join(simulated_weights(network_gb_s)))
        return 0
    for override in items[1:]:
        if not OVERRIDE.match(override):
            raise click.UsageError(f"'{override}' is not KEY=VALUE")
    logger = logging.getLogger("roll_async")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # simulated faults are expected and not worth a warning
    try:
        if items:
            return _config(items[0], items[1:], seed=seed, **options)
        assert seed is not None
        killed = random_killed_scenario if kills else random_scenario
        make = random_branched_scenario if branches else killed
        return _random_world(make(seed, agents=agents or None), options["trace"])
    except ConfigError as error:
        print(error, file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"roll-async simulate: {error}", file=sys.stderr)
    finally:
        logger.setLevel(level)
    return 2


def _random_world(scenario: Scenario, trace: Path | None) -> int:
    """Replay one schedule of the property tests."""
    outcome = simulate(scenario)
    if trace is not None:
        _write_trace(outcome, trace)
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


def _config(
    path: str,
    overrides: Sequence[str],
    *,
    seed: int | None,
    trace: Path | None,
    steps: int,
    split: Split | None,
    as_json: bool,
    mean_length: float | None,
    **speeds: float,
) -> int:
    """Simulate the schedule of a config and compare it with the synchronous schedule and with theory. `speeds`: the
    further fields of `Speeds`.
    """
    config = check_supported(path, overrides).generating
    if not isinstance(config, RLVRConfig):
        raise ValueError(f"{path}: only rlvr configs are simulated, this one is agentic")
    if config.colocation == "resident" and roles_on_engine_devices(config):
        raise ValueError(
            "colocation=resident: trainer and engines compute on the same devices at the same time, and what they take "
            "from each other is not simulated; give colocation=turns async_generation_ratio=0, or devices of their own"
        )
    assumed = Speeds(mean_length=mean_length or config.response_length / 4, **speeds)
    split = split or split_of(config)
    scenario = scenario_of(config, assumed, split=split, steps=steps, seed=config.seed if seed is None else seed)
    outcome = simulate(scenario, check=False)
    if outcome.findings:
        raise ValueError(f"the simulated run broke an invariant: {outcome.findings[0]}")
    figures = figures_of(outcome)
    in_turn = figures_of(simulate(synchronous(scenario), check=False))
    everywhere = Split(train=split.train + split.infer, infer=split.train + split.infer)
    shared = scenario_of(config, assumed, split=everywhere, steps=steps, seed=scenario.seed)
    colocated = figures_of(simulate(synchronous(shared), check=False))
    if trace is not None:
        _write_trace(outcome, trace)
    result = {
        **figures.to_json(),
        "filtered_share": round(scenario.rewards.flat_share, 4),
        "synchronous_step_s": round(in_turn.step_s, 4),
        "speedup": round(in_turn.step_s / figures.step_s, 3),
        "colocated_step_s": round(colocated.step_s, 4),
        "speedup_colocated": round(colocated.step_s / figures.step_s, 3),
        **_theory(scenario, split),
    }
    if as_json:
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
    if scenario.scheduler.filter is None:
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
        trace.counters(now, {key: metrics[key] for key in ("groups/buffered", "groups/in_flight", "staleness/mean")})
    trace.write()
