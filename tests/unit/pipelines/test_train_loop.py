"""The whole loop on fakes and the virtual clock: real queue, rollouter, synchronizer, train loop and health monitor."""

import asyncio
import re
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roll_async.observe.outside import OutsideError
from roll_async.observe.recorder import REQUIRED_KEYS
from roll_async.pipelines.fully_async import FullyAsyncTrainer
from roll_async.pipelines.metrics import merged_reports, ratio_metrics
from roll_async.pipelines.protocol import RunEnd, TrainerState
from roll_async.pipelines.rlvr import TrainLoop
from roll_async.pipelines.wire import UserHooks
from roll_async.trainer.protocol import StepReport
from roll_async.weight_sync.canary import CanaryOptions

ROOT = Path(__file__).resolve().parents[3]
FULLY_ASYNC_NAMES = {
    "global_steps", "processed_samples", "current_param_version", "param_sync_count", "total_generated_samples",
    "dropped_stale_samples", "generation_errors", "param_sync_requests", "avg_sample_age", "max_sample_age",
    "stale_samples_ratio", "queue_size", "total_produced", "total_consumed", "dropped_samples", "sync_failures",
}  # fmt: skip


def test_a_run_trains_every_step_saves_validates_and_publishes_what_is_promised(run, a_run):
    done = a_run(steps=5, save_every=2, eval_every=2)
    assert run(done.go()) is RunEnd.FINISHED
    assert [step for step, _ in done.learned] == [1, 2, 3, 4, 5] and len(set(done.rows)) == 20
    assert done.saved == [2, 4, 5] and ["validation/reward" in m for m in done.published] == [False, True] * 2 + [True]
    measured = [m["validation/version"] for m in done.published if "validation/version" in m]
    assert measured == [2, 4, 5], "a validation measures the weights of its step, the last one the last model"
    promised = set(REQUIRED_KEYS) - {"trainer/grad_norm", "trainer/learning_rate", "staleness/masked_fraction"}
    assert all(promised <= m.keys() for m in done.published)
    documented = (ROOT / "docs_roll" / "metrics.md").read_text()
    rollout = [key for key in done.published[0] if key.startswith("rollout/")]
    assert rollout and all(key in documented for key in rollout)
    audit = [key for key in done.published[0] if key.startswith("length_bias")]
    assert len(audit) == 3 and all(f"`{key}`" in documented for key in audit)


def test_what_over_sampling_gives_up_is_published_by_its_length(run, a_run):
    """Groups of an engine eight times as slow are begun, and others fill the batch; of two equal ones, all finish."""
    slow, equal = (a_run(ratio=0.0, speeds=(1.0, other), oversample_groups=4) for other in (8.0, 1.0))
    assert [run(one.go()) for one in (slow, equal)] == [RunEnd.FINISHED] * 2
    cut, refused = slow.published[-1], equal.published[-1]
    assert cut["length_bias/aborted_requests"] > 0 and cut["length_bias/aborted_tokens"] > 0
    assert refused["length_bias/dropped_le_16"] == 2 * refused["groups/dropped_surplus"] > 0, "10 tokens a sample"


@pytest.mark.parametrize(("num_groups", "idle"), [(1, 0.875), (4, 0.5), (8, 0.0)])
def test_the_share_of_idle_engines_is_over_all_engines_and_each_ones_busy_share_is_published(
    run, a_run, num_groups, idle
):
    """A group is on one engine for 10 s, and as long as it is scored; nothing else takes time, or 30 s of training."""
    one, slow = (a_run(ratio=0.0, num_groups=num_groups, speeds=(1.0,) * 8) for _ in range(2))
    one.learn_s, slow.learn_s = 0.0, 40.0 * 4 / num_groups
    assert [run(done.go()) for done in (one, slow)] == [RunEnd.FINISHED] * 2
    names = [f"busy/engine-{i}" for i in range(8)]
    for done, share in ((one, 10.0 / 10.5), (slow, 10.0 / 50.5)):
        for metrics in done.published:
            busy = sorted((metrics[name] for name in names), reverse=True)
            assert busy == pytest.approx([share] * num_groups + [0.0] * (8 - num_groups))
            assert metrics["idle/engines"] == pytest.approx(1 - share * (1 - idle))


CAUSES = ("rollouts", "rewards", "collation", "roles", "weights", "validation", "checkpoint", "records")


