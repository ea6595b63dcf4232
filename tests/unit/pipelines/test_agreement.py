"""Tokens of the present weights that engine and trainer judge differently: an alarm with its suspect."""

import asyncio
import gc
import logging
from contextlib import nullcontext

import pytest

from roll_async.config.api import load
from roll_async.pipelines.agreement import (
    DIFFERENCE,
    LEAST_TOKENS,
    NUM_TOKENS,
    SHARE,
    PolicyAgreement,
)
from roll_async.pipelines.protocol import RunEnd, RunPlan
from roll_async.weight_sync.canary import CanaryOptions, CanaryReport, EngineMismatch


def differs(by, num_tokens=2 * LEAST_TOKENS, share=0.5):
    """Metrics of a step."""
    return {DIFFERENCE: by, NUM_TOKENS: float(num_tokens), SHARE: share}


def test_log_probs_that_are_no_numbers_do_not_agree():
    assert PolicyAgreement(1e-3, stops=False).check(1, differs(float("nan"))) == {"weights/lag_zero_alarm": 1.0}
    with pytest.raises(EngineMismatch, match="differ by nan nats"):
        PolicyAgreement(1e-3, stops=True).stop_on_mismatch(1, differs(float("nan")))


@pytest.mark.parametrize(
    ("canary", "suspect"),
    [
        (CanaryReport(difference={"a": 1e-5}), "the canary agrees. Suspect: template (the trainer scores other ids"),
        (CanaryReport(alarms=("a errs. Suspect: weights",)), "as the canary of that version did: a errs. Suspect: wei"),
        (None, ", and no canary told them apart. Suspect: weights, numerics or template"),
    ],
)
def test_the_suspect_is_what_the_canary_leaves(canary, suspect, caplog):
    caplog.set_level(logging.WARNING, "roll_async")
    look = PolicyAgreement(1e-3, stops=False)
    look._canary = canary
    assert look.check(1, differs(5e-4)) == {"weights/lag_zero_alarm": 0.0} and not caplog.text
    assert look.check(2, {}) == {}, "no token of lag 0"
    assert look.check(3, differs(0.25)) == {"weights/lag_zero_alarm": 1.0}
    assert "step 3: tokens of the present weights differ by 0.25 nats" in caplog.text and suspect in caplog.text
    look.stop_on_mismatch(3, differs(0.25))
    with pytest.raises(EngineMismatch, match="step 3: .*on_mismatch: stop"):
        PolicyAgreement(1e-3, stops=True).stop_on_mismatch(3, differs(0.25))
    assert PolicyAgreement(None, stops=False).check(1, differs(9.0)) == {}


@pytest.mark.parametrize(
    ("num_tokens", "share", "looks"), [(256, 1.0, True), (255, 1.0, False), (768, 1 / 3, True), (767, 0.33, False)]
)
def test_a_mean_of_a_few_tokens_is_no_evidence_of_a_mismatch(num_tokens, share, looks):
    """A late batch may have one row with a gradient, and one token of it may differ by nats."""
    look = PolicyAgreement(0.1, stops=True)
    metrics = differs(0.2, num_tokens, share)
    assert look.check(1, metrics) == ({"weights/lag_zero_alarm": 1.0} if looks else {})
    with pytest.raises(EngineMismatch) if looks else nullcontext():
        look.stop_on_mismatch(1, metrics)


@pytest.mark.parametrize(
    ("override", "looks"),
    [
        ("weight_sync.on_mismatch=stop", True),
        ("weight_sync.canary_prompts=0", True),
        ("async_training.interrupt.mode=keep", False),
        ("actor_infer.generating_args.top_p=0.9", False),
        ("actor_infer.generating_args.top_k=20", False),
    ],
)
def test_where_equal_weights_need_not_mean_equal_logprobs_nobody_looks(override, looks):
    plan = RunPlan.of(load("configs/rlvr_config_async_cpu.yaml", (override,), "rlvr"), first_step=1)
    assert plan.on_policy_band == (1e-3 if looks else None)
    assert plan.stops_on_mismatch == override.endswith("stop")


def test_a_mismatch_ends_the_run_after_its_step_is_published(a_run, run):
    async def go():
        job = a_run(on_policy_band=1e-3, stops_on_mismatch=True)
        learn = job.learn

        async def wrong(groups, step):
            report = await learn(groups, step)
            report.metrics.update(differs(0.5 if step == 2 else 1e-5))
            return report

        job.learn = wrong
        with pytest.raises(BaseExceptionGroup) as errors:
            async with asyncio.timeout(1000):
                await job.go()
        assert "step 2: tokens of the present weights" in str(errors.value.exceptions[0])
        assert [m["weights/lag_zero_alarm"] for m in job.published] == [0.0, 1.0] and job.saved == [2]

    run(go())


