"""`roll-async simulate`: the schedule of a config with figures beside theory, or a random world by number."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from roll_async.config.api import ConfigError, load_with_warnings
from roll_async.config.loading.compose import OVERRIDE
from roll_async.config.schema import RLVRConfig
from roll_async.observe.trace import Trace
from roll_async.simulator.figures import figures_of
from roll_async.simulator.from_config import Speeds, Split, scenario_of, split_of, synchronous, workload_of
from roll_async.simulator.scenario import Scenario, random_killed_scenario, random_scenario
from roll_async.simulator.world import SimOutcome, simulate

_EXIT_BROKEN = 1


class _Usage(ValueError):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise _Usage(message)


def run_simulate(args: Sequence[str]) -> int:
    """Exit 0: simulated; 1: a random world broke an invariant; 2: bad usage or config, one line on stderr."""
    logger = logging.getLogger("roll_async")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # faults of a simulated world are no news
    try:
        options = _parse(args)
        if options.seed is not None and options.config is None:
            return _random_world(options)
        return _config(options)
    except _Usage as error:
        print(f"roll-async simulate: {error}", file=sys.stderr)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"roll-async simulate: {error}", file=sys.stderr)
    finally:
        logger.setLevel(level)
    return 2


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="roll-async simulate", description=__doc__, add_help=True)
    parser.add_argument("config", nargs="?", help="a config; further KEY=VALUE override it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seed", type=int, help="without CONFIG: the random world of this number")
    parser.add_argument("--kills", action="store_true", help="with --seed: the process is killed and started again")
    parser.add_argument("--trace", type=Path, help="write the spans of the run for ui.perfetto.dev")
    parser.add_argument("--steps", type=_positive_int, default=40, help="training steps (40)")
    parser.add_argument("--mean-length", type=_positive, help="tokens of an answer (a quarter of response_length)")
    parser.add_argument("--sigma", type=_not_negative, default=1.0, help="spread of the log of the length (1.0)")
    parser.add_argument("--decode-speed", type=_positive, default=50.0, help="tokens/s of a request alone (50)")
    parser.add_argument("--decode-slowdown", type=_not_negative, default=0.0, help="per further request (0)")
    parser.add_argument("--train-speed", type=_positive, default=20000.0, help="tokens/s of all trainers (20000)")
    parser.add_argument("--sync-s", type=_not_negative, default=0.0, help="seconds of a weight push (0)")
    parser.add_argument("--swap-s", type=_not_negative, default=0.0, help="of it with engines stopped (0)")
    parser.add_argument("--reward-s", type=_not_negative, default=0.0, help="seconds to score a sample (0)")
    parser.add_argument("--filtered-share", type=_share, help="of groups, by filter_groups (1 - G / gen_batch_size)")
    parser.add_argument("--split", type=_split, help="TRAIN:INFER devices instead of the config's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_intermixed_args(list(args))
    if options.config is None and options.seed is None:
        raise _Usage("give a CONFIG, or --seed N")
    if options.config is not None and options.kills:
        raise _Usage("--kills goes with --seed alone")
    for override in options.overrides:
        if not OVERRIDE.match(override):
            raise _Usage(f"'{override}' is not KEY=VALUE")
    return options


def _random_world(options: argparse.Namespace) -> int:
    """Replay one schedule of the property tests."""
    scenario = (random_killed_scenario if options.kills else random_scenario)(options.seed)
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


def _config(options: argparse.Namespace) -> int:
    """The schedule of a config, beside the synchronous one and theory."""
    config = load_with_warnings(options.config, options.overrides).config
    if not isinstance(config, RLVRConfig):
        raise _Usage(f"{options.config}: only rlvr configs are simulated, this one is agentic")
    speeds = Speeds(
        mean_length=options.mean_length or config.response_length / 4,
        sigma=options.sigma,
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
    print(json.dumps(result) if options.json else _table(scenario, result, split))
    return 0


def _theory(scenario: Scenario, split: Split) -> dict[str, float]:
    """Against all devices generating and training in turn."""
    workload = workload_of(scenario, split=split)
    return {
        "theory_speedup_bound": round(workload.speedup_bound, 3),
        "theory_speedup_at_ratio": round(workload.speedup_at(scenario.queue.async_generation_ratio), 3),
        "theory_colocated_bound_s": round(workload.synchronous_s, 3),
    }


def _table(scenario: Scenario, result: dict[str, float], split: Split) -> str:
    queue, sync = scenario.queue, scenario.sync
    mean = scenario.lengths.mean_of_cut()
    rows = [
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
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _filter_line(scenario: Scenario) -> str:
    if not scenario.scheduler.filter_enabled:
        return "no filter"
    share, extra = scenario.rewards.flat_share, scenario.queue.oversample_groups
    return f"{share:.1%} of groups are assumed to have no spread (--filtered-share), {extra} groups over-sampled"


def _write_trace(outcome: SimOutcome, path: Path) -> None:
    """Spans, and the metrics of every step as events of their own."""
    trace = Trace(path)
    for track, name, start, end, args in outcome.spans:
        trace.span(track, name, start, end, **args)
    for metrics in outcome.steps:
        now = metrics["time_s"]
        trace.span("steps", f"step {metrics['step']:.0f}", now - metrics["time/step_s"], now, **metrics)
    trace.write()


def _positive(text: str) -> float:
    number = _number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _not_negative(text: str) -> float:
    number = _number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _share(text: str) -> float:
    number = _not_negative(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not below 1")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"'{text}' is not a finite number")
    return number


def _positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _split(text: str) -> Split:
    train, colon, infer = text.partition(":")
    if not colon or not train.isdigit() or not infer.isdigit() or not int(train) or not int(infer):
        raise argparse.ArgumentTypeError(f"'{text}' is not TRAIN:INFER, as in 16:8")
    return Split(train=int(train), infer=int(infer))
