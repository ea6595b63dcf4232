"""Worlds with one thing wrong, small enough to say exactly what must come of them."""

from dataclasses import replace

import pytest

from roll_async.inference.engine_host import PROGRESS_INTERVAL_S
from roll_async.simulator.parts.models import EngineFaults, RewardModel
from roll_async.simulator.world import simulate
from tools.simulated_worlds import Mode, Size, world

SMALL = Size(engines=2, slots_per_engine=8, groups=2, train_s=1.0, sigma=0.6, longest_s=6.0)


def a_world(ratio=1.0, steps=6, **changes):
    base = world(Mode(name="", ratio=ratio, interrupt="resume"), SMALL, steps=steps, seed=1)
    return replace(base, **changes)


def test_a_healthy_world_breaks_nothing_and_keeps_both_sides_at_work():
    outcome = simulate(a_world())
    assert outcome.end == "finished" and outcome.findings == () and len(outcome.steps) == 6
    assert outcome.queue.trained == 12 and outcome.servers.late_results == 0


def test_a_healthy_world_whose_answers_are_all_cut_at_one_length_raises_no_alarm_about_equal_ones(caplog):
    cut = a_world()
    cut = replace(
        cut,
        lengths=replace(cut.lengths, mean_tokens=6000.0, max_tokens=6000, sigma=0.0),
        scheduler=replace(cut.scheduler, sampling=replace(cut.scheduler.sampling, max_new_tokens=6000)),
        speed=replace(cut.speed, token_s=0.001, token_s_per_request=0.0),
    )
    assert simulate(cut).end == "finished"
    assert [record for record in caplog.records if "are one answer of" in record.getMessage()] == []


def test_when_the_last_engine_dies_the_run_ends_with_the_step_under_way_and_says_which_it_was():
    crash = EngineFaults(crash_at_s=3.0)
    outcome = simulate(a_world(engines=(crash, replace(crash, crash_at_s=4.0))))
    assert outcome.end.startswith("ConnectionError: no engine is left; the last one, engine-1, was lost: ")
    assert 4.0 <= outcome.ended_s <= 5.0 and len(outcome.steps) == 2
    assert len(outcome.findings) == 1 and outcome.findings[0].startswith("invariant 6: the run ended with 'Conn")


def test_engines_that_are_started_again_carry_the_run_to_its_end():
    crash = EngineFaults(crash_at_s=3.0)
    outcome = simulate(a_world(engines=(crash, replace(crash, crash_at_s=3.2)), max_restarts=2))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.servers.lost_servers == 2 and outcome.servers.returned_servers == 2


def test_a_death_costs_what_was_generated_since_the_last_report_and_no_more():
    """Answers of 5 minutes on engines of which one dies after 4: without reports all of that would come again."""
    calm = a_world(engines=(EngineFaults(), EngineFaults()), steps=1)
    patient = replace(
        calm,
        lengths=replace(calm.lengths, mean_tokens=3000.0, max_tokens=3000, sigma=0.0),
        scheduler=replace(calm.scheduler, sampling=replace(calm.scheduler.sampling, max_new_tokens=3000)),
        speed=replace(calm.speed, token_s=0.1, token_s_per_request=0.0),
        manager=replace(calm.manager, max_concurrent_per_server=64),  # one engine alone has room for all
    )
    whole = simulate(patient)
    killed = simulate(replace(patient, engines=(EngineFaults(), EngineFaults(crash_at_s=240.0))))
    assert whole.end == killed.end == "finished" and whole.findings == killed.findings == ()
    assert killed.servers.lost_servers == 1 and killed.servers.resumed == killed.servers.retried > 0
    assert whole.ended_s < killed.ended_s < whole.ended_s + PROGRESS_INTERVAL_S + 0.5


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("interrupt", ["wait", "resume"])
def test_a_frozen_engine_costs_half_a_minute_where_requests_may_take_longer_than_the_trainer_waits(interrupt, restarts):
    """The time-outs of a config that names none: a batch may be missing for 1,800 s, a request may take 3,600 s."""
    calm = a_world(ratio=0.0, engines=(EngineFaults(), EngineFaults(frozen_from_s=0.5)), max_restarts=restarts)
    assert calm.manager.generation_timeout_s > calm.queue.stall_timeout_s > calm.manager.interrupt_timeout_s == 30
    outcome = simulate(replace(calm, sync=replace(calm.sync, interrupt_mode=interrupt, interrupt_timeout_s=30.0)))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.servers.lost_servers == 1 and outcome.servers.retried > 0
    assert outcome.ended_s < 30 + 5 + 1 + 1.2 * simulate(a_world(ratio=0.0)).ended_s


def test_a_scorer_outage_is_waited_out_and_loses_no_group():
    rewards = RewardModel(seconds=0.1, outage_from_s=2.0, outage_for_s=60.0)
    outcome = simulate(a_world(rewards=rewards))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.queue.failed == 0 and outcome.queue.trained == 12 and outcome.ended_s > 60


def test_prompts_that_can_never_be_scored_are_quarantined_with_their_reason():
    rewards = RewardModel(seconds=0.1, broken_share=0.3)
    calm = a_world()
    patience = replace(calm.scheduler, scoring=replace(calm.scheduler.scoring, outage_patience_s=5.0))
    outcome = simulate(replace(calm, rewards=rewards, scheduler=patience))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.queue.failed > 0 and all("the scorer is down" in reason for reason in outcome.queue.failures)


def test_silent_engines_lose_their_requests_to_the_others():
    silent = EngineFaults(silent_from_s=1.0)
    calm = a_world()
    manager = replace(calm.manager, generation_timeout_s=30.0)
    outcome = simulate(replace(calm, engines=(EngineFaults(), silent), manager=manager))
    assert outcome.end == "finished" and outcome.findings == () and outcome.servers.retried > 0


def test_a_trainer_that_hangs_ends_the_run_at_its_deadline_with_its_name():
    calm = a_world()
    train = replace(calm.train, hangs_at_step=3, rpc_timeout_s=40.0)
    outcome = simulate(replace(calm, train=train))
    assert outcome.end == "StallError: trainer: step 3 did not return within 40 s" and outcome.findings == ()
    began = max(end for track, name, _, end, _ in outcome.spans if (track, name) == ("trainer", "learn"))
    assert len(outcome.steps) == 2 and 40.0 <= outcome.ended_s - began < 50.0


@pytest.mark.parametrize("interrupt", ["wait", "abort", "resume", "keep"])
def test_replicas_join_and_leave_during_a_run_and_every_prompt_is_trained_once(interrupt):
    calm = a_world(steps=12)
    calm = replace(calm, num_prompts=24, sync=replace(calm.sync, interrupt_mode=interrupt))
    outcome = simulate(replace(calm, scales=((1.5, 4), (6.0, 1), (9.0, 3))))
    assert outcome.end == "finished" and outcome.findings == () and outcome.queue.trained == 24
    assert outcome.servers.lost_servers == outcome.servers.returned_servers == outcome.servers.retried == 0
    assert [outcome.engine_busy[f"engine-{i}"] > 0 for i in range(4)] == [True, True, True, True]


def test_devices_that_never_come_stop_nothing():
    calm = a_world(devices_after_s=1e9)
    outcome = simulate(replace(calm, scales=((1.0, 4),)))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.ended_s == simulate(calm).ended_s and len(outcome.engine_busy) == 2
