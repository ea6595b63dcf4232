"""Groups of trajectories in the simulated run, with worlds that hang, crash, block or cannot be judged: nothing is
trained that was not sampled, and no failure of a world is a reward.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("aiohttp")

from roll_async.agents.worlds import WorldRunner
from roll_async.rollout.group_source import GroupFate
from roll_async.rollout.groups import GroupRunner
from roll_async.simulator.parts.models import EngineFaults, ToolModel, WorldModel
from roll_async.simulator.world import FaultyParts, simulate
from tools.simulated_worlds import Mode, Size, world

SMALL = Size(engines=2, slots_per_engine=8, groups=2, train_s=1.0, sigma=0.6, longest_s=1.2)
PLAYED = WorldModel(moves=3, seconds=0.5, sigma=1.0, timeout_s=20.0)


def a_world(ratio=1.0, steps=4, seed=1, *, samples=3, interrupt="resume", played=PLAYED, **changes):
    calm = world(Mode(name="", ratio=ratio, interrupt=interrupt), SMALL, steps=steps, seed=seed)
    scheduler, plan = calm.scheduler, calm.plan
    return replace(
        calm,
        scheduler=replace(scheduler, samples_per_group=samples),
        plan=replace(plan, samples_per_group=samples),
        worlds=played,
        **changes,
    )


def check(scenario, **others):
    outcome = simulate(scenario, **others)
    assert outcome.end == "finished" and outcome.findings == ()
    return outcome


@pytest.mark.parametrize("interrupt", ["wait", "abort", "resume", "keep"])
@pytest.mark.parametrize(
    "played",
    [PLAYED, replace(PLAYED, windowed=True), replace(PLAYED, strips=True), replace(PLAYED, max_context=40)],
    ids=["one text", "a text per turn", "the template strips turns", "short context"],
)
def test_trajectories_cross_weight_pushes_and_stay_what_was_sampled(played, interrupt):
    check(a_world(interrupt=interrupt, played=played))


@pytest.mark.parametrize("blocking", [False, True], ids=["in the loop", "in workers"])
def test_worlds_that_hang_crash_or_are_not_judged_cost_time_and_are_no_reward(blocking):
    faulty = replace(PLAYED, hang_share=0.1, crash_share=0.1, ungraded_share=0.1, timeout_s=5.0, blocking=blocking)
    outcome = check(a_world(played=faulty))
    assert outcome.steps[-1]["agent/run/outcomes/infra_error"] > 0 and outcome.steps[-1]["agent/retries"] > 0


def test_the_shares_of_a_record_are_those_of_its_step_and_the_run_has_its_own():
    """Weighed with the attempts of each step, the shares of the steps are those of the run."""
    steps = check(a_world(played=replace(PLAYED, crash_share=0.2), steps=5)).steps
    since = [0.0, *(step["agent/attempts"] for step in steps)]
    attempts = [until - before for before, until in pairwise(since)]
    assert min(attempts) > 0, "each step has some"
    for name in ("outcomes/infra_error", "outcomes/solved", "turns_mean"):
        shares = [step[f"agent/{name}"] for step in steps]
        whole = sum(share * count for share, count in zip(shares, attempts, strict=True)) / steps[-1]["agent/attempts"]
        assert steps[-1][f"agent/run/{name}"] == pytest.approx(whole) and len(set(shares)) > 1
    assert steps[0]["agent/run/outcomes/solved"] == steps[0]["agent/outcomes/solved"]


def test_tools_and_deaths_of_engines_change_no_token():
    engines = (EngineFaults(), EngineFaults(crash_at_s=4.0))
    outcome = check(a_world(engines=engines, tools=ToolModel(share=0.6, hangs_share=0.1), max_restarts=1))
    assert outcome.servers.lost_servers == 1


def test_a_worker_that_does_not_start_gets_no_further_world():
    outcome = check(a_world(played=replace(PLAYED, blocking=True, broken_share=0.5, per_worker=2)))
    assert outcome.queue.trained == 8


def test_a_validation_does_not_wait_for_worlds_that_wait_for_it():
    """Trajectories that a validation has set aside keep the places of their tag."""
    calm = a_world(played=replace(PLAYED, max_concurrent=2))
    plan = replace(calm.plan, eval_every=1)
    outcome = check(replace(calm, plan=plan, validation_prompts=2))
    assert all(step["validation/samples"] == 2 for step in outcome.steps)


def test_worlds_of_a_validation_on_replicas_of_its_own_hold_up_no_step():
    """Training takes as long as without it, each result is of one version, and its attempts are not training's."""
    plain = a_world(steps=6, played=replace(PLAYED, max_concurrent=2))
    plan = replace(plain.plan, validation_mode="replicas", eval_every=1)
    apart = replace(
        plain, plan=plan, validation_prompts=3, validation_mode="replicas", validation_engines=(EngineFaults(),)
    )
    alone, beside = check(plain).steps, check(apart).steps
    keys = ("time/step_s", "agent/attempts", "agent/run/outcomes/solved")
    for key in keys:
        assert [step[key] for step in beside[:-1]] == [step[key] for step in alone[:-1]], key
    results = [step for step in beside if "validation/version" in step]
    # The result of step 5 comes with that of step 6, and a record holds one.
    assert [step["validation/version"] for step in results] == [1, 2, 3, 4, 6] and not beside[-1]["validation/skipped"]
    assert all(step["validation/samples"] == 3 and step["validation/other_version"] == 0 for step in results)


