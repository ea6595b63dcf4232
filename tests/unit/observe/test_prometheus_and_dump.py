"""What leaves the run besides metrics.jsonl: an endpoint to scrape, and the trained samples themselves."""

import json
import math
from array import array
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from roll_async.observe.prometheus import PrometheusTracker, exposition
from roll_async.observe.sample_dump import EVERY_GROUP, SampleDump, chosen_groups
from roll_async.pipelines.metrics import sample_rows
from roll_async.schema import Outcome, Turn
from tests.patience import patient


def test_metrics_are_gauges_with_legal_names_and_every_kind_of_number():
    text = exposition({"reward/mean": 0.5, "policy/k1+": math.nan, "x": math.inf}, run='a "b"\\')
    assert 'roll_async_reward_mean{run="a \\"b\\"\\\\"} 0.5' in text
    assert "roll_async_policy_k1_{run=" in text and text.count("# TYPE") == 3
    assert "} NaN" in text and "} +Inf" in text


@pytest.mark.slow
def test_the_endpoint_answers_with_the_newest_value_of_every_key_until_it_is_closed():
    tracker = PrometheusTracker("run", 0)
    url = f"http://127.0.0.1:{tracker.port}"
    try:
        tracker.log(1, {"reward/mean": 0.25})
        tracker.log(2, {"reward/mean": 0.75})
        with urlopen(f"{url}/metrics", timeout=patient(5)) as answer:
            assert answer.read().decode().endswith('roll_async_reward_mean{run="run"} 0.75\n')
        tracker.log(3, {"validation/accuracy": 0.5})
        with urlopen(f"{url}/metrics", timeout=patient(5)) as answer:
            text = answer.read().decode()
        assert '_mean{run="run"} 0.75\n' in text and 'validation_accuracy{run="run"} 0.5\n' in text
        with pytest.raises(HTTPError):
            urlopen(f"{url}/other", timeout=5)
        with pytest.raises(ValueError, match=f"prometheus_port {tracker.port}.*choose another"):
            PrometheusTracker("second", tracker.port)
    finally:
        tracker.close()
    with pytest.raises(OSError):
        urlopen(f"{url}/metrics", timeout=1)


def test_every_trained_sample_is_a_line_with_text_tokens_versions_and_score(tmp_path, build):
    groups = [build.group(group_id=i, scores=(1.0, 0.0), version=3) for i in (4, 9)]
    dump = SampleDump({tmp_path / "samples": EVERY_GROUP}, lambda rows: [" ".join(map(str, ids)) for ids in rows])
    dump.write(7, lambda num_groups: sample_rows(groups, num_groups=num_groups))
    dump.close()
    (file,) = (tmp_path / "samples").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "step_00000007.jsonl" and [r["group_id"] for r in rows] == [4, 4, 9, 9]
    first = rows[0]
    assert (first["prompt"], first["response"], first["response_token_ids"]) == ("5 6", "7 8", [7, 8])
    assert first["response_pieces"] == ["7", "8"]
    assert first["score"] == 1.0 and first["version_runs"] == [[3, 2]] and first["loss_mask"] == [1, 1]
    assert first["step"] == 7 and first["row_id"] == "row4" and first["behaviour_logprobs"] == [-0.5, -0.5]


def test_a_line_of_a_trajectory_says_how_it_ended_and_what_each_turn_was_given(build):
    group = build.group(scores=(1.0,))
    turns = (Turn(index=3, start=0, num_tokens=1, reward=0.25, state=7), Turn(index=4, start=1, num_tokens=1))
    row = replace(group.samples[0], trajectory="4.0/0", outcome=Outcome.TRUNCATED_TURNS, turns=turns)
    (line,) = sample_rows([replace(group, samples=(row,))], [array("f", [0.5, -1.5])])
    assert (line["trajectory"], line["outcome"]) == ("4.0/0", "truncated_turns")
    assert line["turns"][0] == {
        "index": 3, "start": 0, "num_tokens": 1, "reward": 0.25, "state": 7, "advantage": 0.5,
    }  # fmt: skip
    assert (line["advantage"], line["turns"][1]["advantage"]) == (-0.5, -1.5)
    assert [turn["index"] for turn in json.loads(json.dumps(line))["turns"]] == [3, 4]