@pytest.mark.parametrize("long", [*CAUSES, None])
@pytest.mark.parametrize("parts", [1, 2])
def test_each_wait_of_the_trainer_is_told_by_its_cause(run, scorer_class, a_run, long, parts):
    """A step of 1 s of generation, 0.1 s of scoring and 0.4 s of training, and one cause takes 25 s or more."""
    done = a_run(
        scorer=lambda: scorer_class(score_s=100.0 if long == "rewards" else 0.1),
        speeds=(2.5 if long == "rollouts" else 0.1,) * 4,
        eval_every=int(long == "validation"),
        save_every=1,
        ratio=0.0,
        parts=parts,
    )
    knobs = {
        "collation": "collation_s", "roles": "roles_s", "weights": "push_s", "validation": "validation_s",
        "checkpoint": "save_s",
    }  # fmt: skip
    if long in knobs:
        setattr(done, knobs[long], 100.0)
    done.learn_s, record = 0.4, done.queue.step_trained

    async def step_trained(step):
        await asyncio.sleep(100.0 if long == "records" else 0.0)
        await record(step)

    done.queue.step_trained = step_trained
    assert run(done.go()) is RunEnd.FINISHED
    documented = (ROOT / "docs_roll" / "metrics.md").read_text()
    for metrics in done.published[1:]:
        waits = {cause: metrics[f"idle/trainer_{cause}"] for cause in CAUSES}
        assert all(f"`idle/trainer_{cause}`" in documented for cause in CAUSES)
        assert metrics["idle/trainer"] == pytest.approx(waits["rollouts"] + waits["rewards"])
        assert all(share >= 0 for share in waits.values()) and sum(waits.values()) < 1
        if long is None:
            assert waits["rollouts"] * metrics["time/step_s"] == pytest.approx(1.0)
            assert waits["rewards"] * metrics["time/step_s"] == pytest.approx(0.1)
            assert (1 - sum(waits.values())) * metrics["time/step_s"] == pytest.approx(0.4)
        else:
            assert waits.pop(long) > 0.9 and sum(waits.values()) < 0.1


def test_scores_that_arrive_while_the_trainer_works_are_no_wait(run, scorer_class, a_run):
    """Groups admitted a step ahead are generated and scored beside the training of 40 s."""
    ahead = a_run(scorer=lambda: scorer_class(score_s=20.0), ratio=1.0, speeds=(1.0,) * 8, steps=6)
    ahead.learn_s = 40.0
    assert run(ahead.go()) is RunEnd.FINISHED
    assert all(m["idle/trainer_rewards"] == m["idle/trainer_rollouts"] == 0.0 for m in ahead.published[1:])


def test_tokens_of_engines_are_counted_per_device_and_step(run, a_run):
    """Groups of 2 samples of 10 tokens on 2 engines of 4 devices each; 10 s of generation, 0.5 of scoring, 8 of
    training.
    """
    done = a_run(ratio=0.0, speeds=(1.0, 1.0), devices_per_engine=4)
    assert run(done.go()) is RunEnd.FINISHED
    for metrics in done.published:
        assert metrics["engine/tokens_per_device_s"] == pytest.approx(4 * 2 * 10 / 8 / metrics["time/step_s"])
        assert "`engine/tokens_per_device_s`" in (ROOT / "docs_roll" / "metrics.md").read_text()


def test_the_rate_of_a_push_is_that_of_its_transfer_whatever_was_waited_for_before_it(run, a_run):
    """3 GB in 2 s. A step learns for 8 s, and engines answer the canary of the push before for 20 s."""
    done = a_run(ratio=2.0, speeds=(0.1, 0.1), canary=CanaryOptions(prompts=2, band=0.1))
    done.answer_s, done.push_s, done.push_bytes = 20.0, 2.0, 3 * 10**9
    assert run(done.go()) is RunEnd.FINISHED
    assert all(m["time/weight_sync_s"] > 10 for m in done.published[1:])
    assert [m["weights/gb_per_s"] for m in done.published] == pytest.approx([1.5] * 4)
    assert "`weights/gb_per_s`" in (ROOT / "docs_roll" / "metrics.md").read_text()


