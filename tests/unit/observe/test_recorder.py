"""What a record of a step becomes."""

import json

from roll_async.observe.progress import ProgressLine
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.run_folder import RunFolder


class Kept:
    """A tracker that keeps what it is told."""

    keeps_history = True

    def __init__(self):
        self.told = {}

    def log(self, step, metrics):
        self.told[step] = dict(metrics)

    def close(self):
        pass


def test_a_validation_reaches_the_trackers_also_between_two_logged_steps(tmp_path):
    kept = Kept()
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [kept], ProgressLine(4), logging_steps=2)
    result = {"validation/lag": 1.0, "validation/accuracy": 0.5, "validation/sets/aime/avg@8": 0.25}
    for step in (1, 2, 3, 4):
        found = result if step in (3, 4) else {}
        recorder.step(step, {**dict.fromkeys(REQUIRED_KEYS, 0.0), "validation/skipped": 2.0, **found})
    recorder.close()
    assert sorted(kept.told) == [2, 3, 4], "validations that were skipped are no result"
    assert kept.told[3] == {"validation/skipped": 2.0, **result}
    assert "validation/lag" not in kept.told[2] and kept.told[4].keys() >= {"reward/mean", *result}
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4] and all("reward/mean" in r for r in records)


def test_a_run_that_goes_back_tells_a_new_tracker_of_the_steps_it_keeps_and_the_old_one_nothing_more(tmp_path):
    made = [Kept(), Kept()]
    folder = RunFolder(str(tmp_path), "run")
    recorder = Recorder(folder, [made[0]], ProgressLine(4), logging_steps=2, create=lambda: made[1])
    for step in (1, 2, 3, 4):
        recorder.step(step, dict.fromkeys(REQUIRED_KEYS, 0.0))
    folder.leave_behind(3, tmp_path / "aside")
    recorder.new_branch()
    recorder.step(4, dict.fromkeys(REQUIRED_KEYS, 1.0))
    assert sorted(made[0].told) == [2, 4] and sorted(made[1].told) == [2, 4]
    assert [told[4]["reward/mean"] for told in (made[0].told, made[1].told)] == [0.0, 1.0]


def test_a_metric_above_its_limit_is_one_warning_until_it_has_been_below(tmp_path, caplog):
    limits = {"idle/trainer": 0.5, "fully_async/sync_failure": 0.0}
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], ProgressLine(5), logging_steps=9, alarms=limits)
    for step, idle in enumerate((0.5, 0.6, 0.9, 0.1, 0.7), start=1):
        recorder.step(step, {**dict.fromkeys(REQUIRED_KEYS, 0.0), "idle/trainer": idle})
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "tracking.alarms: step 1 has no metric fully_async/sync_failure; docs_roll/metrics.md lists all",
        "alarm: idle/trainer is 0.6 at step 2, above 0.5 (tracking.alarms)",
        "alarm: idle/trainer is 0.7 at step 5, above 0.5 (tracking.alarms)",
    ]


def test_a_metric_that_comes_late_is_an_alarm_all_the_same(tmp_path, caplog):
    recorder = Recorder(
        RunFolder(str(tmp_path), "run"), [], ProgressLine(5), logging_steps=9, alarms={"val/reward_mean": 0.5}
    )
    recorder.step(1, dict.fromkeys(REQUIRED_KEYS, 0.0))
    recorder.step(2, {**dict.fromkeys(REQUIRED_KEYS, 0.0), "val/reward_mean": 0.75})
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "tracking.alarms: step 1 has no metric val/reward_mean; docs_roll/metrics.md lists all",
        "alarm: val/reward_mean is 0.75 at step 2, above 0.5 (tracking.alarms)",
    ]
