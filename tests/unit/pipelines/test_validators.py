"""Validation on replicas of its own: trainer and rollout never wait for it, and its results say what they measured."""

import asyncio

import pytest

from roll_async.pipelines.protocol import RunEnd


def apart(a_run, **options):
    return a_run(**{"validation_mode": "replicas", "eval_every": 1, "validator_speeds": (1.0,), **options})


def results(done):
    """(version, lag, samples) of every result, in order."""
    told = [fields for name, fields in done.events if name == "validation"]
    published = [m for m in done.published if "validation/lag" in m]
    keys = ("validation/version", "validation/lag", "validation/samples")
    return sorted(tuple(m[k] for k in keys) for m in [*told, *published])


def test_training_takes_as_long_as_without_validation(run, a_run):
    """Every step is measured, on engines that take half of a step for it; the last result alone is waited for."""
    seconds = {}
    for name, options in {"none": {"eval_every": 0}, "apart": {}}.items():
        done = apart(a_run, steps=6, **options)
        assert run(done.go()) is RunEnd.FINISHED
        seconds[name] = [m["time/step_s"] for m in done.published]
    assert [m["time/validation_s"] for m in done.published[:-1]] == [0.0] * 5
    assert seconds["apart"][:-1] == pytest.approx(seconds["none"][:-1])
    assert results(done) == [(1, 1, 3), (2, 1, 3), (3, 1, 3), (4, 1, 3), (5, 1, 3), (6, 0, 3)]
    assert done.published[-1]["validation/skipped"] == 0
    assert all(m["validation/seconds"] > 4 for m in done.published if "validation/lag" in m)


def test_requests_of_training_and_of_validation_keep_apart(run, a_run):
    done = apart(a_run, steps=3)
    run(done.go())
    for replica in done.replicas:
        own = {request.request_id.startswith("validation.") for request in replica.submitted}
        assert own == {replica.name.startswith("validator")}, replica.name


def test_a_validation_slower_than_its_period_skips_steps_with_a_count_and_never_piles_up(run, a_run, caplog):
    done = apart(a_run, steps=8, validator_speeds=(5.0,))
    run(done.go())
    assert results(done) == [(1, 3, 3), (4, 3, 3), (7, 1, 3), (8, 0, 3)]
    assert [m["validation/skipped"] for m in done.published] == [0, 1, 2, 2, 3, 4, 4, 4]
    assert [m["time/validation_s"] for m in done.published[:-1]] == [0.0] * 7
    lines = [r.message for r in caplog.records if "is skipped: that of step 1 still runs" in r.message]
    assert lines and "num_replicas" in lines[0] and "eval_steps" in lines[0]


def test_a_step_between_two_pushes_is_pushed_to_the_validation_alone(run, a_run):
    done = apart(a_run, steps=6, sync_every=3, ratio=0.5)
    run(done.go())
    assert [version for version, _, _ in results(done)] == [1, 2, 3, 4, 5, 6]
    assert [m["weights/version"] for m in done.published] == [0, 0, 3, 3, 3, 6], "the rollout's versions are its own"


@pytest.mark.parametrize("every", [1, 3])
def test_its_replicas_run_again_when_the_push_asks_them_for_the_canary(run, a_run, every):
    """A paused engine answers no score, and the push would never end."""
    done, runs = apart(a_run, steps=3, sync_every=every, ratio=0.5), []
    (validator,) = (r for r in done.replicas if r.name == "validator-0")
    sent = {name: getattr(done.sync, name) for name in ("push", "resync_returned")}

    def watched(name):
        async def send(step):
            result = await sent[name](step)
            runs.append((step, validator._serving.is_set()))
            return result

        return send

    done.sync.push, done.sync.resync_returned = watched("push"), watched("resync_returned")
    run(done.go())
    assert runs == [(0, True), (1, True), (2, True), (3, True)]


def test_what_the_data_leaves_at_its_end_is_measured(run, a_run):
    done = apart(a_run, steps=10, eval_every=2)
    done.size = 12
    assert run(done.go()) is RunEnd.END_OF_DATA
    assert [version for version, _, _ in results(done)] == [2, 3]


@pytest.mark.parametrize("seconds", [9.0, 14.0, 20.0])
def test_a_replica_of_the_validation_that_dies_comes_back_and_stops_nobody(run, a_run, seconds):
    hit = apart(a_run, steps=6, eval_every=2)

    async def go():
        running = asyncio.create_task(hit.go())
        await asyncio.sleep(seconds)
        next(r for r in hit.replicas if r.name == "validator-0").die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    assert results(hit)[-1] == (6, 0, 3) and hit.published[-1]["rollout/lost_engines"] == 0
    assert len(results(hit)) + hit.published[-1]["validation/skipped"] == 3
    assert [m["time/validation_s"] for m in hit.published[:-1]] == [0.0] * 5


def test_answers_of_two_versions_are_no_result_and_count_as_skipped(run, a_run, caplog):
    """Those that ended before the death are the short ones: their mean says nothing of the model."""
    hit = apart(a_run, steps=6, eval_every=2, validator_speeds=(1.0,))
    hit.restart_s = 12.0

    async def go():
        running = asyncio.create_task(hit.go())
        validator = next(r for r in hit.replicas if r.name == "validator-0")
        while not any(r.request_id.startswith("validation.2") for r in validator.submitted):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        validator.die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    found = results(hit)
    assert found[-1] == (6, 0, 3) and all(samples == 3 for _, _, samples in found)
    assert len(found) + hit.published[-1]["validation/skipped"] == 3 and len(found) < 3
    assert any("answers are of newer weights" in r.message for r in caplog.records)


def test_without_a_replica_left_the_run_goes_on_and_counts_what_is_not_measured(run, a_run, caplog):
    hit = apart(a_run, steps=4)

    async def restart(name, number):
        raise ConnectionError("no such device")

    hit.restart = restart

    async def go():
        running = asyncio.create_task(hit.go())
        await asyncio.sleep(14.0)
        next(r for r in hit.replicas if r.name == "validator-0").die("SIGKILL")
        return await running

    assert run(go()) is RunEnd.FINISHED
    assert len(results(hit)) + hit.published[-1]["validation/skipped"] == 4
    assert any("none of its replicas is alive" in r.message for r in caplog.records)


def test_every_set_has_its_own_metrics_and_one_version(run, a_run):
    done = apart(a_run, steps=2, validation_sets=("", "sampled"))
    run(done.go())
    last = done.published[-1]
    assert last["validation/samples"] == last["validation/sets/sampled/samples"] == 3
    assert (last["validation/version"], last["validation/lag"]) == (2, 0)
