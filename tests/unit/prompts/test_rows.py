"""Rows of prompt files: every schema the documents name, and what is said of a row that is none of them."""

import json
import re
from datetime import date, datetime
from decimal import Decimal

import pytest

from roll_async.prompts.rows import BadRows, Columns, final_number, missing_file, read_rows


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def read(path, columns=None, limit=100):
    bad = BadRows(limit)
    return list(read_rows([str(path)], columns or Columns(), bad)), bad.problems


ROLL_ROW = {"id": "7", "tag": "algebra", "messages": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "28 + 7?"}],
    "ability": "math",
    "reward_model": {"ground_truth": "35", "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}

TOOL_ROW = {
    **ROLL_ROW,
    "messages": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zug"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
}  # fmt: skip


def test_rolls_row_is_read_with_messages_as_a_list_or_as_json_text(tmp_path):
    as_text = {**ROLL_ROW, "id": "8", "messages": json.dumps(ROLL_ROW["messages"])}
    rows, problems = read(write(tmp_path / "a.jsonl", ROLL_ROW, as_text))
    assert problems == []
    assert [r.row_id for r in rows] == ["7", "8"]
    assert all(r.messages == ({"role": "user", "content": "1+1?"},) for r in rows)
    assert all((r.tag, r.ground_truth, r.extra) == ("algebra", "2", {}) for r in rows)


def test_verls_row_takes_chat_answer_source_and_index_from_their_places_and_keeps_the_rest_for_the_reward(tmp_path):
    (row,), _ = read(write(tmp_path / "a.jsonl", VERL_ROW))
    assert row.messages[0] == {"role": "system", "content": "Be short."}
    assert (row.row_id, row.tag, row.ground_truth) == ("openai/gsm8k/train/0", "openai/gsm8k", "35")
    assert json.loads(row.extra["extra_info"]) == {"index": 0, "split": "train"} and row.extra["ability"] == "math"


def test_the_row_of_the_documents_sample_keeps_each_of_its_fields(tmp_path):
    """The sample at the end of the fully asynchronous document, as the row it was made from."""
    about = {
        "answer": "28 + 21 = <<28+21=49>>49.\n#### 35", "index": 1421, "question": "How many more plates?",
        "split": "train",
    }  # fmt: skip
    uid = "fab3e910-67b3-4653-bc69-377250049267"
    own = {"uid": uid, "tools_kwargs": {}, "interaction_kwargs": {}, "index": 1421, "extra_info": about}
    (row,), problems = read(write(tmp_path / "a.jsonl", {**VERL_ROW, **own}))
    assert (row.row_id, row.tag, row.ground_truth) == (uid, "openai/gsm8k", "35") and problems == []
    assert json.loads(row.extra["extra_info"]) == about and json.loads(row.extra["index"]) == 1421
    assert (row.extra["ability"], row.style) == ("math", "rule")
    assert json.loads(row.extra["tools_kwargs"]) == json.loads(row.extra["interaction_kwargs"]) == {}


def test_a_raw_gsm8k_row_keeps_its_solution_and_a_maths_rule_takes_the_number_after_the_last_marker(tmp_path):
    solution = "First 2.\n#### 7 is not it\nThen more.\n#### 1,234"
    columns = Columns(messages=None, prompt="question", ground_truth="answer")
    (found,), _ = read(write(tmp_path / "a.jsonl", {"question": "How many?", "answer": solution}), columns)
    assert (found.ground_truth, final_number(found.ground_truth)) == (solution, "1234")
    assert found.messages == ({"role": "user", "content": "How many?"},)
    assert found.row_id == f"{tmp_path / 'a.jsonl'}:1"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"), ("so\n####  -1,080.50 \n", "-1080.50"), ("so\n#### $5", "$5"), ("72", "72"),
        ("Plan\n#### Rome, Italy", None), ("#### Heading\nand text after it", None), ("3 #### 4", None),
        ("x\n#### 1, 2", None), ("#### 12 apples", None),
    ],
)  # fmt: skip
def test_only_a_number_behind_the_marker_of_the_last_line_is_a_gsm8k_gold(text, number):
    assert final_number(text) == (text if number is None else number)


@pytest.mark.parametrize(("value", "text"), [(35, "35"), (2.5, "2.5"), (["a", "b"], '["a", "b"]'), ("x, y", "x, y")])
def test_ground_truths_become_text_that_a_reward_can_parse(tmp_path, value, text):
    (row,), _ = read(write(tmp_path / "a.jsonl", {**ROLL_ROW, "ground_truth": value}))
    assert row.ground_truth == text


def test_json_files_hold_a_list_or_one_object_per_line(tmp_path):
    listed, lines = tmp_path / "list.json", tmp_path / "lines.json"
    listed.write_text(json.dumps([ROLL_ROW, ROLL_ROW]))
    write(lines, ROLL_ROW, ROLL_ROW)
    assert [r.ground_truth for r in read(listed)[0]] == [r.ground_truth for r in read(lines)[0]] == ["2", "2"]


def test_a_json_file_of_one_object_is_one_row(tmp_path):
    (row,), problems = read(write(tmp_path / "one.json", ROLL_ROW))
    assert (row.ground_truth, row.where, problems) == ("2", f"{tmp_path}/one.json: row 1", [])


