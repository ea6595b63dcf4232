"""A run's folder read while it goes on: metrics, samples, lanes, advice; and the commands that print them."""

import io
import json
import math
import shutil
import sqlite3
import sys
import time

import pytest

from roll_async.cli import main
from roll_async.observe.progress import Screen
from roll_async.observe.reading.advisories import advisories
from roll_async.observe.reading.run_reader import RunReader, config_differences, visible, who_waits
from roll_async.observe.reading.sample_index import SampleFilter, SampleIndex
from roll_async.observe.recorder import REQUIRED_KEYS, Recorder
from roll_async.observe.run_folder import RunFolder
from tests.unit.observe.written_run import HOSTILE, metrics_of, write_run


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("output"))


@pytest.fixture
def run(once, tmp_path):
    return shutil.copytree(once, tmp_path / "run")


def titles(**changes):
    rows = [metrics_of(step) | {"idle/trainer": 0.1} | changes for step in range(1, 30)]
    return [found["title"] for found in advisories(rows, {"async_training.staleness.max_versions": 3})]


def test_new_lines_are_read_when_they_come_and_a_line_without_its_end_later(run):
    reader = RunReader(run)
    assert [row["step"] for row in reader.metrics] == list(range(1, 21))
    line = json.dumps(metrics_of(21))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(line[:30])
        file.flush()
        assert len(reader.metrics) == 20
        file.write(line[30:] + "\n")
    assert reader.metrics[-1]["step"] == 21


def test_what_is_no_number_is_left_out_since_no_browser_reads_it(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics_of(21) | {"trainer/grad_norm": math.nan}) + "\n")
    path = run / "samples/step_00000020.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"score": -math.inf}) + "\n" for row in rows))
    reader = RunReader(run)
    assert "trainer/grad_norm" not in reader.metrics[-1]
    reader.samples.refresh()
    (first, *_) = reader.samples.page(SampleFilter())[1]
    assert first["score"] is None and reader.samples.group_of(first["id"])[0]["score"] is None


def test_a_run_that_goes_back_is_read_from_its_beginning(run):
    reader = RunReader(run)
    before = (len(reader.metrics), reader.generation)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "partial").write_text("".join(lines[:7]))
    (run / "partial").rename(run / "metrics.jsonl")
    (run / "samples/step_00000020.jsonl").unlink()
    assert len(reader.metrics) == 7 and reader.generation > before[1]
    reader.samples.refresh()
    assert reader.samples.choices()["steps"] == [1, 19]


def test_the_index_takes_new_and_changed_files_alone_and_is_kept(run):
    index = RunReader(run).samples
    assert (index.refresh(), index.refresh()) == (20, 0)
    shutil.copy(run / "samples/step_00000003.jsonl", run / "samples/step_00000021.jsonl")
    text = (run / "samples/step_00000004.jsonl").read_text().splitlines(keepends=True)
    (run / "samples/step_00000004.jsonl").write_text("".join(text[1:]) + "{damaged\n")
    index.close()
    again = RunReader(run).samples
    assert again.refresh() == 2 and again.choices()["count"] == [20 * 16 + 16 - 1]


def test_an_index_that_is_damaged_or_cannot_be_written_is_made_anew(run, tmp_path):
    (tmp_path / "damaged").write_text("no database at all, but long enough to be taken for the head of one" * 20)
    for place in (tmp_path / "damaged", tmp_path / "no such folder" / "index"):
        index = SampleIndex(run / "samples", place)
        assert index.refresh() == 20 and index.page(SampleFilter())[0] == 320


@pytest.mark.parametrize("fault", ["read-only", "locked", "damaged"])
def test_an_index_that_fails_under_way_is_read_in_memory_and_removed_only_where_it_is_damaged(fault, run, tmp_path):
    place = tmp_path / "index"
    first = SampleIndex(run / "samples", place)
    first.refresh()
    first.close()
    if fault == "damaged":
        place.write_bytes(place.read_bytes()[:4096] + b"\xa5" * 100_000)
    (run / "samples/step_00000003.jsonl").touch()
    index, other = SampleIndex(run / "samples", place), sqlite3.connect(place)
    if fault == "read-only":
        index._table.execute("pragma query_only = on")  # file modes do not bind root, who may run this
    if fault == "locked":
        index._table.execute("pragma busy_timeout = 1")
        other.execute("begin immediate")
    assert index.refresh() == 20 and index.page(SampleFilter())[0] == 320
    other.close()
    assert place.exists() == (fault != "damaged")


