"""Engines that hold every byte and compute something else are found, and the suspect is named."""

import asyncio
from array import array

import pytest

from roll_async.config.api import load
from roll_async.pipelines.metrics import canary_metrics
from roll_async.weight_sync.canary import Canary, CanaryOptions, EngineMismatch, band_of, canary_rows

ROWS = [[1, 2, 3], [4, 5]]
VLLM = "actor_infer.strategy_args.strategy_config"


class Trainer:
    def __init__(self, values):
        self.values, self.asked = values, []

    async def score(self, rows):
        self.asked.append(rows)
        return _rows(self.values, rows)


class Engine:
    def __init__(self, name, values):
        self.name, self.values = name, values

    async def score(self, rows):
        if isinstance(self.values, Exception):
            raise self.values
        return _rows(self.values, rows)


def _rows(values, rows):
    """Two rows."""
    first = len(rows[0]) - 1
    return [array("f", values[:first]), array("f", values[first:])]


def history(*versions, rows=ROWS, **options):
    """Reports after pushes of 1, 2, ...; each version: (trainer's log-probs of both rows, engines' by name)."""
    canary = Canary(rows, Trainer(None), CanaryOptions(prompts=2, band=0.1, **options))

    async def go():
        reports = []
        for version, (trainer, engines) in enumerate(versions, 1):
            canary._source.values = trainer
            await canary.before_push(version)
            await canary.score_on_engines(version, [Engine(name, values) for name, values in engines.items()])
            reports.append(await canary.report())
        return reports

    return asyncio.run(go())


def test_engines_within_the_band_are_no_alarm_and_the_figures_are_means_over_all_tokens():
    (report,) = history(([-1, -2, -3], {"a": [-1.03, -2, -3], "b": [-1, -2, -3.09]}))
    assert report.alarms == () and report.moved is None
    assert report.difference == {"a": pytest.approx(0.01), "b": pytest.approx(0.03)}


def test_an_engine_a_version_behind_is_told_from_one_that_errs():
    before, now = [-1, -2, -3], [-2, -3, -4]
    _, report = history((before, {"a": before, "b": before}), (now, {"a": now, "b": [-1.01, -2, -3]}))
    (alarm,) = report.alarms
    assert (
        alarm.startswith("b differs from the trainer by 1 nats") and "Suspect: weights of an earlier version" in alarm
    )


def test_an_engine_that_stands_still_while_the_trainer_moves_within_the_band_is_found():
    before, now = [-1, -2, -3], [-1.05, -2.05, -3.05]
    _, report = history((before, {"a": before, "b": before}), (now, {"a": now, "b": before}), adapter=True)
    (alarm,) = report.alarms
    assert alarm.startswith("b scores exactly as at version 1") and "Suspect: adapter" in alarm


def test_a_replica_alone_has_other_weights_and_all_alike_have_other_numerics():
    now, wrong = [-1, -2, -3], [-5, -1, -9]
    (alone,) = history((now, {"a": now, "b": wrong, "c": now}))
    (alarm,) = alone.alarms
    assert alarm.startswith("b ") and "Suspect: weights of this replica" in alarm
    _, all_alike = history((now, {}), ([-1.5, -2.5, -3.5], {"a": wrong, "b": wrong}))
    assert len(all_alike.alarms) == 2 and all("Suspect: numerics" in alarm for alarm in all_alike.alarms)


def test_a_push_after_an_optimizer_that_changed_nothing_is_an_alarm_that_ends_no_run():
    now = [-1, -2, -3]
    _, report = history((now, {"a": now}), (now, {"a": now}), stop=True)
    assert len(report.alarms) == 1 and "optimizer changed no weight" in report.alarms[0]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_log_probs_that_are_no_numbers_are_beyond_every_band(value):
    (report,) = history(([-1, -2, -3], {"a": [value, -2, -3], "b": [-1, -2, -3]}))
    (alarm,) = report.alarms
    assert alarm.startswith("a differs") and not abs(canary_metrics(report)["weights/canary_difference"]) < 1e9
    assert not abs(report.by_depth[256]) < 1e9
    canary = Canary(ROWS, Trainer([-1, -2, -3]), CanaryOptions(prompts=2, band=0.1, stop=True))

    async def go():
        await canary.before_push(1)
        await canary.score_on_engines(1, [Engine("b", [-1, -2, -3])])
        await canary.report()
        await canary.check_returned(1, [Engine("a", [value, -2, -3])])

    with pytest.raises(EngineMismatch, match="a, which returned"):
        asyncio.run(go())


def test_stop_ends_the_run_with_the_suspect():
    with pytest.raises(EngineMismatch, match="version 1: a differs .*on_mismatch: stop"):
        history(([-1, -2, -3], {"a": [-5, -1, -9]}), stop=True)


