"""Engines that do not answer, at a pause and a resume or at all. The invariants hold, and only the loss of the last one
ends a run.
"""

from dataclasses import replace

import pytest

from roll_async.simulator.parts.models import EngineFaults, TrainModel
from roll_async.simulator.scenario import random_scenario
from roll_async.simulator.world import simulate

SILENCES = {"deaf": EngineFaults(deaf_from_s=8.0), "frozen": EngineFaults(frozen_from_s=8.0)}
MODES = ("wait", "abort", "resume", "keep")


def world(*engines, mode="resume", transport="shm", max_restarts=0):
    base = random_scenario(0)
    return replace(
        base,
        engines=engines,
        num_prompts=None,
        stop_at_s=None,
        max_restarts=max_restarts,
        queue=replace(base.queue, async_generation_ratio=2.0, trigger_parameter_sync_step=1, max_versions=None),
        sync=replace(base.sync, interrupt_mode=mode, transport=transport, interrupt_timeout_s=5.0),
        plan=replace(base.plan, sync_every=1, max_steps=12),
        train=TrainModel(step_s=2.0),
    )


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("silence", SILENCES)
def test_a_silent_replica_is_restarted_and_the_run_goes_on(silence, mode, transport):
    outcome = simulate(world(EngineFaults(), SILENCES[silence], mode=mode, transport=transport, max_restarts=1))
    assert outcome.findings == () and outcome.end == "finished"
    assert (outcome.servers.lost_servers, outcome.servers.returned_servers) == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_the_only_replica_may_be_silent_if_it_can_be_started_again(mode):
    outcome = simulate(world(SILENCES["deaf"], mode=mode, max_restarts=1))
    assert outcome.findings == () and outcome.end == "finished"


ENDS = {
    "deaf": "ConnectionError: no engine is left; the last one, engine-0, was lost: did not pause within 5 s",
    "frozen": "ConnectionError: no engine is left; the last one, engine-0, was lost: no answer to a heartbeat for 30 s",
}


@pytest.mark.parametrize("silence", ENDS)
def test_without_a_replica_left_the_run_ends_soon_and_says_why(silence):
    outcome = simulate(world(SILENCES[silence]))
    assert outcome.end.startswith(ENDS[silence])
    assert outcome.ended_s < 8.0 + outcome.scenario.patience_s
    assert [f for f in outcome.findings if not f.startswith("invariant 6: the run ended with")] == []