def test_an_index_with_a_damaged_page_answers_from_one_in_memory(run, tmp_path):
    place = tmp_path / "index"
    index = SampleIndex(run / "samples", place)
    index.refresh()
    wanted = index.page(SampleFilter(order="worst"), limit=400), index.choices(), index.group_of(7)
    index.close()
    size = place.stat().st_size
    for page in range(1, size // 4096):
        place.write_bytes(b"")
        made = SampleIndex(run / "samples", place)
        made.refresh()
        made.close()
        with open(place, "r+b") as file:
            file.seek(4096 * page)
            file.write(b"\xa5" * 4096)
        again = SampleIndex(run / "samples", place)
        assert (again.page(SampleFilter(order="worst"), limit=400), again.choices(), again.group_of(7)) == wanted
        again.close()


LINES = ("[]", "3", "null", '{"reward/mean": 1.0}', '{"step": "7"}', '{"step": 21, "rew', "\0" * 64, "[" * 100_000)
NO_STEPS = tuple(f'{{"step": {step}}}' for step in ("Infinity", "NaN", "1e999", "9" * 400))


@pytest.mark.parametrize("line", LINES + NO_STEPS, ids=lambda line: line[:20])
def test_a_line_of_metrics_that_is_no_record_of_a_step_is_named_each_time_by_all_who_read(line, run):
    reader = RunReader(run)
    assert len(reader.metrics) == 20
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f"{line}\n")
    for read in (lambda: reader.metrics, lambda: reader.metrics, RunFolder(str(run.parent), run.name).read_metrics):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:21 is damaged \(.*\); remove that line$"):
            read()
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(text[:20]))
    assert [row["step"] for row in reader.metrics] == list(range(1, 21))


def test_answers_without_a_score_are_not_the_worst(run):
    path = run / "samples/step_00000020.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"score": None}) + "\n" for row in rows))
    index = RunReader(run).samples
    index.refresh()
    count, found = index.page(SampleFilter(order="worst"), limit=500)
    assert count == 320 and found[0]["score"] == 0.0 and [row["score"] for row in found[-16:]] == [None] * 16