def test_an_engine_that_is_gone_is_not_idle_and_counts_again_when_it_is_back(run, a_run):
    hit = a_run(steps=6, ratio=0.0, speeds=(1.0, 1.0))
    hit.restart_s = 50.0

    async def go():
        running = asyncio.create_task(hit.go())
        await asyncio.sleep(5)
        hit.replicas[0].die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    seen = [(m["rollout/engines"], m["busy/engine-0"], m["busy/engine-1"], m["idle/engines"]) for m in hit.published]
    died, gone, came, *back = seen
    assert died[0] == 1 and died[1] == pytest.approx(5 / 23.5) and died[3] == pytest.approx(1 - (5 + 15) / 23.5 / 2)
    assert gone[:2] == (1, 0.0) and gone[3] == pytest.approx(1 - gone[2]), "one engine is all there is"
    assert came[:2] == (2, 0.0) and came[3] == pytest.approx(1 - came[2] / 2)
    assert all(m[0] == 2 and m[1] == m[2] == pytest.approx(1 - m[3]) for m in back)


def test_a_step_in_parts_is_one_step_in_every_account_and_starts_before_its_batch_is_whole(run, a_run):
    whole, parts = a_run(ratio=0.0, speeds=(1.0, 2.5)), a_run(ratio=0.0, parts=2, speeds=(1.0, 2.5))
    for one in (whole, parts):
        assert run(one.go()) is RunEnd.FINISHED
    assert [step for step, _ in parts.learned] == [1, 1, 2, 2, 3, 3, 4, 4] and sorted(parts.rows) == list(range(16))
    assert sum(m["time/wait_batch_s"] for m in parts.published) < sum(m["time/wait_batch_s"] for m in whole.published)
    assert len(parts.published) == 4 and all(m["trainer/optimizer_steps"] == 2 for m in parts.published)
    assert [m["groups/trained"] for m in parts.published] == [4, 8, 12, 16]


def test_a_stop_ends_after_the_step_under_way_with_its_state_saved(run, a_run):
    stopped = a_run(steps=100, parts=2)

    async def go():
        running = asyncio.create_task(stopped.go())
        while len(stopped.learned) < 5:  # in the first part of step 3
            await asyncio.sleep(0.5)
        stopped.pipeline.request_stop()
        return await running

    assert run(go()) is RunEnd.INTERRUPTED
    assert [step for step, _ in stopped.learned] == [1, 1, 2, 2, 3, 3] and stopped.saved == [3]


def test_the_end_of_the_data_ends_the_run_with_the_last_whole_step(run, a_run):
    short = a_run(steps=100)
    short.size = 10
    assert run(short.go()) is RunEnd.END_OF_DATA
    assert (
        [step for step, _ in short.learned] == [1, 2]
        and short.saved == [2]
        and [name for name, _ in short.events] == ["end_of_data"]
    )


def test_the_death_of_the_only_engine_costs_time_and_nothing_else(run, a_run):
    hit = a_run(steps=6, speeds=(1.0,))

    async def go():
        running = asyncio.create_task(hit.go())
        await asyncio.sleep(33.3)
        hit.replicas[0].die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    assert sorted(hit.rows) == list(range(24)) and [s for s, _ in hit.learned] == [1, 2, 3, 4, 5, 6]
    last = hit.published[-1]
    assert (last["rollout/lost_engines"], last["rollout/returned_engines"], last["rollout/engines"]) == (1, 1, 1)
    assert last["rollout/retried"] > 0 and last["rollout/resumed"] > 0 and last["rollout/late_results"] == 0
    assert max(m["staleness/max"] for m in hit.published) <= 1


@pytest.mark.parametrize("seconds", [0.5, 12.5, 20.0, 28.1, 31.0])
@pytest.mark.parametrize("parts", [1, 4])
def test_whenever_an_engine_dies_the_run_goes_on(run, a_run, seconds, parts):
    hit = a_run(steps=5, speeds=(1.0,), ratio=0.0, parts=parts)

    async def go():
        running = asyncio.create_task(hit.go())
        await asyncio.sleep(seconds)
        hit.replicas[0].die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    assert sorted(hit.rows) == list(range(20)) and max(m["staleness/max"] for m in hit.published) == 0


def test_an_engine_that_dies_during_a_validation_comes_back_for_it(run, a_run):
    hit = a_run(steps=3, speeds=(1.0,), eval_every=1)

    async def go():
        running = asyncio.create_task(hit.go())
        while hit.trainer.state is not TrainerState.VALIDATING:
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        hit.replicas[0].die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    assert [m["validation/samples"] for m in hit.published] == [3, 3, 3] and len(set(hit.rows)) == 12


