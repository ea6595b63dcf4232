"""What a run is told at its end: measured from the records of its steps, and only what the simulator can reproduce."""

import logging
import re
from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.simulator import advice as module
from roll_async.simulator.advice import FEWER, Measured, _limit, advice, as_it_was, changes_of
from roll_async.simulator.from_config import Speeds, scenario_of, split_of
from roll_async.simulator.world import simulate

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"
SMALL = (
    "rollout_batch_size=8", "num_return_sequences_in_group=4", "async_training.max_concurrent_per_server=64",
    "actor_train.training_args.per_device_train_batch_size=8",
)  # fmt: skip
ON_GPUS = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1,2]", "actor_infer.world_size=2")
SLOW_ENGINES = Speeds(
    mean_length=30, sigma=0.6, decode_tokens_per_s=60, decode_slowdown=0.02, train_tokens_per_s=9000, sync_s=0.05
)


def config_of(*overrides):
    return load(CONFIG, [*SMALL, *overrides])


def run(config, speeds=SLOW_ENGINES, steps=14):
    """The records of a run whose truth is known."""
    logger = logging.getLogger("roll_async")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return simulate(scenario_of(config, speeds, split=split_of(config), steps=steps, seed=3), check=False).steps
    finally:
        logger.setLevel(level)


def measured_of(config, steps):
    return Measured.of(steps, slots=config.async_training.max_concurrent_per_server, devices_per_engine=1)


@pytest.fixture(scope="module")
def slow():
    config = config_of()
    return config, run(config)


def test_lengths_and_times_are_those_of_the_run(slow):
    config, steps = slow
    measured = measured_of(config, steps)
    assert measured.mean_length == pytest.approx(30, rel=0.2) and measured.sigma == pytest.approx(0.6, abs=0.15)
    # Of 60 tokens/s alone, each of the others makes a token take 2 % longer.
    assert measured.token_s == pytest.approx((1 + 0.02 * (measured.running - 1)) / 60, rel=0.25)
    assert measured.learn_s == pytest.approx(32 * measured.mean_length / 9000, rel=0.25)
    assert 0.03 < measured.push_s < 0.2 and measured.filtered == 0


@pytest.mark.slow
def test_a_run_that_waits_for_answers_is_told_what_a_higher_ratio_saves_and_the_run_with_it_is_so(slow, monkeypatch):
    monkeypatch.setattr(module, "_SEEDS", 3)
    monkeypatch.setattr(module, "_BUDGET_S", 500)  # a machine under load must not make it say less
    config, steps = slow
    line = advice(config, steps)
    (told,) = re.findall(r"async_generation_ratio=2: (-\d+)% \+- \d+ a step, staleness \d\.\d -> \d\.\d", line)

    def mean(records):
        return (records[-1]["time_s"] - records[3]["time_s"]) / (len(records) - 4)

    truth = mean(run(config_of("async_generation_ratio=2"))) / mean(steps) - 1
    assert int(told) / 100 == pytest.approx(truth, abs=0.12)
    assert "engine more" not in line, "engines on the CPU share its cores"


def test_the_side_that_never_waits_is_named():
    def record(trainer, engines):
        return {"idle/trainer": trainer, "idle/engines": engines}

    assert _limit([record(0.5, 0.0), record(0.6, 0.1)]) == "the engines are the limit (busy 95%, the trainer 45%); "
    assert _limit([record(0.02, 0.4)]) == "the trainer is the limit (busy 98%); "
    assert _limit([record(0.3, 0.3)]) == ""


def test_engines_with_devices_may_be_more_or_fewer_and_every_change_is_another_world(slow):
    config, steps = slow
    config, measured = config_of(*ON_GPUS), measured_of(config, steps)
    world = as_it_was(config, measured, 0.5)
    changes = changes_of(world, config, measured)
    assert {"one engine more", FEWER, "async_generation_ratio=2"} <= changes.keys()
    assert all(changed != world for changed in changes.values())
    assert len(changes["one engine more"].engines) == 3 and len(changes[FEWER].engines) == 1


def test_what_the_user_has_set_and_the_change_does_not_fit_is_named_with_it(slow):
    config, measured = config_of("async_training.max_queue_size=9"), measured_of(*slow)
    (key, *_) = changes_of(as_it_was(config, measured, 0.5), config, measured)
    assert key == "async_generation_ratio=2 async_training.max_queue_size=null"


def test_a_large_batch_of_long_answers_is_simulated_smaller_with_the_same_times(slow):
    config = config_of("rollout_batch_size=64", "response_length=4096")
    measured = Measured(
        step_s=60, learn_s=20, learn_jitter=0.1, push_s=2, swap_s=1, scoring_s=0, mean_length=1000, sigma=1, running=64,
        token_s=0.02, filtered=0,
    )  # fmt: skip
    world = as_it_was(config, measured, 0.5)
    assert world.samples_per_batch == 128 and world.plan.max_steps == 8 and world.lengths.max_tokens == 204
    slots = world.manager.max_concurrent_per_server
    assert slots == 32 and world.lengths.mean_tokens * world.speed.seconds_per_token(32) == pytest.approx(20, rel=0.05)


@pytest.mark.slow
def test_nothing_is_said_of_a_short_run_or_of_one_that_its_simulation_does_not_fit(slow, monkeypatch):
    config, steps = slow
    assert advice(config, steps[:8]) is None
    assert advice(config, [{k: v for k, v in m.items() if k != "engine/token_s"} for m in steps]) is None
    scale, calls = 4, []
    monkeypatch.setattr(module, "_SHARED", (0.5,))
    monkeypatch.setattr(module, "simulate", lambda *a, **k: calls.append(1) or simulate(*a, **k))
    # As if all stood still for three quarters of the time, and no metric said why.
    longer = [
        {
            **m,
            "time/step_s": scale * m["time/step_s"],
            "time/wait_batch_s": m["time/wait_batch_s"] + (scale - 1) * m["time/step_s"],
            "idle/engines": 1 - (1 - m["idle/engines"]) / scale,
            "engine/tokens_per_device_s": m["engine/tokens_per_device_s"] / scale,
        }
        for m in steps
    ]
    assert advice(config, longer) is None and calls == [1]