def test_the_advantage_of_a_line_is_the_mean_over_its_sampled_tokens(build):
    group = build.group(scores=(1.0, 0.0, 0.5))
    called = build.sample(group.prompt, ids=(7, 8, 9), loss_mask=bytes((1, 0, 1)))
    silent = build.sample(group.prompt, ids=(7,), loss_mask=bytes(1))
    group = replace(group, samples=(called, silent))
    lines = sample_rows([group], [array("f", [1.0, 9.0, 2.0]), array("f", [9.0])])
    assert [line["advantage"] for line in lines] == [1.5, None]
    assert [line["advantage"] for line in sample_rows([group])] == [None, None], "nothing was trained"


def test_a_line_has_the_entropy_of_each_token_that_was_trained_and_none_where_none_was(build):
    group = build.group(scores=(1.0, 0.0))
    told = array("f", [0.5, math.nan])
    first, second = sample_rows([group], entropies=[told, array("f", [math.nan] * 2)])
    assert (first["entropies"], second["entropies"]) == ([0.5, None], None)
    assert sample_rows([group])[0]["entropies"] is None


def test_a_line_has_the_advantage_and_the_trainers_log_prob_of_each_token_where_they_differ(build):
    group = build.group(scores=(1.0, 0.0))
    row = build.sample(group.prompt, ids=(7, 8, 9), loss_mask=bytes((1, 0, 1)))
    group = replace(group, samples=(row, row))
    advantages = [array("f", [1.0, 9.0, 2.0]), array("f", [1.0, 9.0, 1.0])]
    first, second = sample_rows([group], advantages, [array("f", [-0.25, 0.0, -1.0])] * 2)
    assert (first["advantages"], second["advantages"]) == ([1.0, 0.0, 2.0], None)
    assert first["trainer_logprobs"] == [-0.25, 0.0, -1.0]
    assert sample_rows([group], advantages)[0]["trainer_logprobs"] is None


def test_the_best_the_worst_and_groups_evenly_between_them_are_chosen_and_always_the_same():
    means = {number: number / 10 for number in range(9)}
    assert [sorted(chosen_groups(means, n)) for n in (0, 1, 2, 3, 5)] == [
        [], [8], [0, 8], [0, 4, 8], [0, 2, 4, 6, 8],
    ]  # fmt: skip
    assert chosen_groups(means, 99) == set(means) and len(chosen_groups(dict.fromkeys(range(7), 0.5), 4)) == 4


def test_each_folder_gets_its_number_of_groups_and_a_screen_the_rows_with_their_texts(tmp_path, build):
    scores = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.0))
    groups = [build.group(group_id=i, scores=found) for i, found in enumerate(scores)]
    few, every, seen = tmp_path / "few", tmp_path / "every", []
    dump = SampleDump(
        {few: 2, every: EVERY_GROUP}, lambda rows: ["text"] * len(rows), show=lambda *told: seen.append(told)
    )
    dump.write(3, lambda num_groups: sample_rows(groups, num_groups=num_groups))
    dump.close()
    kept = {
        folder: [json.loads(line)["group_id"] for line in (folder / "step_00000003.jsonl").read_text().splitlines()]
        for folder in (few, every)
    }
    assert kept == {few: [0, 0, 2, 2], every: [0, 0, 1, 1, 2, 2, 3, 3]}
    ((step, rows),) = seen
    assert step == 3 and len(rows) == 8 and {row["response"] for row in rows} == {"text"}
    assert [row["group_id"] for row in sample_rows(groups, num_groups=2)] == [0, 0, 2, 2]


def test_half_of_a_surrogate_pair_is_an_escape_in_a_dump(tmp_path, build):
    dump = SampleDump({tmp_path: EVERY_GROUP}, lambda rows: ["\ud83d and \u00e9"] * len(rows))
    dump.write(3, lambda num_groups: sample_rows([build.group()], num_groups=num_groups))
    dump.close()
    rows = [json.loads(line) for line in (tmp_path / "step_00000003.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["response"] for row in rows} == {"\ud83d and \u00e9"}


def test_a_dump_that_cannot_be_written_is_not_silent(tmp_path, build):
    def refuse(rows):
        raise OSError("disk is full")

    dump = SampleDump({tmp_path: 1}, refuse)
    dump.write(1, lambda num_groups: sample_rows([build.group()]))
    with pytest.raises(OSError, match="disk is full"):
        dump.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="rollout_dump_dir"):
        SampleDump({tmp_path / "file" / "folder": 1}, refuse)
