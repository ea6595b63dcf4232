"""Engines that hold every byte and compute something else are found, and the suspect is named."""

import asyncio
from array import array

import pytest

from roll_async.config.api import load
from roll_async.weight_sync.canary import Canary, CanaryOptions, EngineMismatch, canary_rows

ROWS = [[1, 2, 3], [4, 5]]


class Trainer:
    def __init__(self, values):
        self.values, self.asked = values, []

    async def score(self, rows):
        self.asked.append(rows)
        return _rows(self.values)


class Engine:
    def __init__(self, name, values):
        self.name, self.values = name, values

    async def score(self, rows):
        if isinstance(self.values, Exception):
            raise self.values
        return _rows(self.values)


def _rows(values):
    return [array("f", values[:2]), array("f", values[2:])]


def history(*versions, **options):
    """Reports after pushes of 1, 2, ...; each version: (trainer's three log-probs, engines' by name)."""
    canary = Canary(ROWS, Trainer(None), CanaryOptions(prompts=2, band=0.1, **options))

    async def go():
        reports = []
        for version, (trainer, engines) in enumerate(versions, 1):
            canary._source.values = trainer
            await canary.begin(version)
            await canary.start(version, [Engine(name, values) for name, values in engines.items()])
            reports.append(await canary.found())
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
            await canary.begin(version)
            await canary.start(version, [Engine("a", values)])
        return await canary.found()

    assert asyncio.run(go()).moved == pytest.approx(1)


def test_rows_are_the_prompts_with_two_tokens_cut_to_the_limit():
    options = CanaryOptions(prompts=3, band=1, max_tokens=3)
    assert canary_rows([array("i", [1]), array("i", range(9)), array("i", [5, 6])], options) == [[0, 1, 2], [5, 6]]


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
        assert await canary.found() is None
        await canary.begin(1)
        await canary.start(1, [Slow("a", [-1, -2, -3])])
        started_s = loop.time()
        trainer.values = [-2, -3, -4]
        await canary.begin(2)
        report = await canary.found()
        return started_s, loop.time() - started_s, report

    started_s, waited_s, report = run(go())
    assert (started_s, waited_s) == (0.0, 5.0) and report.difference == {"a": 0.0} and report.alarms == ()
