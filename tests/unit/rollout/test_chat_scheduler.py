"""Groups: whole or not at all, judged by their spread, never trained on an outage."""

import asyncio
from array import array
from contextlib import asynccontextmanager

import pytest

from roll_async.rollout.chat_scheduler import ChatCompletionScheduler, SchedulerOptions
from roll_async.rollout.dispatch.engine_pool import EnginePool
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import GeneratedTooMany
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate
from roll_async.rollout.scoring import ScoringOptions
from roll_async.schema import FinishReason, Reward, RewardStatus, SamplingParams


@asynccontextmanager
async def scheduling(replicas, scorer, manager_options=None, **options):
    manager = EnginePool(replicas, ManagerOptions(**manager_options or {}))
    await manager.start()
    options = {"samples_per_group": 4, "sampling": SamplingParams(max_new_tokens=10), **options}
    scheduler = ChatCompletionScheduler(manager, scorer, SchedulerOptions(**options))
    scheduler.manager = manager
    try:
        yield scheduler
    finally:
        await manager.close()


def by_sample(*scores):
    """Sample i of a group gets scores[i]."""
    return lambda prompt, sample: scores[int(sample.sample_id.rpartition("/")[2])]


def half(prompt, sample):
    return float(sample.sample_id.endswith(("0", "2")))


def test_a_group_has_every_sample_with_its_own_score(run, build, replica_class, scorer_class):
    async def go():
        async with scheduling(
            [replica_class("a", version=3)], scorer_class(by_sample(1.0, 0.5, 0.25, 0.0))
        ) as scheduler:
            prompt = build.prompt(ids=(1, 2, 3))
            outcome = await scheduler.run_group(prompt, group_id=7, attempt=2, admitted_version=3)
            group = outcome.group
            assert outcome.fate is GroupFate.KEPT and (group.group_id, group.admitted_version) == (7, 3)
            assert group.prompt is prompt and [s.reward.score for s in group.samples] == [1.0, 0.5, 0.25, 0.0]
            assert [s.sample_id for s in group.samples] == [f"7.2/{i}" for i in range(4)]
            for sample in group.samples:
                assert sample.response_token_ids.tolist() == list(range(1003, 1013))
                assert sample.loss_mask == b"\x01" * 10 and sample.version_runs == ((3, 10),)
            assert (group.admitted_s, group.finished_s) == pytest.approx((0, 10.5))

    run(go())


def test_a_supervised_row_is_answered_by_itself_and_unscored_domains_ask_nobody(
    run, build, replica_class, scorer_class
):
    async def go():
        replica = replica_class("a")
        scorer = scorer_class(lambda p, s: pytest.fail("asked"))
        unscored = ScoringOptions(unscored=frozenset({"demos", "imitate"}))
        async with scheduling([replica], scorer, scoring=unscored, filter=GroupFilter()) as scheduler:
            shown = build.prompt(domain="demos", answer_ids=array("i", [3, 4, 2]))
            outcome = await scheduler.run_group(shown, group_id=5, admitted_version=2)
            (sample,) = outcome.group.samples
            assert outcome.fate is GroupFate.KEPT and not replica.submitted
            assert sample.response_token_ids.tolist() == [3, 4, 2] and sample.loss_mask == b"\x01" * 3
            assert sample.version_runs == ((2, 3),) and sample.reward.score == 0.0
            imitated = await scheduler.run_group(build.prompt(domain="imitate"), group_id=6)
            assert imitated.fate is GroupFate.KEPT, "four scores of 0 are no reason to filter it"
            assert [s.reward.score for s in imitated.group.samples] == [0.0] * 4

    run(go())


def test_each_sample_is_scored_the_moment_it_is_complete(run, build, replica_class, scorer_class):
    async def go():
        scored_s = []
        scorer = scorer_class(lambda p, s: scored_s.append(asyncio.get_running_loop().time()) or 1.0, score_s=0)
        replicas = [replica_class("a")]
        async with scheduling(replicas, scorer, {"max_concurrent_per_server": 1}) as scheduler:
            await scheduler.run_group(build.prompt(), group_id=0)
            assert scored_s == pytest.approx([10, 20, 30, 40])

    run(go())


