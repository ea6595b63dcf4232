"""The data scripts as their users call them: files in, parquet out, what was dropped and why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll_async.prompts.rows import BadRows, Columns, read_rows
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def run(script, *arguments, **env):
    command = [sys.executable] if script.endswith(".py") else ["bash"]
    return subprocess.run(
        [*command, str(ROOT / "examples" / script), *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, **env}, timeout=patient(60),
    )  # fmt: skip


def table(path):
    from pyarrow import parquet

    return parquet.read_table(path)


def skywork_row(number, failures, answer='["7"]', **changes):
    row = {
        "data_source": "train-math-x",
        "prompt": [{"role": "user", "content": f"Problem {number}"}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": number, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": failures}},
    }
    return {**row, **changes}


def test_process_skywork_keeps_what_the_model_sometimes_solves(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [skywork_row(n, n) for n in range(17)]
    rows += [
        skywork_row(20, 5, answer='["1", "2"]'),
        skywork_row(21, 5, answer="[]"),
        skywork_row(22, 5, ability="code"),
        skywork_row(23, 5, extra_info={"index": 1}),
        skywork_row(24, 5, answer="[0, 1)"),
        skywork_row(25, 5, answer='["\\\\frac{1}{2}"]'),
        skywork_row(26, 5, prompt="text"),
        skywork_row(27, 5, prompt=[{"role": "user", "content": "An AIME problem?"}]),
    ]
    source, folder = tmp_path / "raw.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "aime.jsonl").write_text(json.dumps({"problem": "An AIME problem?", "answer": "7"}))
    assert (
        run("async_dapo/process_aime24.py", "--source", tmp_path / "aime.jsonl", "--local_dir", tmp_path).returncode
        == 0
    )
    arguments = ["--source", source, "--local_dir", folder, "--test_size", 3, "--exclude", tmp_path / "test.parquet"]
    done = run("async_dapo/process_skywork.py", *arguments)
    assert done.returncode == 0, done.stderr
    for line in ("25 rows read, 17 kept", f"14 -> {folder}/train.parquet", f"3 -> {folder}/test.parquet", "8 dropped"):
        assert line in done.stdout
    for reason in ("1 too easy for", "1 too hard for", "1 several answers", "1 no answer", "1 not mathematics",
                   "1 no difficulty for", "1 in the excluded set", "1 columns prompt"):  # fmt: skip
        assert reason in done.stdout
    train = table(folder / "train.parquet")
    assert train.column_names == COLUMNS and train["data_source"][0].as_py() == "train-math-x"
    rows = [row for split in ("train", "test") for row in table(folder / f"{split}.parquet").to_pylist()]
    golds = {row["extra_info"]["question"]: row["reward_model"]["ground_truth"] for row in rows}
    assert golds["Problem 25"] == "\\frac{1}{2}" and golds["Problem 24"] == "[0, 1)" and golds["Problem 1"] == "7"
    assert rows[0]["prompt"][0] == {
        "role": "system",
        "content": "Please reason step by step, and put your final answer within \\boxed{}.",
    }
    before = (folder / "train.parquet").read_bytes()
    run("async_dapo/process_skywork.py", *arguments)
    assert (folder / "train.parquet").read_bytes() == before


def test_process_aime24_writes_what_the_loader_reads(tmp_path):
    pytest.importorskip("pyarrow")
    source = tmp_path / "aime.json"
    rows = [{"id": 60, "problem": "P1", "answer": "023", "solution": "So 23."}, {"problem": "P2", "answer": 204}]
    rows += [{"problem": "P3", "answer": "1000"}, {"problem": "P4", "answer": "x"}, {"answer": "5"}, {"problem": "P5"}]
    source.write_text(json.dumps(rows))
    done = run("async_dapo/process_aime24.py", "--source", source, "--local_dir", tmp_path, "--system_prompt", "")
    assert done.returncode == 0, done.stderr
    assert "6 rows read, 2 kept" in done.stdout and "2 answer is not a whole number from 0 to 999" in done.stdout
    bad = BadRows()
    loaded = list(read_rows([str(tmp_path / "test.parquet")], Columns(messages="prompt"), bad))
    assert not bad.problems and {(r.tag, r.messages[-1]["content"], r.ground_truth) for r in loaded} == {
        ("aime24", "P1", "23"), ("aime24", "P2", "204"),
    }  # fmt: skip
    assert json.loads(loaded[0].extra["extra_info"])["split"] == "test"


@pytest.mark.parametrize("script", ["process_aime24.py", "process_skywork.py"])
def test_nothing_usable_is_an_error_that_says_why_and_writes_nothing(script, tmp_path):
    (tmp_path / "raw.jsonl").write_text('{"a": 1}\n')
    done = run(f"async_dapo/{script}", "--source", tmp_path / "raw.jsonl", "--local_dir", tmp_path / "out")
    assert done.returncode == 2 and "no row could be used" in done.stderr and "1 dropped" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_on_the_hub_is_named_with_what_to_do(tmp_path):
    pytest.importorskip("datasets")
    arguments = ["--source", "nobody/nothing-like-this", "--local_dir", tmp_path / "out"]
    done = run("async_dapo/process_aime24.py", *arguments, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2 and "cannot read nobody/nothing-like-this (split train) from the hub" in done.stderr
    assert "--source FILE" in done.stderr and "Traceback" not in done.stderr


def test_prepare_dapo_data_writes_each_problem_once_and_keeps_what_is_there(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    if shutil.which("bash") is None:
        pytest.skip("no bash")
    row = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "Solve it. Answer: $Answer"}],
           "ability": "MATH", "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
           "extra_info": {"index": "9a9b6eb4"}}  # fmt: skip
    other = {**row, "prompt": [{"role": "user", "content": "Solve another."}]}
    parquet.write_table(pyarrow.Table.from_pylist([row, other] * 5), tmp_path / "raw.parquet")
    env = {"HOME": str(tmp_path), "PYTHON": sys.executable, "TRAIN_URL": str(tmp_path / "raw.parquet")}
    env["TEST_URL"] = env["TRAIN_URL"]
    done = run("dapo/prepare_dapo_data.sh", **env)
    assert done.returncode == 0, done.stderr
    for name, split in (("dapo-math-17k.parquet", "train"), ("aime-2024.parquet", "test")):
        rows = table(tmp_path / "verl" / "data" / name).to_pylist()
        assert len(rows) == 2 and rows[0]["extra_info"]["split"] == split and list(rows[0]) == COLUMNS
        assert rows[0]["reward_model"] == {"ground_truth": "34", "style": "rule"}
    done = run(
        "dapo/prepare_dapo_data.sh", **{**env, "TRAIN_URL": "http://127.0.0.1:9/x", "TEST_URL": "http://127.0.0.1:9/x"}
    )
    assert done.returncode == 0 and done.stdout.count("is there") == 2