def test_an_error_of_the_learner_ends_everything_and_closes_the_queue(run, a_run):
    broken = a_run()

    async def learn(groups, step):
        raise RuntimeError("CUDA error")

    broken.learn = learn
    with pytest.raises(BaseExceptionGroup) as raised:
        run(broken.go())
    assert raised.group_contains(RuntimeError, match="CUDA error") and broken.saved == []


def test_the_fully_asynchronous_trainer_publishes_every_name_of_its_mode(run, a_run):
    class Mine(FullyAsyncTrainer):
        def _compute_custom_metrics(self, batch):
            rows = [item for item in batch.to_dataproto()]
            assert [float(item.batch["token_level_scores"].sum()) for item in rows] == [
                sample.reward.score for group in batch for sample in group.samples
            ]
            return {"mine/groups": float(len(batch)), "mine/rows": float(len(rows))}

    done = a_run(hooks=UserHooks(trainer=Mine), parts=2, steps=5)
    run(done.go())
    for metrics in done.published:
        names = {key.removeprefix("fully_async/") for key in metrics if key.startswith("fully_async/")}
        assert FULLY_ASYNC_NAMES <= names and (metrics["mine/groups"], metrics["mine/rows"]) == (4, 8)
        shares = [v for key, v in metrics.items() if "token_share_version_lag" in key]
        assert sum(shares) == pytest.approx(1.0)
    last = done.published[-1]
    expected = {"global_steps": 5, "processed_samples": 40, "total_consumed": 40, "param_sync_count": 6,
                "param_sync_requests": 6, "current_param_version": 5, "sync_failures": 0}  # fmt: skip
    assert {name: last[f"fully_async/{name}"] for name in expected} == expected
    produced = last["fully_async/total_produced"]
    assert produced == last["fully_async/total_consumed"] + last["fully_async/queue_size"]
    assert 0 < last["fully_async/avg_sample_age"] <= last["fully_async/max_sample_age"]
    documented = (ROOT / "docs_roll" / "metrics.md").read_text()
    missing = [n for n in last if n.startswith("fully_async/") and re.sub(r"\d+$", "N", n) not in documented]
    assert not missing


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"mine": "many"}, "compute_custom_metrics: mine is 'many', not a number"),
        ({"mine": None}, "compute_custom_metrics: mine is None"),
        ([1.0], "compute_custom_metrics gave list"),
        (SystemExit(0), "SystemExit"),
    ],
    ids=repr,
)
def test_metrics_of_the_user_that_are_none_end_the_run_by_name_with_its_step_saved(run, a_run, found, reason):
    class Mine(TrainLoop):
        def compute_custom_metrics(self, batch):
            if isinstance(found, BaseException):
                raise found
            return found

    broken = a_run(hooks=UserHooks(trainer=Mine))
    with pytest.raises(BaseExceptionGroup) as raised:
        run(broken.go())
    assert raised.group_contains(OutsideError, match=reason) and broken.saved == [1]


def test_scalars_of_numpy_are_metrics_and_async_hooks_are_refused(run, a_run):
    class Mine(TrainLoop):
        def compute_custom_metrics(self, batch):
            return {"mine": np.float32(0.5), "not known": float("nan")}

    done = a_run(hooks=UserHooks(trainer=Mine))
    run(done.go())
    assert done.published[-1]["mine"] == 0.5

    async def hook(*arguments):
        pass

    for name in ("on_step", "custom_monitor"):
        with pytest.raises(TypeError, match=f"{name} is called as a plain function"):
            UserHooks(**{name: hook})


def test_the_monitor_names_every_component_and_calls_the_users_own(run, a_run, caplog):
    seen = []
    watched = a_run(hooks=UserHooks(custom_monitor=lambda trainer, rollouter: seen.append((trainer, rollouter))))
    with caplog.at_level("INFO"):
        run(watched.go())
    lines = [r.message for r in caplog.records if r.message.startswith("Component Statistics: ")]
    for name in ("Trainer", "Rollouter", "MessageQueue", "ParameterSynchronizer"):
        assert sum(line.startswith(f"Component Statistics: {name} ") for line in lines) == len(seen) > 4
    steps = [trainer.global_steps for trainer, _ in seen]
    assert steps == sorted(steps) and steps[-1] == 4 and seen[-1][0].processed_samples == 32
    assert seen[-1][1].total_generated_samples >= 32