def test_what_the_end_of_a_run_aborts_is_not_quarantined():
    """Its tasks come again when the run goes on."""
    calm = a_world(ratio=3.0, steps=3, played=replace(PLAYED, seconds=0.1, moves=4))
    slow = replace(calm.speed, token_s=0.2)
    outcome = check(replace(calm, speed=slow))
    assert outcome.queue.failed == 0 and outcome.servers.aborted > 0


def test_the_same_seed_is_the_same_run():
    first, second = (simulate(a_world(played=replace(PLAYED, hang_share=0.2, timeout_s=5.0))) for _ in range(2))
    assert first.ended_s == second.ended_s and first.spans == second.spans


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_lock_step_waits_for_the_slowest_world_and_redundancy_does_not(ratio):
    tail = replace(PLAYED, seconds=5.0, sigma=1.3, fewest_moves=3)
    ends = {}
    for name, played in (
        ("lock-step", replace(tail, lock_step=True)),
        ("free", tail),
        ("redundant", replace(tail, redundancy=2)),
    ):
        ends[name] = check(a_world(ratio, played=played)).ended_s
    assert ends["redundant"] < ends["free"] < ends["lock-step"]


class TrainsFailures(WorldRunner):
    """A world that failed is a world that was lost: reward 0."""

    async def _attempt(self, task, request):
        from roll_async.schema import Outcome

        ending, session = await super()._attempt(task, request)
        if ending.outcome in (Outcome.INFRA_ERROR, Outcome.GRADER_ERROR):
            ending = replace(ending, outcome=Outcome.FAILED, reward=0.0)
        return ending, session


class TrainsAllTokens(GroupRunner):
    """What worlds said is trained too."""

    def _judge(self, group, kept):
        samples = tuple(replace(s, loss_mask=b"\x01" * len(s.loss_mask)) for s in group.samples)
        return super()._judge(replace(group, samples=samples), kept)


class LosesARow(GroupRunner):
    """Of a trajectory with several texts only the first is kept."""

    def _judge(self, group, kept):
        return super()._judge(replace(group, samples=tuple(rows[0] for rows in group.trajectories)), kept)


class KeepsTooMany(GroupRunner):
    """The redundant trajectories are kept as well, when they have ended."""

    def __init__(self, runner, manager, options):
        whole = options.samples_per_group + options.redundancy
        super().__init__(runner, manager, replace(options, samples_per_group=whole, redundancy=0))


class SwapsRewards(GroupRunner):
    """Rewards of the neighbour."""

    def _judge(self, group, kept):
        rewards = [s.reward for s in group.samples]
        samples = tuple(replace(s, reward=r) for s, r in zip(group.samples, rewards[1:] + rewards[:1], strict=True))
        return super()._judge(replace(group, samples=samples), kept)


class QuarantinesAborted(GroupRunner):
    """A group that was aborted counts as failed."""

    async def run_group(self, prompt, **more):
        outcome = await super().run_group(prompt, **more)
        if outcome.fate is GroupFate.REQUEUED:
            return replace(outcome, fate=GroupFate.FAILED, reason="cancelled: aborted")
        return outcome


class LeavesWorldsOpen(WorldRunner):
    async def _attempt(self, task, request):
        self._parts.worlds.close_soon = lambda world: None
        return await super()._attempt(task, request)


FAULTY = replace(PLAYED, hang_share=0.2, crash_share=0.2, ungraded_share=0.2, timeout_s=5.0)
MUTANTS = {
    "trains failures": (TrainsFailures, 19, FAULTY),
    "trains all tokens": (TrainsAllTokens, 13, PLAYED),
    "loses a row": (LosesARow, 19, replace(PLAYED, windowed=True)),
    "keeps too many": (KeepsTooMany, 3, replace(PLAYED, redundancy=1)),
    "swaps rewards": (SwapsRewards, 19, PLAYED),
    "quarantines what was aborted": (QuarantinesAborted, 9, PLAYED),
    "leaves worlds open": (LeavesWorldsOpen, 20, PLAYED),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_source_of_groups_is_noticed_by_the_invariant_it_breaks(name):
    broken, number, played = MUTANTS[name]
    others = FaultyParts(groups=broken) if issubclass(broken, GroupRunner) else FaultyParts(worlds=broken)
    for seed in range(10):
        findings = simulate(a_world(ratio=2.0, seed=seed, played=played), others=others).findings
        if any(f.startswith(f"invariant {number}:") for f in findings):
            return
    pytest.fail(f"10 runs with a source that {name} passed every check")
