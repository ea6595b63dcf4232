"""What a record of a step becomes."""

import json

import pytest

from roll_async.observe.disk import Unwritable
from roll_async.observe.progress import Screen
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.run_folder import RunFolder


class Kept:
    """A tracker that keeps what it is told, and raises `error` from one step on, or when it is closed (step None)."""

    keeps_history = True

    def __init__(self, name="kept", error=None, at=None):
        self.name, self.told, self.closed, self._error, self._at = name, {}, 0, error, at
        self.told_samples = []

    def log(self, step, metrics):
        if self._error is not None and self._at is not None and step >= self._at:
            raise self._error
        self.told[step] = dict(metrics)

    def samples(self, step, picked):
        self.told_samples.append((step, picked))

    def close(self):
        self.closed += 1
        if self._error is not None:
            raise self._error


def test_a_validation_reaches_the_trackers_also_between_two_logged_steps(tmp_path):
    kept = Kept()
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [kept], Screen(4), logging_steps=2)
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
    rest = iter(made)
    folder = RunFolder(str(tmp_path), "run")
    recorder = Recorder(folder, [], Screen(4), logging_steps=2, create={"kept": lambda: next(rest)})
    for step in (1, 2, 3, 4):
        recorder.step(step, dict.fromkeys(REQUIRED_KEYS, 0.0))
    folder.leave_behind(3, tmp_path / "aside")
    recorder.new_branch()
    recorder.step(4, dict.fromkeys(REQUIRED_KEYS, 1.0))
    assert sorted(made[0].told) == [2, 4] and sorted(made[1].told) == [2, 4]
    assert [told[4]["reward/mean"] for told in (made[0].told, made[1].told)] == [0.0, 1.0]


def test_a_metric_above_its_limit_is_one_warning_until_it_has_been_below(tmp_path, caplog):
    limits = {"idle/trainer": 0.5, "fully_async/sync_failure": 0.0}
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(5), logging_steps=9, alarms=limits)
    for step, idle in enumerate((0.5, 0.6, 0.9, 0.1, 0.7), start=1):
        recorder.step(step, {**dict.fromkeys(REQUIRED_KEYS, 0.0), "idle/trainer": idle})
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "tracking.alarms: step 1 has no metric fully_async/sync_failure; docs_roll/metrics.md lists all",
        "alarm: idle/trainer is 0.6 at step 2, above 0.5 (tracking.alarms)",
        "alarm: idle/trainer is 0.7 at step 5, above 0.5 (tracking.alarms)",
    ]


def test_a_metric_that_comes_late_is_an_alarm_all_the_same(tmp_path, caplog):
    recorder = Recorder(
        RunFolder(str(tmp_path), "run"), [], Screen(5), logging_steps=9, alarms={"val/reward_mean": 0.5}
    )
    recorder.step(1, dict.fromkeys(REQUIRED_KEYS, 0.0))
    recorder.step(2, {**dict.fromkeys(REQUIRED_KEYS, 0.0), "val/reward_mean": 0.75})
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "tracking.alarms: step 1 has no metric val/reward_mean; docs_roll/metrics.md lists all",
        "alarm: val/reward_mean is 0.75 at step 2, above 0.5 (tracking.alarms)",
    ]


def steps(recorder, *numbers):
    for step in numbers:
        recorder.step(step, dict.fromkeys(REQUIRED_KEYS, float(step)))


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_every_tracker_gets_every_metric_and_one_that_raises_is_left_out_with_one_warning(tmp_path, caplog):
    good, bad = Kept("good"), Kept("bad", error=ConnectionError("no route"), at=2)
    create = {"bad": lambda: bad, "good": lambda: good}
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(4), logging_steps=1, create=create)
    steps(recorder, 1, 2, 3, 4)
    recorder.close()
    assert sorted(good.told) == [1, 2, 3, 4] and sorted(bad.told) == [1] and good.told[1] == bad.told[1]
    assert good.closed == bad.closed == 1, "what it holds is given back at the end, in silence"
    (told,) = warnings(caplog)
    assert told.startswith("tracker bad failed at step 2 and is left out; metrics.jsonl has all steps: ConnectionError")


@pytest.mark.parametrize("error", [RuntimeError("service is gone"), SystemExit(1), OSError("pipe")])
def test_a_tracker_that_fails_to_finish_is_a_warning_and_the_others_are_closed(tmp_path, caplog, error):
    made = {"bad": Kept("bad", error=error), "good": Kept("good")}
    create = {name: (lambda tracker=tracker: tracker) for name, tracker in made.items()}
    lasting = Kept("lasting", error=error)
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [lasting], Screen(4), logging_steps=1, create=create)
    steps(recorder, 1)
    recorder.close()
    assert [t.closed for t in (*made.values(), lasting)] == [1, 1, 1]
    assert {line.split(";")[0] for line in warnings(caplog)} == {
        "tracker bad failed to finish", "tracker lasting failed to finish"
    }  # fmt: skip


def test_a_full_disk_is_told_by_whoever_finds_it_and_ends_the_run(tmp_path):
    full = Kept("tensorboard", error=Unwritable("cannot write"), at=1)
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [full], Screen(4), logging_steps=1)
    with pytest.raises(Unwritable):
        steps(recorder, 1)