@pytest.mark.parametrize(
    ("scores", "fate", "reason"),
    [
        ((1.0, 0.0, 0.0, 0.0), GroupFate.KEPT, "keep"),
        ((1.0, 1.0, 1.0, 1.0), GroupFate.FILTERED, "dropped_equal"),
        ((0.0, 0.0, 0.0, 0.0), GroupFate.FILTERED, "dropped_equal"),
        ((0.1, 0.1, 0.1, 0.1), GroupFate.FILTERED, "dropped_equal"),
        ((1.0, float("nan"), 0.0, 1.0), GroupFate.FILTERED, "dropped_invalid"),
    ],
)
def test_the_filter_keeps_what_carries_a_gradient(run, build, replica_class, scorer_class, scores, fate, reason):
    async def go():
        async with scheduling(
            [replica_class("a")], scorer_class(by_sample(*scores)), filter=GroupFilter()
        ) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert (outcome.fate, outcome.reason) == (fate, reason)
            assert len(outcome.group.samples) == 4, "a filtered group still counts in the metrics"

    run(go())


def test_without_the_filter_a_group_without_spread_is_kept(run, build, replica_class, scorer_class):
    async def go():
        async with scheduling([replica_class("a")], scorer_class()) as scheduler:
            assert (await scheduler.run_group(build.prompt(), group_id=0)).fate is GroupFate.KEPT

    run(go())


def test_the_filter_reads_the_metric_it_is_told_and_fails_on_one_nobody_reports(
    run, build, replica_class, scorer_class
):
    def rule(prompt, sample):
        return Reward(score=float(sample.sample_id.endswith("0")), metrics={"acc": 1.0})

    async def fate(metric):
        options = {"filter": GroupFilter(metric=metric)}
        async with scheduling([replica_class("a")], scorer_class(rule), **options) as scheduler:
            return await scheduler.run_group(build.prompt(), group_id=0)

    assert run(fate("seq_reward")).fate is GroupFate.KEPT
    assert run(fate("acc")).fate is GroupFate.FILTERED
    missing = run(fate("f1"))
    assert missing.fate is GroupFate.FAILED and "filter_groups.metric 'f1'" in missing.reason


def test_the_shaped_metrics_hold_the_overlong_penalty_and_the_raw_one_does_not(run, build, replica_class, scorer_class):
    from roll_async.algorithms.overlong import OverlongShaping
    from roll_async.rollout.filters.group_filter import metric_of

    shaping = OverlongShaping(max_length=10, buffer_length=4)
    short, long = (build.sample(build.prompt(), range(n), ((0, n),), 1.0) for n in (5, 8))
    for name in ("seq_reward", "seq_final_reward"):
        assert (metric_of(short, name, shaping), metric_of(long, name, shaping)) == (1.0, 0.5)
        assert metric_of(long, name) == 1.0
    assert metric_of(long, "score", shaping) == 1.0
    scaled = OverlongShaping(max_length=10, buffer_length=4, shift=-0.5, scale=2.0)
    assert metric_of(long, "seq_reward", scaled) == 0.5


@pytest.mark.parametrize("singletons", ["keep", "drop"])
def test_a_group_of_one_is_kept_or_dropped_as_configured(run, build, replica_class, scorer_class, singletons):
    async def go():
        options = {"samples_per_group": 1, "filter": GroupFilter(singletons=singletons)}
        async with scheduling([replica_class("a")], scorer_class(), **options) as scheduler:
            kept = (await scheduler.run_group(build.prompt(), group_id=0)).fate is GroupFate.KEPT
            assert kept == (singletons == "keep")

    run(go())


@pytest.mark.parametrize(
    "trouble",
    [ConnectionError("judge is down"), Reward(score=0.0, status=RewardStatus.OUTAGE, reason="judge is down")],
)
def test_an_outage_is_waited_for_and_then_fails_the_group_and_is_never_a_score(
    run, build, replica_class, scorer_class, trouble
):
    async def go():
        scorer = scorer_class(by_sample(1.0, trouble, 1.0, 1.0))
        async with scheduling([replica_class("a")], scorer, scoring=ScoringOptions(outage_patience_s=100)) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert outcome.fate is GroupFate.FAILED and outcome.group is None
            assert "judge is down" in outcome.reason and "0.0/1" in outcome.reason and "math" in outcome.reason
            # 0.5 1 2 4 8 16 30 30: eight pauses fit into 100 s
            assert (
                60 < asyncio.get_running_loop().time() < 110 and scorer.calls == 3 + scheduler.counts().reward_outages
            )
            assert scheduler.counts().reward_outages == 9

    run(go())