@pytest.mark.parametrize(
    ("answer_s", "waits_s", "where"),
    [(0.0, 0.0, {}), (6.0, 0.0, {}), (20.0, 12.0, {}), (6.0, 6.0, {"stop": True}), (6.0, 6.0, {"at_once": True})],
)
def test_engines_answer_the_canary_of_a_push_beside_the_next_step_whose_record_has_it(
    a_run, run, answer_s, waits_s, where
):
    """A step learns for 8 s. Answers that take longer hold up the next push: they are of the weights before it."""
    done = a_run(ratio=2.0, speeds=(0.1, 0.1), canary=CanaryOptions(prompts=2, band=0.1, **where))
    done.answer_s = answer_s
    assert run(done.go()) is RunEnd.FINISHED
    assert [m["weights/canary_difference"] for m in done.published] == [0.0] * 4
    assert [m.get("weights/canary_moved") for m in done.published] == [None, 1.0, 1.0, 1.0]
    second = done.published[1]
    assert second["time/weight_sync_s"] == pytest.approx(waits_s, abs=0.1)
    assert second["time/step_s"] == pytest.approx(8.0 + waits_s, abs=0.1)


def test_where_prompts_have_no_tokens_the_canary_begins_with_the_push_of_the_first_trained_batch(a_run, run, caplog):
    """As in agentic runs. The trainer scores once a push, and the same rows each time."""
    options = CanaryOptions(prompts=2, band=0.1, depths=(4, 8), longest=8)
    done = a_run(canary=options, ids_of=lambda index: ())
    assert run(done.go()) is RunEnd.FINISHED
    assert [m.get("weights/canary_difference") for m in done.published] == [None, 0.0, 0.0, 0.0]
    assert [m.get("weights/canary_moved") for m in done.published] == [None, None, 1.0, 1.0]
    assert all({"weights/canary_difference_4", "weights/canary_difference_8"} <= m.keys() for m in done.published[1:])
    assert [step for step, _ in done.scored] == [1, 2, 3, 4], "never twice in a step"
    assert len({str(rows) for _, rows in done.scored}) == 1 and len(done.scored[0][1][-1]) == 8
    assert not [r for r in caplog.records if "canary" in r.getMessage() and r.levelno >= logging.WARNING]


def test_the_rows_are_of_the_first_prompts_of_the_data(a_run, run):
    options = CanaryOptions(prompts=2, band=0.1, depths=(4, 8), longest=8)
    done = a_run(canary=options, ids_of=lambda index: (index, 1, 2))
    assert run(done.go()) is RunEnd.FINISHED
    assert done.scored[0] == (0, [[0, 1, 2], [1, 1, 2], [0, 1, 2, 1, 1, 2, 2, 1]])


def test_where_prompts_have_tokens_the_canary_begins_with_the_first_push(a_run, run, caplog):
    """All prompts of this run are the same two tokens, which make no long row; the log says so once."""
    done = a_run(canary=CanaryOptions(prompts=2, band=0.1, depths=(256, 2048), longest=4095))
    assert run(done.go()) is RunEnd.FINISHED
    assert done.scored == [(step, [[5, 6]]) for step in range(5)]
    assert [m["weights/canary_difference_256"] for m in done.published] == [0.0] * 4
    assert caplog.text.count("2 tokens of text; deeper than 256 nothing is compared") == 1


@pytest.mark.parametrize("end", ["stop", "data", "error"])
def test_a_run_that_ends_leaves_no_canary_without_a_listener(a_run, run, end):
    """`go` checks that no task is left."""

    async def go():
        job = a_run(steps=9, canary=CanaryOptions(prompts=2, band=0.1))
        job.answer_s, job.size = 30.0, 8 if end == "data" else 10**9
        learn = job.learn

        async def learns(groups, step):
            if step == 2 and end == "error":
                raise RuntimeError("a rank died")
            if step == 2:
                job.pipeline.request_stop()
            return await learn(groups, step)

        job.learn = learns if end != "data" else learn
        try:
            return await job.go()
        except BaseExceptionGroup as errors:
            return errors.exceptions[0]

    result = run(go())
    assert result in (RunEnd.INTERRUPTED, RunEnd.END_OF_DATA) if end != "error" else "a rank died" in str(result)


def test_a_check_that_fails_while_it_is_cancelled_is_no_noise_on_the_console(run):
    async def go():
        loop, noise = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: noise.append(context["message"]))

        async def fails():
            try:
                await asyncio.sleep(9.0)
            finally:
                raise RuntimeError("the rollout process died")

        look = PolicyAgreement(None, stops=False)
        look.pushed(fails())
        await asyncio.sleep(0)
        await look.close()
        del look
        gc.collect()
        return noise

    assert run(go()) == []