def test_after_a_step_back_a_tracker_that_failed_gets_another_chance_and_one_that_cannot_start_is_left_out(
    tmp_path, caplog
):
    first = [Kept("bad", error=OSError("gone"), at=1), Kept("good")]
    second = Kept("bad")
    made = {"bad": iter([first[0], second]), "good": iter([first[1]])}

    def create(name):
        if (found := next(made[name], None)) is None:
            raise ValueError(f"tracking.track_with {name}: cannot start")
        return found

    folder = RunFolder(str(tmp_path), "run")
    names = {"bad": lambda: create("bad"), "good": lambda: create("good")}
    recorder = Recorder(folder, [], Screen(4), logging_steps=1, create=names)
    steps(recorder, 1, 2)
    folder.leave_behind(1, tmp_path / "aside")
    recorder.new_branch()
    steps(recorder, 2, 3)
    recorder.close()
    assert sorted(second.told) == [1, 2, 3] and sorted(first[1].told) == [1, 2]
    assert [t.closed for t in (*first, second)] == [1, 1, 1]
    assert [line.split(";")[0] for line in warnings(caplog)] == [
        "tracker bad failed at step 1 and is left out", "tracker good is left out"
    ]  # fmt: skip


def test_a_tracker_that_cannot_start_keeps_the_run_from_starting_and_the_others_are_closed(tmp_path):
    opened = Kept("opened")

    def refuses():
        raise ValueError("tracking.track_with wandb: cannot start")

    with pytest.raises(ValueError, match="wandb: cannot start"):
        create = {"opened": lambda: opened, "wandb": refuses}
        Recorder(RunFolder(str(tmp_path), "run"), [], Screen(4), logging_steps=1, create=create)
    assert opened.closed == 1


ANSWER = {
    "prompt": "2+2=", "ground_truth": "4", "finish_reason": "stop", "loss_mask": [1], "version_runs": [[0, 1]],
}  # fmt: skip


def rows(*scores):
    return [{**ANSWER, "group_id": i // 2, "score": score, "response": f"<{i}>"} for i, score in enumerate(scores)]


def test_samples_are_shown_at_the_first_step_and_every_n_steps_and_trackers_are_told_by_the_next_record(
    tmp_path, capsys
):
    kept = Kept()
    folder = RunFolder(str(tmp_path), "run")
    recorder = Recorder(folder, [kept], Screen(9), logging_steps=1, samples_every=3)
    for step in (1, 2, 3, 4):
        steps(recorder, step)
        assert [found for found, _ in kept.told_samples] == {1: [], 2: [1], 3: [1], 4: [1, 3]}[step]
        recorder.samples(step, rows(0.5, 0.5, 1.0, 0.0))
    steps(recorder, 6)
    recorder.samples(6, rows(1.0, 0.0))
    recorder.close()
    assert [found for found, _ in kept.told_samples] == [1, 3, 6]
    assert [row["score"] for row in kept.told_samples[0][1]] == [1.0, 0.0]
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("sample")] == [
        f"sample of step {step}" for step in (1, 3, 6)
    ]


def test_no_samples_are_shown_where_none_are_wanted_or_none_has_a_score(tmp_path, capsys):
    for every, scores in ((0, (1.0, 0.0)), (1, (None, None))):
        kept = Kept()
        recorder = Recorder(RunFolder(str(tmp_path), "run"), [kept], Screen(9), logging_steps=1, samples_every=every)
        recorder.samples(1, rows(*scores))
        recorder.close()
        assert kept.told_samples == [] and "sample" not in capsys.readouterr().out


def flat(recorder, step, low, high):
    answers = {"throughput/samples_per_s": 8.0, "time/step_s": 2.0, "response/truncated": 0.25}
    metrics = {**dict.fromkeys(REQUIRED_KEYS, 0.0), **answers, "reward/min": low, "reward/max": high}
    recorder.step(step, metrics)


def test_a_reward_that_does_not_vary_from_the_start_is_explained_once_with_three_answers(tmp_path, caplog):
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(9), logging_steps=1)
    for step in range(1, 7):
        flat(recorder, step, 0.0, 0.0)
        recorder.samples(step, [{**row, "response": "\x1b[2J" + row["response"]} for row in rows(*[0.0] * 8)])
    (told,) = warnings(caplog)
    first, *answers, last = told.splitlines()
    assert first == "the reward is flat: all 16 answers of each of the first 3 steps scored 0"
    assert answers == [f'  "\\x1b[2J<{i}>" (score 0.000  version 0  1 tokens; expected 4)' for i in (1, 3, 5)]
    assert "format, extraction" in last and "25%: response_length" in last


@pytest.mark.parametrize(
    ("first", "scores"), [(1, [(0, 0), (0, 1), (0, 0)]), (1, [(0, 0), (1, 1), (1, 1)]), (5, [(0, 0)] * 3)]
)
def test_a_reward_that_varies_or_a_run_that_goes_on_is_no_flat_reward(tmp_path, caplog, first, scores):
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(9), logging_steps=1)
    for step, (low, high) in enumerate([*scores, (0, 0), (0, 0), (0, 0)], start=first):
        flat(recorder, step, float(low), float(high))
    assert warnings(caplog) == []


def test_a_validation_that_no_record_of_a_step_has_is_a_line_of_its_own(tmp_path, capsys):
    recorder = Recorder(RunFolder(str(tmp_path), "run"), [], Screen(9), logging_steps=1)
    recorder.event("validation", **{"validation/version": 8.0, "validation/accuracy": 0.25, "validation/samples": 64.0})
    recorder.event("end_of_data", leftover="3 groups")
    assert capsys.readouterr().out == "validation of step 8  accuracy 0.250  64 samples\n"
