"""Learning rates over a run: ordinary batches, batches of any number of rows, batches in parts, and after a resume."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.trainer.megatron.schedule import Schedule
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_sync_cpu.yaml"
MORE = "rollout_batch_size=128"
PLAN = OptimizerSettings(
    learning_rate=0.5, schedule="linear", warmup_steps=4, total_steps=20, steps_per_update=2, steps_per_training_step=2
)


def run(settings, steps_of_updates):
    schedule = Schedule(settings)
    return [schedule.rates(number) for number in steps_of_updates]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_rate_is_that_of_its_optimizer_step_where_all_batches_are_alike(kind):
    expected = []
    for step in range(20):
        done = (step - 4) / 16
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]
        expected.append(0.5 * (step + 1) / 4 if step < 4 else 0.5 * shape)
    assert [rate for rates in run(replace(PLAN, schedule=kind), [2] * 10) for rate in rates] == expected


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_batches_of_more_rows_than_trajectories_end_the_schedule_with_the_run(schedule):
    settings = replace(PLAN, schedule=schedule)
    plain, rich = run(settings, [2] * 10), run(settings, [2, 7, 40, 2, 9, 1, 2, 30, 2, 11])
    assert [rates[0] for rates in rich] == [rates[0] for rates in plain], "every batch begins where it would"
    assert all(0 < rate <= 0.5 for rates in rich for rate in rates)
    assert all(a >= b for rates in rich[2:] for a, b in zip(rates, rates[1:], strict=False))
    assert max(rich[1]) == 0.5 == rich[2][0], "warm-up has ended after two batches, whatever their size"


@pytest.mark.parametrize(
    ("overrides", "per_step", "parts"),
    [
        ((), 1, 1),
        (("ppo_epochs=3",), 3, 1),
        ((MORE,), 4, 1),
        ((MORE, "async_training.require_batches=1"), 4, 4),
    ],
)
def test_the_schedule_spans_the_optimizer_steps_that_the_config_plans(overrides, per_step, parts):
    config = load(CONFIG, [*overrides, "max_steps=6"])
    settings = MegatronSettings.of(config, config.actor_train).optimizer
    assert settings.steps_per_training_step == config.optimizer_steps_per_batch == per_step
    assert (settings.total_steps, settings.steps_per_update) == (6 * per_step, per_step // parts)
    linear = replace(settings, schedule="linear", warmup_steps=0)
    rates = [rate for part in run(linear, [per_step // parts] * (6 * parts)) for rate in part]
    assert rates == [linear.learning_rate * (1 - step / len(rates)) for step in range(6 * per_step)]


def test_a_critic_is_counted_by_its_own_mini_batches_takes_no_epochs_and_trains_while_it_warms_up():
    critic = {"training_args": {"learning_rate": 1e-5}, "strategy_args": {"strategy_name": "megatron_train"}}
    edits = [MORE, "adv_estimator=gae", "ppo_epochs=3", f"critic={json.dumps(critic)}", "max_steps=6"]
    edits.append("algorithm.critic_warmup=2")
    config = load(CONFIG, edits)
    settings = MegatronSettings.of(config, config.critic).optimizer
    updates = config.samples_per_batch // config.critic.mini_batch_size
    assert (settings.steps_per_update, settings.total_steps) == (updates, 6 * updates) and updates > 1
    actor = MegatronSettings.of(config, config.actor_train).optimizer
    assert actor.total_steps == (6 - 2) * actor.steps_per_training_step, "its schedule, too, ends with the run"


@pytest.mark.parametrize("number", [2, 7])
def test_a_resumed_run_goes_on_where_it_was(number):
    schedule = Schedule(PLAN)
    for _ in range(6):
        schedule.optimizer_steps += len(schedule.rates(number))
    again = Schedule(PLAN)
    again.restore(schedule.state(), training_step=6)
    assert (again.optimizer_steps, again.rates(number)) == (6 * number, schedule.rates(number))


def test_a_resume_with_other_mini_batches_is_at_the_same_part_of_the_run():
    schedule = Schedule(PLAN)
    for _ in range(5):
        schedule.rates(2)
    finer = replace(PLAN, warmup_steps=0, total_steps=80, steps_per_update=8, steps_per_training_step=8)
    again = Schedule(finer)
    again.restore(schedule.state(), training_step=5)
    assert again.rates(8)[0] == 0.25


@pytest.mark.parametrize(("optimizer_steps", "position"), [(12, 12), (36, 12), (8, 8)])
def test_a_checkpoint_that_only_counts_optimizer_steps_is_read(optimizer_steps, position):
    """Ordinary; of trajectories of several turns, which counted three for one; and after two steps of critic_warmup."""
    schedule, plain = Schedule(PLAN), Schedule(PLAN)
    schedule.restore({"optimizer_steps": optimizer_steps}, training_step=6)
    for _ in range(position // 2):
        plain.rates(2)
    assert (schedule.optimizer_steps, schedule.rates(2)) == (optimizer_steps, plain.rates(2))