@pytest.mark.parametrize("error", [ConnectionError("dead"), RuntimeError("paused"), TimeoutError()])
def test_a_replica_that_does_not_answer_is_left_to_those_who_look_after_it(error):
    (report,) = history(([-1, -2, -3], {"a": error, "b": [-1, -2, -3]}), stop=True)
    assert set(report.difference) == {"b"} and report.alarms == ()


def test_a_push_that_is_tried_again_compares_with_the_version_before_not_with_itself():
    canary = Canary(ROWS, Trainer([-1, -2, -3]), CanaryOptions(prompts=2, band=0.1))

    async def go():
        for version, values in ((1, [-1, -2, -3]), (2, [-2, -3, -4]), (2, [-2, -3, -4])):
            canary._source.values = values
            await canary.before_push(version)
            await canary.score_on_engines(version, [Engine("a", values)])
        return await canary.report()

    assert asyncio.run(go()).moved == pytest.approx(1)


def by_depth(*depths, longest=10**6, prompts=3):
    return CanaryOptions(prompts=prompts, band=0.1, depths=depths, longest=longest)


def test_rows_are_the_heads_of_texts_with_two_tokens_that_differ():
    texts = [array("i", ids) for ids in ([1], range(9), range(8), [5, 6], [5, 6])]
    assert canary_rows(texts, by_depth(3)) == [[0, 1, 2], [5, 6]]
    assert canary_rows(texts, by_depth(3, longest=2)) == [[0, 1], [5, 6]]
    assert canary_rows(texts, by_depth(3, prompts=1)) == [[0, 1, 2]]
    assert canary_rows([array("i", [1]), array("i")], by_depth(3, 6)) == []