def test_samples_are_filtered_ordered_and_read_whole_with_their_group(run):
    index = RunReader(run).samples
    index.refresh()
    count, rows = index.page(SampleFilter(domain="tools", first_step=5, last_step=6, order="worst"))
    assert count == 8 == len(rows) and {row["step"] for row in rows} == {5, 6}
    assert [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    assert (
        index.page(SampleFilter(outcome="solved", lowest=1.0))[0] == index.page(SampleFilter(outcome="solved"))[0] > 0
    )
    assert index.page(SampleFilter(highest=0.0))[0] + index.page(SampleFilter(lowest=0.5))[0] == 320
    first, second = (index.page(SampleFilter(), offset=offset, limit=50)[1] for offset in (0, 50))
    assert len(first) == 50 and not {row["id"] for row in first} & {row["id"] for row in second}
    group = index.group_of(rows[0]["id"])
    assert len(group) == 4 and rows[0]["id"] in {row["id"] for row in group}
    assert all("".join(row["response_pieces"]) == row["response"] for row in group)
    with pytest.raises(KeyError):
        index.group_of(10**9)


def test_rows_of_an_earlier_version_are_indexed_as_those_of_today(run):
    for path in (run / "samples").glob("*"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # with spaces
    index = RunReader(run).samples
    index.refresh()
    assert index.choices() == {
        "domain": ["addition", "tools"], "outcome": ["failed", "solved", "stop"], "steps": [1, 20],
        "scores": [0.0, 1.0], "count": [320],
    }  # fmt: skip


def test_all_samples_are_read_where_the_run_dumps_all(run):
    (run / "samples").rename(run.parent / "dump")
    config = (run / "config.yaml").read_text().replace("null", str(run.parent / "dump"))
    (run / "config.yaml").write_text(config)
    index = RunReader(run).samples
    assert index.refresh() == 20


def test_lanes_are_the_spans_of_trainer_and_engines_also_of_a_run_that_goes_on(tmp_path):
    reader = RunReader(write_run(tmp_path, steps=2, state="running"))
    tracks = {span["track"] for span in reader.lanes}
    assert tracks == {"trainer", *(f"{of}actor_infer-{i}" for i in (0, 1) for of in ("", "weights of "))}
    assert all(span["end"] > span["begin"] for span in reader.lanes) and reader.about()["state"] == "killed"


def test_lines_of_a_trace_that_a_full_disk_cut_off_are_left_out(run):
    spans = RunReader(run).lanes
    before, last = (run / "trace.json").read_text().rsplit('{"name":"request"', 1)
    (run / "trace.json").write_text(f'{before}{{"name":"requ{{"name":"request"{last}')
    assert len(RunReader(run).lanes) == len(spans) - 1


def test_each_advisory_is_for_what_it_says_and_a_healthy_run_has_none():
    assert titles() == [] and advisories([metrics_of(1)], {}) == []
    assert titles(**{"reward/mean": 0.25}) == ["The reward is flat at 0.250"]
    assert titles(**{"response/truncated": 0.5}) == ["50% of the answers are cut at the length limit"]
    assert titles(**{"staleness/max": 3.0}) == ["Staleness is at its bound of 3 versions"]
    assert titles(**{"idle/trainer": 0.75}) == ["The trainer waits 75% of the time for answers"]
    assert titles(**{"idle/trainer": 0.75, "idle/trainer_rewards": 0.7}) == [
        "The trainer waits 75% of the time for scores"
    ]
    assert titles(**{"idle/engines": 0.75}) == ["The engines are idle 75% of the time"]
    assert titles(**{"correction/ess": 0.5})[0].startswith("Effective sample size 0.50")
    assert titles(**{"weights/canary_alarms": 1.0}) == ["Engines and trainer disagree about the same tokens"]
    rows = [metrics_of(step) | {"idle/trainer": 0.1, "groups/filtered": 12 * step} for step in range(1, 30)]
    assert [found["title"] for found in advisories(rows, {})] == ["75% of the groups are filtered out"]
    falling = [metrics_of(step) | {"idle/trainer": 0.1, "reward/mean": 1 - step / 60} for step in range(1, 50)]
    assert [found["title"] for found in advisories(falling, {})] == ["The reward is lower than at the start"]


def test_a_flat_reward_is_one_rule_for_the_run_itself_and_for_its_page(tmp_path, caplog):
    """The run warns at its third step; its page says the same from then on."""
    for name, scores in {"flat": (0.5, 0.5, 0.5), "varied": (0.0, 1.0, 0.5), "two steps": (0.5, 0.5)}.items():
        caplog.clear()
        folder = RunFolder(str(tmp_path), name)
        recorder = Recorder(folder, [], Screen(9), logging_steps=9)
        for step, score in enumerate(scores, start=1):
            known = {"reward/mean": score, "reward/min": score, "reward/max": score, "response/truncated": 0.0}
            recorder.step(step, dict.fromkeys(REQUIRED_KEYS, 0.0) | known)
        recorder.close()
        warned = [r.getMessage().split(":")[0] for r in caplog.records if "reward" in r.getMessage()]
        assert warned == (["the reward is flat"] if name == "flat" else [])
        found = [found["title"] for found in RunReader(folder.path).about()["advisories"]]
        assert found == (["The reward is flat at 0.500"] if name == "flat" else [])


def test_who_waits_is_told_of_the_newest_steps():
    assert who_waits([metrics_of(1)]) == (
        "trainer without work 72% of the last 1 steps, most of it for answers of engines (58%); engines idle 10%"
    )
    assert who_waits([]) == "no step is trained yet"


def test_configs_are_compared_without_what_differs_in_any_two_runs(run, tmp_path):
    other = write_run(tmp_path, "other", steps=1, learning_rate="2e-6")
    assert config_differences(RunReader(run), RunReader(other)) == [
        ("actor_train.training_args.learning_rate", "1e-6", "2e-6")
    ]


def test_control_characters_are_escapes_in_the_terminal():
    assert visible(HOSTILE) == "</script><img src=x onerror=\"document.title='harmed'\">\\x1b[31mred\\u202eback\n"
    assert visible("中文, ñ") == "中文, ñ"


def test_the_commands_print_plain_lines(run, tmp_path, capsys):
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "20 of 40" in told and "finished" in told and "engine \\x1b[31mdied" in told and "\x1b" not in told
    assert main(["samples", str(run), "--worst", "--domain", "tools", "--step", "7", "-n", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("step 7  group 31  tools  score ") == 2 and "\x1b" not in told
    other = write_run(tmp_path, "other", steps=8, learning_rate="2e-6")
    assert main(["compare", str(run), str(other), "--every", "4"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line[1] == "reward/mean"] == ["4", "8"]
    assert lines[-1] == ["actor_train.training_args.learning_rate", "1e-6", "2e-6"]


def test_names_of_any_characters_are_cells_of_one_line_in_any_encoding(run, tmp_path, monkeypatch):
    odd = shutil.copytree(run, tmp_path / "output" / "a\tb\n\x1b[31m\u4e2d")
    for command, *paths in (("runs", odd.parent), ("compare", odd, run), ("status", odd), ("samples", odd)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
        assert main([command, *map(str, paths)]) == 0
        told = sys.stdout.buffer.getvalue().decode("ascii")
        assert "\x1b" not in told and (r"a\tb\n\x1b[31m\u4e2d" in told or command == "samples")
        widths = {"runs": {6}, "compare": {4, 3}, "status": {1}, "samples": {1}}
        assert {len(line.split("\t")) for line in told.splitlines()} == widths[command]


def test_a_run_that_was_interrupted_is_told_how_it_goes_on(tmp_path, capsys):
    assert main(["status", str(write_run(tmp_path, steps=6, state="interrupted"))]) == 0
    assert "roll-async run --config mine checkpoint.resume_from=latest" in capsys.readouterr().out


def test_a_run_is_told_from_inside_of_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path, steps=1, state="running"))
    assert main(["status", "."]) == 0
    told = capsys.readouterr().out
    assert "run (3f9a61c2)" in told and "killed" in told


def test_of_a_run_on_given_rows_the_loss_is_told_and_nothing_of_engines(tmp_path, capsys):
    run = write_run(tmp_path, steps=0)
    keys = {"trainer/loss": 0.25, "validation/loss": 0.5, "rewards/accuracies": 0.75}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **keys}) + "\n")
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "loss" in told and "0.250" in told and "reward" not in told and "engines" not in told
    assert main(["compare", str(run), str(run)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {line[1]: line[2] for line in lines[1:4]} == {name: f"{value:.4g}" for name, value in keys.items()}


@pytest.mark.parametrize("damage", [b"a: [1\nb: {", b"\xff\xfe\x00"])
def test_a_config_that_is_no_yaml_is_one_line(damage, run, capsys):
    (run / "config.yaml").write_bytes(damage)
    for words in (["status"], ["samples"], ["compare", str(run)], ["view", "--html", str(run / "page.html")]):
        assert main([*words, str(run)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "config.yaml is no YAML (" in told and "repair it or remove it" in told


@pytest.mark.parametrize(
    "words", [["status", "X"], ["view", "X"], ["samples", "X"], ["compare", "X", "X"]], ids=lambda words: words[0]
)
@pytest.mark.parametrize("wrong", ["nowhere", "empty"])
def test_a_wrong_folder_is_one_line_and_exit_code_2(words, wrong, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / wrong) if word == "X" else word for word in words]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "give the folder of a run; `roll-async runs" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"], "looking makes nothing"


@pytest.mark.parametrize("given", [".", "output", "output/run/hf", "output/nowhere", "run"])
def test_of_a_wrong_folder_the_one_is_told_that_has_runs(given, once, tmp_path, capsys):
    shutil.copytree(once, tmp_path / "output/run")
    assert main(["status", str(tmp_path / given)]) == 2
    assert f"`roll-async runs {tmp_path}/output` lists them" in capsys.readouterr().err


def test_no_sample_that_fits_and_no_step_in_common_are_one_line(run, tmp_path, capsys):
    assert main(["samples", str(run), "--domain", "none"]) == 2
    assert "no sample fits; it has those of addition, tools, steps 1 to 20" in capsys.readouterr().err
    assert main(["samples", str(run), "--best", "--worst"]) == 2
    assert "--best and --worst: give one of them" in capsys.readouterr().err
    assert main(["compare", str(run), str(write_run(tmp_path, "none", steps=0))]) == 2
    assert "have no step in common" in capsys.readouterr().err


def test_a_page_without_a_server_has_all_inside_and_no_text_of_an_answer_ends_its_script(run, tmp_path, capsys):
    file = tmp_path / "page.html"
    began = time.monotonic()
    assert main(["view", str(run), "--html", str(file)]) == 0
    text = file.read_text()
    assert time.monotonic() - began < 60 and "opens in any browser" in capsys.readouterr().out
    assert text.count("<img") == 0 and 'href="page/' not in text and 'src="page/' not in text
    inside = text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    data = json.loads(inside)
    assert len(data["samples"][0]["rows"]) == 320 and len(data["metrics"][0]["step"]) == 20