def test_columns_of_parquet_that_json_does_not_know_are_text_and_bytes_are_left_out(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    at = {
        "at": datetime(2020, 1, 2),
        "day": date(2020, 1, 2),
        "raw": b"\xff",
        "in": {"at": date(2020, 1, 2), "raw": b"a"},
    }
    made = {"prompt": "3/2?", "ground_truth": Decimal("1.5"), **at}
    parquet.write_table(pyarrow.Table.from_pylist([made]), tmp_path / "a.parquet")
    (row,), problems = read(tmp_path / "a.parquet")
    assert (row.ground_truth, problems) == ("1.5", [])
    inside = '{"at": "2020-01-02", "raw": null}'
    assert row.extra == {"at": "2020-01-02 00:00:00", "day": "2020-01-02", "in": inside}


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for row in (ROLL_ROW, VERL_ROW, TOOL_ROW):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        (left,), (right,) = read(tmp_path / "a.parquet")[0], read(write(tmp_path / "a.jsonl", row))[0]
        assert (left.row_id, left.tag, left.messages, left.ground_truth) == (
            right.row_id, right.tag, right.messages, right.ground_truth,
        )  # fmt: skip


def test_a_broken_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"a\.parquet: not readable as parquet"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "must be an object, got list"),
        ({"messages": ROLL_ROW["messages"]}, "column 'ground_truth' is missing"),
        ({"ground_truth": "2"}, "column 'messages' is missing"),
        ({"messages": [], "ground_truth": "2"}, "non-empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "ground_truth": "2"}, "messages.0.content.0"),
        ({"prompt": [{"role": "user"}], "ground_truth": "2"}, "prompt.0.content: missing; write text"),
        ({"messages": [{"role": "assistant", "content": "hi"}], "ground_truth": "2"}, "ends with an answer"),
        ({"prompt": "a \ud83d", "ground_truth": "2"}, r"prompt.0: 'utf-8' codec can't encode character '\ud83d'"),
        ({**ROLL_ROW, "ground_truth": "\ud83d"}, r"ground_truth: half of a surrogate pair is in '\ud83d'"),
        ({**ROLL_ROW, "other": ["\ud83d"]}, r"""other: half of a surrogate pair is in '["\ud83d"]'"""),
        ('{"prompt": "a", "ground_truth": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit (4300 digits)"),
        ("[" * 100_000, "not JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_malformed_row_is_skipped_and_named_by_file_and_line(tmp_path, row, says):
    path = write(tmp_path / "a.jsonl", ROLL_ROW, "", row, ROLL_ROW)
    rows, problems = read(path)
    assert len(rows) == 2
    (problem,) = problems
    assert problem.startswith(f"{path}:3: ") and says in problem


def test_more_malformed_rows_than_the_limit_end_the_loading_with_first_and_last(tmp_path):
    path = write(tmp_path / "a.jsonl", *["nonsense"] * 5)
    assert len(read(path, limit=5)[1]) == 5
    with pytest.raises(ValueError, match=r"more than 4 malformed rows; first: .*:1: .*; last: .*:5: "):
        read(path, limit=4)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"", "expected .json, .jsonl or .parquet"),
        ("a.json", b"{", "a.json:1: not JSON"),
        ("a.json", b"7", "expected a list of rows, got int"),
        ("a.json", b'[{"a": ' + b"1" * 5000 + b"}]", "a.json: not JSON: Exceeds the limit (4300 digits)"),
        ("a.jsonl", b"\xff\xfe{}", "not UTF-8"),
        ("b.json", b"\xff", "not UTF-8"),
    ],
)
def test_an_unreadable_file_is_one_error_that_names_it(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says)):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("data/gsm8k/train.jsonl", "openai/grade-school-math"),
        ("output/demo_assets/train.jsonl", "roll-async demo --assets-only"),
        ("data/skywork_or1_1_5b_diff_sys/train.parquet", "process_skywork.py"),
        ("data/aime24_sys/test.parquet", "process_aime24.py"),
        ("data/dapo-math-17k.parquet", "prepare_dapo_data.sh"),
        ("data/other.jsonl", "data_args.file_name"),
    ],
)
def test_a_missing_file_is_one_line_with_the_place_it_comes_from(name, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        list(read_rows([name], Columns(), BadRows()))
    assert str(error.value) == missing_file(name)
    assert name in str(error.value) and remedy in str(error.value) and "\n" not in str(error.value)


def test_rows_without_an_id_are_named_by_their_place(tmp_path):
    without = {key: value for key, value in ROLL_ROW.items() if key != "id"}
    rows, _ = read(write(tmp_path / "a.jsonl", without, {**ROLL_ROW, "id": 1}))
    assert rows[0].row_id.endswith("a.jsonl:1") and rows[1].row_id == "1"


def test_several_files_are_read_in_order(tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", {**ROLL_ROW, "id": name}) for name in "ba"]
    assert [r.row_id for r in read_rows(files, Columns(), BadRows())] == ["b", "a"]


def test_a_column_that_another_schema_left_empty_is_as_if_it_were_not_there(tmp_path):
    """Both schemas in one parquet file: every row has every column."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    both = [{**dict.fromkeys(ROLL_ROW), **VERL_ROW}, {**dict.fromkeys(VERL_ROW), **ROLL_ROW}]
    parquet.write_table(pyarrow.Table.from_pylist(both), tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", *both)):
        rows, problems = read(path)
        assert problems == []
        assert [(r.ground_truth, r.messages[-1]["content"]) for r in rows] == [("35", "28 + 7?"), ("2", "1+1?")]