def test_one_long_row_of_texts_in_a_row_goes_as_deep_as_the_context(caplog):
    texts = [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]
    assert canary_rows(texts, by_depth(2, 4, 8)) == [[1, 2], [5, 6], [7, 8], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert canary_rows(texts, by_depth(2, 4, 8, longest=7))[-1] == [1, 2, 3, 4, 5, 6, 7]
    assert not caplog.text


def test_a_depth_with_too_little_text_is_left_out_and_the_log_says_so_once(caplog):
    texts = [[1, 2, 3, 4], [5]]
    assert canary_rows(texts, by_depth(2, 4, 8)) == [[1, 2], [1, 2, 3, 4]]
    assert [r.getMessage() for r in caplog.records] == [
        "Weight canary: 5 tokens of text; deeper than 4 nothing is compared"
    ]
    caplog.clear()
    assert canary_rows(texts, by_depth(4, 9, 12)) == [[1, 2, 3, 4]]
    assert "5 tokens of text; deeper than 4 nothing is compared" in caplog.text and len(caplog.records) == 1


def test_the_rows_of_a_long_context_have_a_bounded_number_of_tokens():
    options = by_depth(256, 2048, 8192, longest=32767, prompts=16)
    rows = canary_rows((range(i, i + 30_000) for i in range(10**9)), options)
    assert sum(map(len, rows)) == 16 * 256 + 8192


@pytest.mark.parametrize(
    ("length", "depths"),
    [(120, (256,)), (2047, (256,)), (2048, (256, 2048)), (8191, (256, 2048)), (40_000, (256, 2048, 8192))],
)
def test_the_depths_are_those_that_the_context_has_beside_the_token_that_an_engine_samples(length, depths):
    config = load("configs/rlvr_config_async_cpu.yaml", (f"response_length={length - 24}",), "rlvr")
    options = CanaryOptions.of(config)
    assert options is not None and (options.depths, options.longest) == (depths, length - 1)


def test_a_difference_is_told_by_depth_and_the_alarm_names_the_first_that_is_beyond_the_band(caplog):
    """Two tokens of the short row and three of the long one are not deeper than 4; two are."""
    rows, long = [[1, 2, 3], [1, 2, 3, 4, 5, 6]], {"depths": (4, 6), "rows": [[1, 2, 3], [1, 2, 3, 4, 5, 6]]}
    trainer = [-1.0] * 7
    late, early = [-1.0] * 5 + [-1.2, -1.4], [-1.0, -1.0, -2.0, -1.0, -1.0, -1.0, -1.0]
    (report,) = history((trainer, {"a": trainer, "b": late, "c": late}), **long)
    assert report.by_depth == {4: 0.0, 6: pytest.approx(0.3)} and report.difference["b"] == pytest.approx(0.6 / 7)
    assert len(report.alarms) == 2, "although the mean of all tokens is within the band"
    for alarm in report.alarms:
        assert "differs from the trainer by 0.3 nats on average in tokens 4 to 6 (band 0.1)" in alarm
        assert "agrees before. Suspect: numerics of long texts (rope scaling" in alarm
    (report,) = history((trainer, {"a": trainer, "b": early}), **long)
    (alarm,) = report.alarms
    assert "by 0.2 nats on average in the first 4 tokens" in alarm and "Suspect: weights of this replica" in alarm
    with pytest.raises(EngineMismatch, match="in tokens 4 to 6"):
        history((trainer, {"a": late}), stop=True, **long)

    async def returns():
        canary = Canary(rows, Trainer(trainer), CanaryOptions(prompts=2, band=0.1, stop=True, depths=(4, 6)))
        await canary.check_returned(3, [Engine("a", late)])

    with pytest.raises(EngineMismatch, match="a, which returned between two pushes, .* in tokens 4 to 6"):
        asyncio.run(returns())


def test_without_rows_nothing_is_compared_until_a_batch_is_trained_whose_texts_they_are(build, caplog):
    """Agentic runs: the world gives the first observation. Two groups, of two trajectories and of one."""
    caplog.set_level("INFO", "roll_async")
    prompts = build.prompt(ids=(5, 6)), build.prompt(ids=(8, 9))
    rows_of = [build.sample(prompts[0], (7,)), build.sample(prompts[0], (2,))], [build.sample(prompts[1], (3,))]
    groups = [build.group(i, samples=tuple(s), prompt=p) for i, (s, p) in enumerate(zip(rows_of, prompts, strict=True))]

    async def go():
        trainer = Trainer([-1, -2, -3, -4])
        canary = Canary([], trainer, CanaryOptions(prompts=2, band=0.1, stop=True, at_once=True))
        engine = Engine("a", [-1, -2, -3, -4])
        await canary.before_push(0)
        canary.score_on_trainer(0)
        await canary.score_on_engines(0, [engine])
        await canary.check_returned(0, [engine])
        assert await canary.report() is None and trainer.asked == []
        canary.taken([])
        canary.taken([])
        canary.taken(groups)
        canary.taken([build.group(9)])
        await canary.before_push(1)
        await canary.score_on_engines(1, [engine])
        return trainer.asked, await canary.report()

    asked, report = asyncio.run(go())
    assert asked == [[[5, 6, 7], [8, 9, 3]]], "one of each group before a second of any, and for good"
    assert report.difference == {"a": 0.0} and report.moved is None and report.alarms == ()
    assert caplog.text.count("no push is checked until one has") == 1
    assert caplog.text.count("its rows come with the first batch, no push before is checked") == 1


@pytest.mark.parametrize(
    ("overrides", "band"),
    [
        ((), 1e-3),
        (("actor_infer.model_args.dtype=bf16",), 0.1),
        ((f"{VLLM}={{quantization: fp8}}",), 0.1),
        ((f"{VLLM}={{quantization: fp8}}", "weight_sync.canary_band=0.02"), 0.02),
    ],
)
def test_the_band_is_that_of_the_coarsest_format(overrides, band):
    """fp8: 0.0092 nats were measured, and a band of ten times as much."""
    on_gpus = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]", "actor_infer.model_args.dtype=fp32")
    config = load("configs/rlvr_config_async_cpu.yaml", (*on_gpus, *overrides), "rlvr")
    assert band_of(config) == band


@pytest.mark.parametrize(
    ("overrides", "waits"),
    [
        ((), False),
        (("weight_sync.on_mismatch=stop",), True),
        (("async_generation_ratio=0", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]"), True),
        (("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"), False),
    ],
)
def test_a_push_waits_for_the_answers_where_the_config_says_stop_or_engines_sleep_in_the_next_step(overrides, waits):
    options = CanaryOptions.of(load("configs/rlvr_config_async_cpu.yaml", overrides, "rlvr"))
    assert options is not None and (options.stop or options.at_once) == waits


def test_the_next_push_waits_for_the_answers_that_are_about_the_weights_before_it(run):
    class Slow(Engine):
        async def score(self, rows):
            await asyncio.sleep(5.0)
            return await super().score(rows)

    async def go():
        loop, trainer = asyncio.get_running_loop(), Trainer([-1, -2, -3])
        canary = Canary(ROWS, trainer, CanaryOptions(prompts=2, band=0.1))
        assert await canary.report() is None
        await canary.before_push(1)
        await canary.score_on_engines(1, [Slow("a", [-1, -2, -3])])
        started_s = loop.time()
        trainer.values = [-2, -3, -4]
        await canary.before_push(2)
        report = await canary.report()
        return started_s, loop.time() - started_s, report

    started_s, waited_s, report = run(go())
    assert (started_s, waited_s) == (0.0, 5.0) and report.difference == {"a": 0.0} and report.alarms == ()
