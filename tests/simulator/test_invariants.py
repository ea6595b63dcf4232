"""The invariants of the design over random schedules of the real loops, a fifth of them with trajectories in worlds.

A failing seed is replayed by number: roll-async simulate --seed N --trace out.json
"""

import pytest

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_async.simulator.scenario import random_branched_scenario, random_killed_scenario, random_scenario
from roll_async.simulator.world import simulate

SEEDS = st.integers(0, 2**32 - 1)
EVERY_SEED_COUNTS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def many(count):
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=EVERY_SEED_COUNTS)


@many(500)
@given(seed=SEEDS)
def test_invariants_hold_whatever_the_schedule_and_the_faults(seed):
    outcome = simulate(random_scenario(seed))
    assert not outcome.findings, (f"roll-async simulate --seed {seed}", outcome.end, outcome.findings)


@pytest.mark.parametrize(("make", "seed"), [(random_scenario, 3940), (random_branched_scenario, 593)])
def test_worlds_that_once_had_a_finding_have_none(make, seed):
    """3940: a run that is asked to stop during a validation. 593: another role fails while the train loop drops its
    validation.
    """
    outcome = simulate(make(seed))
    assert not outcome.findings, (outcome.end, outcome.findings)


@many(100)
@given(seed=SEEDS)
def test_invariants_hold_over_kills_at_random_instants(seed):
    outcome = simulate(random_killed_scenario(seed))
    assert not outcome.findings, (f"roll-async simulate --seed {seed} --kills", outcome.end, outcome.findings)


@many(60)
@given(seed=SEEDS)
def test_invariants_hold_over_rollbacks_restarts_and_other_runs_in_the_folder(seed):
    outcome = simulate(random_branched_scenario(seed))
    assert not outcome.findings, (f"roll-async simulate --seed {seed} --branches", outcome.end, outcome.findings)
