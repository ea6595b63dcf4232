"""Failures that users of other systems reported, as worlds: here they heal, and the run goes on."""

from dataclasses import replace

import pytest

from roll_async.config.staleness import StalenessPolicy
from roll_async.simulator.parts.models import EngineFaults
from roll_async.simulator.world import simulate
from tools.simulated_worlds import Mode, Size, world

SMALL = Size(engines=2, slots_per_engine=8, groups=2, train_s=1.0, sigma=0.6, longest_s=6.0)
HEALTHY = EngineFaults()


def a_world(ratio=1.0, steps=6, **changes):
    return replace(world(Mode(name="", ratio=ratio, interrupt="resume"), SMALL, steps=steps, seed=1), **changes)


HUNG = {
    "replies lost for half a second": EngineFaults(silent_from_s=1.0, silent_for_s=0.5),
    "replies lost for good": EngineFaults(silent_from_s=1.0),
    "a core that computes nothing": EngineFaults(hung_from_s=1.0),
    "every call raises": EngineFaults(errors_from_s=1.0),
    "a line that carries one way only": EngineFaults(half_open_from_s=1.0),
}


@pytest.mark.parametrize("fault", HUNG)
def test_tasks_that_never_return_heal_within_seconds_whatever_the_time_outs(fault):
    """NovaSky-AI/SkyRL#1173. The time-outs of a config that names none: 3,600 s a request, 1,800 s a batch."""
    calm = a_world()
    assert calm.manager.generation_timeout_s == 3600.0 and calm.queue.stall_timeout_s == 1800.0
    healthy, hurt = simulate(calm), simulate(replace(calm, engines=(HEALTHY, HUNG[fault])))
    assert hurt.end == "finished" and hurt.findings == () and hurt.servers.retried > 0
    assert hurt.ended_s < 2 * healthy.ended_s + 75, f"{hurt.ended_s:.0f} s instead of {healthy.ended_s:.0f} s"


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_slow_weight_pushes_do_not_starve_a_run_that_allows_no_staleness(policy):
    """meta-pytorch/torchforge#557: what was begun under the weights that are still being replaced was evicted at once,
    for ever.
    """
    calm = a_world(ratio=0.0)
    slow = replace(calm.train, transfer_s=30.0, swap_s=5.0)
    outcome = simulate(replace(calm, train=slow, queue=replace(calm.queue, policy=policy, max_versions=0)))
    assert outcome.end == "finished" and outcome.findings == () and outcome.queue.dropped_stale == 0


@pytest.mark.parametrize(
    "faults",
    [EngineFaults(refuse_share=0.4), EngineFaults(delay_s=4.0), EngineFaults(duplicate_share=1.0, delay_s=4.0)],
    ids=["rejected", "late", "doubled"],
)
def test_rejected_late_and_doubled_messages_change_no_token(faults):
    """verl-project/verl#7933, #7940. The invariants compare every token, log-prob and version with what was sampled."""
    calm = a_world(engines=(HEALTHY, faults))
    outcome = simulate(replace(calm, manager=replace(calm.manager, request_retries=8)))
    assert outcome.end == "finished" and outcome.findings == () and outcome.queue.trained == 12


@pytest.mark.parametrize("mode", ["wait", "resume", "keep", "abort"])
def test_a_push_in_the_middle_of_generation_ends_neither_rollout_nor_run(mode):
    """verl-project/verl#7611: a push cancelled what was being generated, and that took the rollout process with it."""
    calm = a_world(ratio=2.0)
    slow = replace(calm.train, transfer_s=3.0, swap_s=1.0)
    outcome = simulate(replace(calm, train=slow, sync=replace(calm.sync, interrupt_mode=mode)))
    assert outcome.end == "finished" and outcome.findings == () and outcome.queue.trained == 12


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("num_prompts", [5, 6, 7])
def test_the_end_of_the_data_inside_of_a_step_ends_the_run_and_says_so(ratio, num_prompts):
    """NVIDIA-NeMo/RL#2899: the data had one pass, the run wanted more, and the trainer waited for ever."""
    calm = a_world(ratio=ratio, steps=50)
    outcome = simulate(replace(calm, num_prompts=num_prompts))
    assert outcome.end == "end of data" and outcome.findings == ()
    assert outcome.queue.trained == 2 * (num_prompts // 2) and outcome.ended_s < 60


def test_answers_that_a_push_discards_are_counted():
    calm = a_world(ratio=2.0, engines=(HEALTHY,))
    outcome = simulate(replace(calm, sync=replace(calm.sync, interrupt_mode="abort")))
    assert outcome.end == "finished" and outcome.findings == ()
    assert outcome.servers.aborted > 0 and outcome.servers.aborted_tokens > 0
    assert outcome.steps[-1]["length_bias/aborted_tokens"] > 0