def test_the_state_of_every_component_is_told_at_any_moment_also_without_a_monitor(run, a_run):
    asked = a_run()

    async def go():
        running = asyncio.create_task(asked.go())
        while not asked.learned:
            await asyncio.sleep(0.5)
        lines = asked.pipeline.states()
        await running
        return lines, asked.pipeline.states()

    during, after = run(go())
    assert during[0].startswith("Component Statistics: Trainer running: learning, step 0, ")
    assert during[1].startswith("Component Statistics: Rollouter running: ")
    assert "step 4, 32 samples, version 4" in after[0]


def test_the_parts_of_a_step_are_merged_by_samples():
    def report(samples, **metrics):
        return StepReport(
            metrics=metrics, logprobs_s=1.0, train_s=2.0, collation_s=0.5, roles_s=0.25, turn_s=0.125,
            num_samples=samples, num_tokens=10, advantages=(array("f", [samples]),) * samples,
            trainer_logprobs=(array("f", [-samples]),) * samples, entropies=(array("f", [2 * samples]),) * samples,
        )  # fmt: skip

    peak = "memory/trainer_peak_bytes"
    first, second = {"a": 4.0, "x_max": 1.0, "x_min": 1.0, peak: 9.0}, {"a": 0.0, "x_max": 5.0, "x_min": 5.0, "b": 7.0}
    merged = merged_reports([report(1, **first), report(3, **second, **{peak: 5.0})])
    assert dict(merged.metrics) == {"a": 1.0, "x_max": 5.0, "x_min": 1.0, "b": 7.0, peak: 9.0}
    assert (merged.train_s, merged.logprobs_s, merged.num_samples, merged.num_tokens) == (4.0, 2.0, 4, 20)
    assert (merged.collation_s, merged.roles_s, merged.turn_s) == (1.0, 0.5, 0.25)
    assert [row.tolist() for row in merged.advantages] == [[1.0], [3.0], [3.0], [3.0]]
    assert [row.tolist() for row in merged.trainer_logprobs] == [[-1.0], [-3.0], [-3.0], [-3.0]]
    assert [row.tolist() for row in merged.entropies] == [[2.0], [6.0], [6.0], [6.0]]
    without = replace(report(1), trainer_logprobs=())
    assert merged_reports([report(1), without]).trainer_logprobs == (), "rows are matched by their place"


def test_a_ratio_of_counters_is_published_of_the_step_and_of_the_run_and_not_over_nothing():
    before = {"agent/outcomes/solved": (1.0, 4.0), "agent/turns_mean": (8.0, 4.0)}
    now = {"agent/outcomes/solved": (4.0, 8.0), "agent/turns_mean": (8.0, 4.0), "agent/b/turns_mean": (3.0, 2.0)}
    assert ratio_metrics(now, before) == {
        "agent/outcomes/solved": 0.75, "agent/run/outcomes/solved": 0.5, "agent/run/turns_mean": 2.0,
        "agent/b/turns_mean": 1.5, "agent/run/b/turns_mean": 1.5,
    }  # fmt: skip
    assert ratio_metrics({"agent/turns_mean": (0.0, 0.0)}, {}) == {}


@pytest.mark.parametrize("parts", [1, 2])
def test_every_row_of_a_step_is_dumped_with_its_own_advantages_and_entropies(run, a_run, parts):
    done = a_run(steps=2, parts=parts)
    run(done.go())
    assert [step for step, *_ in done.dumped] == [1, 2]
    for _, groups, advantages, logprobs, entropies in done.dumped:
        own = [[2.0 * group.group_id + i] for group in groups for i in range(2)]
        assert len(own) == 8 and [row.tolist() for row in advantages] == own
        assert [row.tolist() for row in entropies] == own and logprobs == ()


@pytest.mark.parametrize("every", [2, 3])
def test_a_due_validation_is_pushed_for_whatever_the_steps_between_pushes(run, a_run, every):
    done = a_run(steps=5, sync_every=every, eval_every=1)
    run(done.go())
    assert [m["validation/version"] for m in done.published] == [1, 2, 3, 4, 5]