def test_a_scorer_that_comes_back_after_a_while_loses_no_group(run, build, replica_class, scorer_class):
    async def go():
        loop = asyncio.get_running_loop()
        scorer = scorer_class(lambda p, s: ConnectionError("restarting") if loop.time() < 300 else 0.5)
        async with scheduling([replica_class("a")], scorer) as scheduler:
            outcomes = await asyncio.gather(*(scheduler.run_group(build.prompt(), group_id=i) for i in range(8)))
            assert {o.fate for o in outcomes} == {GroupFate.KEPT}
            assert {s.reward.score for o in outcomes for s in o.group.samples} == {0.5}
            assert 300 < loop.time() < 340

    run(go())


def test_an_error_of_the_reward_is_tried_again_and_then_quarantines_the_group(run, build, replica_class, scorer_class):
    async def go():
        broken = Reward(score=0.0, status=RewardStatus.ERROR, reason="KeyError: 'cases'")
        scorer = scorer_class(by_sample(1.0, broken, 1.0, 1.0))
        async with scheduling([replica_class("a")], scorer, scoring=ScoringOptions(reward_retries=2)) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert outcome.fate is GroupFate.FAILED and "KeyError" in outcome.reason
            assert (
                scorer.calls == 3 + 3
                and scheduler.counts().reward_errors == 3
                and scheduler.counts().reward_outages == 0
            )

    run(go())


@pytest.mark.parametrize("enabled", [True, False])
def test_an_answer_that_cannot_be_judged_in_time_filters_its_group_at_once(
    run, build, replica_class, scorer_class, enabled
):
    async def go():
        late = Reward(score=0.0, status=RewardStatus.TIMEOUT, reason="no verdict within 30 s")
        scorer = scorer_class(by_sample(1.0, 0.0, late, 0.0))
        async with scheduling([replica_class("a")], scorer, filter=GroupFilter() if enabled else None) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert outcome.fate is GroupFate.FILTERED and outcome.group is None
            assert outcome.reason.startswith("dropped_invalid: reward of sample 0.0/2") and "30 s" in outcome.reason
            assert scorer.calls == 4 and scheduler.counts().reward_timeouts == 1

    run(go())


def test_an_outage_that_passes_is_retried_and_forgotten(run, build, replica_class, scorer_class):
    async def go():
        troubles = [ConnectionError("busy"), Reward(score=0.0, status=RewardStatus.OUTAGE), 0.75]
        scorer = scorer_class(lambda p, s: troubles.pop(0))
        async with scheduling([replica_class("a")], scorer, samples_per_group=1) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert [s.reward.score for s in outcome.group.samples] == [0.75] and scheduler.counts().reward_outages == 2

    run(go())


def test_a_hanging_scorer_is_given_up_after_its_time_out(run, build, replica_class, scorer_class):
    async def go():
        scorer = scorer_class(score_s=1e6)
        scoring = ScoringOptions(reward_timeout_s=30.0, outage_patience_s=45.0)
        async with scheduling([replica_class("a")], scorer, scoring=scoring) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert outcome.fate is GroupFate.FAILED and "no answer within 30 s" in outcome.reason
            assert asyncio.get_running_loop().time() < 10 + 2 * 30 + 1

    run(go())


def test_a_request_that_fails_everywhere_fails_its_group_and_stops_its_brothers(
    run, build, replica_class, scorer_class
):
    async def go():
        replica = replica_class("a")
        replica.refuse = 1
        async with scheduling([replica], scorer_class(), {"request_retries": 0}) as scheduler:
            outcome = await scheduler.run_group(build.prompt(), group_id=0)
            assert outcome.fate is GroupFate.FAILED and "out of memory" in outcome.reason
            await asyncio.sleep(1)
            assert scheduler.manager.stats().in_flight == 0 and len(replica.aborted) == 3

    run(go())