def test_a_shared_validation_measures_its_version_beside_the_next_step(run, a_run):
    """Engines have free slots while the trainer learns: nobody waits, and the result comes with the next record."""
    times = {}
    for mode in ("pause", "share"):
        done = a_run(steps=5, eval_every=2, validation_mode=mode)
        run(done.go())
        found = [
            (m["validation/version"], m["validation/lag"], m["validation/samples"])
            for m in done.published
            if "validation/lag" in m
        ]
        told = [(e["validation/version"], e["validation/lag"]) for name, e in done.events if name == "validation"]
        times[mode] = [m["time/validation_s"] for m in done.published]
        if mode == "pause":
            assert found == [(2, 0, 3), (4, 0, 3), (5, 0, 3)] and not told
            assert all(seconds > 4 for seconds in (times[mode][1], times[mode][3], times[mode][4]))
        else:  # one record holds one validation: that of step 4 is an event beside the last model's
            assert found == [(2, 1, 3), (5, 0, 3)] and told == [(4, 1)]
            assert times[mode][:4] == [0.0] * 4 and times[mode][4] > 4
        assert all(m["validation/other_version"] == 0 for m in done.published if "validation/lag" in m)


def test_a_push_waits_for_what_is_left_of_a_shared_validation(run, a_run):
    done = a_run(steps=4, eval_every=1, validation_mode="share", speeds=(2.0,), ratio=0.0)
    done.learn_s = 1.0
    run(done.go())
    measured = [(m["validation/version"], m["validation/lag"]) for m in done.published if "validation/lag" in m]
    told = [e["validation/version"] for name, e in done.events if name == "validation"]
    assert measured == [(1, 1), (2, 1), (4, 0)] and told == [3]
    assert [m["weights/version"] for m in done.published] == [1, 2, 3, 4]


def measured_by(done):
    """Versions of all results, in order."""
    published = [m["validation/version"] for m in done.published if "validation/lag" in m]
    return sorted([*published, *(e["validation/version"] for name, e in done.events if name == "validation")])


def validating(mode, **options):
    return {"validation_mode": mode, **({"validator_speeds": (1.0,)} if mode == "replicas" else {}), **options}


@pytest.mark.parametrize("mode", ["pause", "share", "replicas"])
@pytest.mark.parametrize("begun", [0, 1])
def test_a_stop_saves_before_it_waits_for_the_validation_under_way_and_begins_no_other(run, a_run, mode, begun):
    """A cluster that ends a job gives it a minute, and a validation takes half an hour."""
    stopped = a_run(steps=50, eval_every=1, **validating(mode))
    stopped.validation_s = 2000.0
    saved = []

    async def go():
        running = asyncio.create_task(stopped.go())
        while not (stopped.validations_begun if begun else stopped.learned):
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        stopped.pipeline.request_stop()
        await asyncio.sleep(stopped.learn_s + 1)
        saved.extend(stopped.saved)
        return await running

    assert run(go()) is RunEnd.INTERRUPTED
    assert saved == stopped.saved == [stopped.trainer.trained] and stopped.trainer.trained >= 1
    assert measured_by(stopped) == [1.0] * begun, "what ran is told all the same"
    assert [m["weights/version"] for m in stopped.published][-1] == begun, "nothing is pushed after the stop"


@pytest.mark.parametrize("mode", ["pause", "share", "replicas"])
def test_a_restored_run_measures_the_step_whose_result_was_lost_with_its_process(run, a_run, mode):
    lost = a_run(steps=2, save_every=1)
    run(lost.go())
    for measures_restored, versions in ((True, [2, 4, 5]), (False, [4, 5])):
        again = a_run(
            steps=5, eval_every=2, position=lost.positions[2], **validating(mode, measures_restored=measures_restored)
        )
        assert run(again.go()) is RunEnd.FINISHED
        assert measured_by(again) == versions and again.trainer.trained == 5
        records = [m["validation/version"] for m in again.published if "validation/lag" in m]
        assert (2 in records) == measures_restored, "in a record: what is an event only is in no curve"
        assert all(m["validation/samples"] == 3 for m in again.published if "validation/lag" in m)


def test_a_run_restored_after_its_last_step_measures_the_last_model(run, a_run):
    lost = a_run(steps=3)
    run(lost.go())
    again = a_run(steps=3, eval_every=2, position=lost.positions[3], measures_restored=True)
    assert run(again.go()) is RunEnd.FINISHED and measured_by(again) == [3]


def test_a_failed_learner_ends_a_shared_validation(run, a_run):
    """`go` asserts that no task is left."""
    broken = a_run(eval_every=1, validation_mode="share", speeds=(2.0,), ratio=0.0)
    learn = broken.learn

    async def learn_once(groups, step):
        if step == 2:
            raise RuntimeError("CUDA error")
        return await learn(groups, step)

    broken.learn = learn_once
    with pytest.raises(BaseExceptionGroup) as raised:
        run(broken.go())
    assert raised.group_contains(RuntimeError, match="CUDA error")