def test_the_loss_of_all_replicas_is_raised_and_not_a_failed_group(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        async with scheduling([replica], scorer_class()) as scheduler:
            group = asyncio.create_task(scheduler.run_group(build.prompt(), group_id=0))
            await asyncio.sleep(2)
            replica.die()
            with pytest.raises(BaseExceptionGroup) as raised:
                await group
            assert raised.group_contains(ConnectionError)

    run(go())


@pytest.mark.parametrize("how", ["interrupt", "abort"])
def test_a_group_cut_short_is_requeued_and_leaves_no_half_group(run, build, replica_class, scorer_class, how):
    async def go():
        async with scheduling([replica_class("a")], scorer_class()) as scheduler:
            group = asyncio.create_task(scheduler.run_group(build.prompt(), group_id=0))
            await asyncio.sleep(3)
            if how == "interrupt":
                await scheduler.manager.interrupt("abort", 10.0)
            else:
                await scheduler.manager.abort_all()
            outcome = await group
            assert outcome.fate is GroupFate.REQUEUED and outcome.group is None

    run(go())


def test_the_greedy_baseline_is_a_sample_besides_the_group(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        scorer = scorer_class(lambda p, s: 0.25 if s.sample_id.endswith("greedy") else 1.0)
        sampling = SamplingParams(
            max_new_tokens=10, temperature=0.7, top_p=0.9, stop_token_ids=(5,), stop_strings=("end",)
        )
        async with scheduling([replica], scorer, greedy_baseline=True, sampling=sampling) as scheduler:
            group = (await scheduler.run_group(build.prompt(), group_id=0)).group
            assert group.baseline_score == 0.25 and len(group.samples) == 4
            (greedy,) = [r.sampling for r in replica.submitted if "greedy" in r.request_id]
            assert (greedy.temperature, greedy.top_p, greedy.stop_token_ids) == (0.0, 1.0, (5,))
            assert greedy.stop_strings == ("end",), "it ends where the samples end"

    run(go())


def test_the_greedy_baseline_is_aborted_with_its_group(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        async with scheduling([replica], scorer_class(), greedy_baseline=True) as scheduler:
            group = asyncio.create_task(scheduler.run_group(build.prompt(), group_id=3))
            await asyncio.sleep(2)
            await scheduler.abort_groups([3])
            assert len(replica.aborted) == 5 and not replica._tasks
            assert (await group).fate is GroupFate.REQUEUED

    run(go())


def test_a_group_whose_baseline_alone_was_aborted_is_not_trained(run, build, replica_class, scorer_class):
    """Its samples are all there; without the baseline remax would have nothing to subtract."""

    async def go():
        replicas, four = [replica_class("a")], {"max_concurrent_per_server": 4}
        async with scheduling(replicas, scorer_class(), four, greedy_baseline=True) as scheduler:
            group = asyncio.create_task(scheduler.run_group(build.prompt(), group_id=0))
            await asyncio.sleep(12)
            await scheduler.abort_groups([0])
            outcome = await group
            assert outcome.fate is GroupFate.REQUEUED and len(outcome.remains.samples) == 4

    run(go())


@pytest.mark.parametrize(("spread", "counts"), [(True, [2, 2]), (False, [0, 4])])
def test_samples_of_a_group_spread_over_replicas_or_stay_together(
    run, build, replica_class, scorer_class, spread, counts
):
    async def go():
        replicas = [replica_class("a"), replica_class("b")]
        async with scheduling(replicas, scorer_class(), spread_samples=spread) as scheduler:
            await scheduler.run_group(build.prompt(), group_id=0)
            assert sorted(len(r.submitted) for r in replicas) == counts

    run(go())


def test_a_round_stops_early_and_names_what_it_left(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        options = {"filter": GroupFilter(), "gen_batch_size": 4}
        kept_rows = ("1", "3", "4", "6", "7")
        scorer = scorer_class(lambda p, s: half(p, s) if p.row_id in kept_rows else 1.0)
        async with scheduling([replica], scorer, **options) as scheduler:
            prompts = [build.prompt(row_id=str(i)) for i in range(10)]
            result = await scheduler.manager.generate_sequences(prompts, 3, first_id=100)
            kept = [int(g.prompt.row_id) for g in result.groups]
            assert kept == [1, 3, 4] and [g.group_id for g in result.groups] == [101, 103, 104]
            assert result.failed == () and result.leftovers == (8, 9)
            assert [g.group_id for g in result.surplus] == [106, 107], "finished with the last one, not to do again"
            counts = {name: int(count) for name, count in result.statistics.items() if count}
            assert counts == {"seen": 8, "kept": 5, "filtered": 3, "surplus": 2, "not_started": 2}
            await asyncio.sleep(1)
            assert scheduler.manager.stats().in_flight == 0 and scheduler.manager.stats().queued == 0

    run(go())


def test_a_round_aborts_what_runs_when_it_has_enough(run, build, replica_class, scorer_class):
    async def go():
        replica = replica_class("a")
        async with scheduling([replica], scorer_class(half), {"max_concurrent_per_server": 4}, gen_batch_size=4) as s:
            result = await s.generate_sequences([build.prompt(row_id=str(i)) for i in range(6)], 1)
            assert [g.prompt.row_id for g in result.groups] == ["0"] and result.leftovers == (1, 2, 3, 4, 5)
            assert (result.statistics["aborted"], result.statistics["not_started"]) == (3, 2)
            assert len(replica.aborted) == 4, "those of the group that ran; the others had not begun"
            assert asyncio.get_running_loop().time() < 12

    run(go())


def test_a_round_that_has_enough_does_not_wait_for_scores_of_the_others(run, build, replica_class, scorer_class):
    class Slow(scorer_class):
        async def score(self, prompt, sample):
            await asyncio.sleep(0 if prompt.row_id == "0" else 1e6)
            return Reward(score=half(prompt, sample))

    async def go():
        async with scheduling([replica_class("a")], Slow(), gen_batch_size=3) as scheduler, asyncio.timeout(100):
            result = await scheduler.generate_sequences([build.prompt(row_id=str(i)) for i in range(3)], 1)
            assert [g.prompt.row_id for g in result.groups] == ["0"] and result.leftovers == (1, 2)
            assert result.statistics["aborted"] == 2 and asyncio.get_running_loop().time() < 12

    run(go())


def test_every_prompt_of_a_round_is_accounted_for_once(run, build, replica_class, scorer_class):
    async def go():
        def rule(prompt, sample):
            number = int(prompt.row_id)
            if number % 5 == 3:
                return ConnectionError("down")
            return half(prompt, sample) if number % 3 else 0.0

        options = {"filter": GroupFilter(), "gen_batch_size": 5, "scoring": ScoringOptions(outage_patience_s=0)}
        async with scheduling(
            [replica_class("a"), replica_class("b", token_s=1.7)], scorer_class(rule), **options
        ) as s:
            result = await s.generate_sequences([build.prompt(row_id=str(i)) for i in range(40)], 9)
            groups = [int(g.prompt.row_id) for g in result.groups]
            failed = [index for index, _ in result.failed]
            filtered = int(result.statistics["filtered"])
            assert len(groups) == 9 and all(g % 3 and g % 5 != 3 for g in groups)
            surplus = [int(g.prompt.row_id) for g in result.surplus]
            places = [*groups, *surplus, *failed, *result.leftovers]
            assert len(set(places)) == len(places) == 40 - filtered

    run(go())


def test_too_many_batches_without_spread_end_with_a_message_about_the_data(run, build, replica_class, scorer_class):
    async def go():
        options = {"filter": GroupFilter(), "gen_batch_size": 2, "max_num_gen_batches": 3}
        scorer = scorer_class(lambda p, s: half(p, s) if p.row_id == "1" else 0.0)
        async with scheduling([replica_class("a")], scorer, **options) as scheduler:
            with pytest.raises(
                GeneratedTooMany, match="num_gen_batches=3 >= max_num_gen_batches=3 with 1 of 2.*check your data"
            ) as raised:
                await scheduler.generate_sequences([build.prompt(row_id=str(i)) for i in range(50)], 2)
            assert scheduler.manager.stats().in_flight == 0
            assert scorer.calls == 6 * 4
            (kept,) = raised.value.groups
            assert kept.prompt.row_id == "1" and all(s.reward is not None for s in kept.samples), "paid for, not lost"

    run(go())


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_lets_a_round_look_at_all_prompts(run, build, replica_class, scorer_class, limit):
    async def go():
        options = {"filter": GroupFilter(), "gen_batch_size": 2, "max_num_gen_batches": limit}
        scorer = scorer_class(lambda p, s: half(p, s) if p.row_id == "49" else 0.0)
        async with scheduling([replica_class("a")], scorer, **options) as scheduler:
            result = await scheduler.generate_sequences([build.prompt(row_id=str(i)) for i in range(50)], 1)
            assert [g.prompt.row_id for g in result.groups] == ["49"] and result.statistics["filtered"] == 49

    run(go())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_nothing_of_a_round_runs_after_it_was_cancelled_or_failed(run, build, replica_class, scorer_class, how):
    async def go():
        replica = replica_class("a")
        scorer = scorer_class(lambda p, s: ZeroDivisionError("a bug") if how == "failed" else half(p, s))
        async with scheduling([replica], scorer, {"max_concurrent_per_server": 6}, gen_batch_size=4) as scheduler:
            prompts = [build.prompt(row_id=str(i)) for i in range(10)]
            before = asyncio.all_tasks()
            round_of = asyncio.create_task(scheduler.generate_sequences(prompts, 4))
            if how == "cancelled":
                await asyncio.sleep(12)
                round_of.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await round_of
            else:
                with pytest.raises(BaseExceptionGroup) as raised:
                    await round_of
                assert raised.group_contains(ZeroDivisionError)
            stats = scheduler.manager.stats()
            assert asyncio.all_tasks() == before and stats.in_flight == stats.queued == 0
            assert len(replica.aborted) >= 6, "the engine was told to stop"

    run(go())


def test_a_round_over_too_few_prompts_returns_what_there_is(run, build, replica_class, scorer_class):
    async def go():
        async with scheduling([replica_class("a")], scorer_class(half), filter=GroupFilter()) as scheduler:
            result = await scheduler.generate_sequences([build.prompt(row_id=str(i)) for i in range(3)], 5)
            assert len(result.groups) == 3 and result.leftovers == ()

    run(go())


def test_a_validation_round_keeps_every_prompt_and_filters_none(run, build, replica_class, scorer_class):
    async def go():
        options = {"filter": GroupFilter(), "gen_batch_size": 2, "max_num_gen_batches": 1}
        async with scheduling([replica_class("a")], scorer_class(), **options) as scheduler:
            prompts = [build.prompt(row_id=str(i)) for i in range(7)]
            result = await scheduler.generate_sequences(prompts, 2, validation=True)
            assert sorted(int(g.prompt.row_id) for g in result.groups) == list(range(7)) and result.leftovers == ()
            counts = result.statistics
            assert (counts["seen"], counts["kept"], counts["filtered"], counts["surplus"]) == (7, 7, 0, 0)

    run(go())


def test_a_validation_round_goes_on_until_the_slowest_prompt_is_answered(run, build, replica_class, scorer_class):
    """Two replicas of different speed: there are as many groups as a round of training asks for long before."""

    async def go():
        replicas = [replica_class("fast"), replica_class("slow", token_s=2.0)]
        async with scheduling(replicas, scorer_class(), spread_samples=False) as scheduler:
            prompts = [build.prompt(row_id=str(i)) for i in range(6)]
            result = await scheduler.generate_sequences(prompts, 2, validation=True)
            assert sorted(int(g.prompt.row_id) for g in result.groups) == list(range(6))
            assert asyncio.get_running_loop().time() == pytest.approx(10 * 2.0, abs=0.5), "all of them ran at once"

    run(go())


def test_a_validation_round_counts_what_it_returns_and_says_what_it_could_not_score(
    run, build, replica_class, scorer_class
):
    """Seven prompts, all answered alike: one is judged too slowly and has no score, one whose scorer is down fails."""

    def score(prompt, sample):
        if prompt.row_id == "2":
            return Reward(score=0.0, status=RewardStatus.TIMEOUT)
        return ConnectionError("down") if prompt.row_id == "5" else 1.0

    async def go():
        options = {"filter": GroupFilter(), "scoring": ScoringOptions(outage_patience_s=0)}
        async with scheduling([replica_class("a")], scorer_class(score), **options) as scheduler:
            prompts = [build.prompt(row_id=str(i)) for i in range(7)]
            result = await scheduler.generate_sequences(prompts, 2, validation=True)
            assert sorted(int(g.prompt.row_id) for g in result.groups) == [0, 1, 3, 4, 6]
            assert [index for index, _ in result.failed] == [5]
            counts = result.statistics
            assert (counts["seen"], counts["kept"], counts["filtered"], counts["failed"]) == (7, 5, 1, 1)
            trained = await scheduler.generate_sequences(prompts, 2, first_id=100)
            assert trained.groups == () and trained.statistics["filtered"] == 6, "the filter is on outside of it"

    run(go())


def test_validation_scores_each_prompt_once_in_order_and_leaves_out_what_failed(
    run, build, replica_class, scorer_class
):
    async def go():
        scorer = scorer_class(lambda p, s: ConnectionError("down") if p.row_id == "1" else float(p.row_id))
        async with scheduling([replica_class("a")], scorer, scoring=ScoringOptions(outage_patience_s=0)) as scheduler:
            await scheduler.manager.pause_training(True)
            prompts = [build.prompt(row_id=str(i)) for i in range(4)]
            answered = await scheduler.validate(prompts, SamplingParams(max_new_tokens=3), name="step 5")
            assert [p.row_id for p, _ in answered] == ["0", "2", "3"]
            samples = [s for _, (s,) in answered]
            assert [s.reward.score for s in samples] == [0.0, 2.0, 3.0]
            assert all(len(s.response_token_ids) == 3 and s.finish_reason is FinishReason.LENGTH for s in samples)

    run(go())
