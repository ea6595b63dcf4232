"""Rows of prompt files: the columns of ROLL and of verl, and what is wrong with the others."""

import json

import pytest

from roll_async.prompts.rows import BadRows, Columns, read_rows


@pytest.fixture
def rows(tmp_path):
    """Write records to a file and read them back: (rows, problems)."""

    def read(records, name="data.jsonl", columns=None, limit=100):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        else:
            path.write_text(records if isinstance(records, str) else json.dumps(records))
        bad = BadRows(limit)
        return list(read_rows([str(path)], columns or Columns(), bad)), bad.problems

    return read


ROLL = {
    "id": "7",
    "tag": "gsm8k",
    "messages": [{"role": "user", "content": "6*7?"}],
    "ground_truth": "42",
}


def test_a_row_in_rolls_columns(rows):
    ((row,), problems) = rows([ROLL])
    assert (row.row_id, row.tag, row.ground_truth) == ("7", "gsm8k", "42") and problems == []
    assert row.messages == ({"role": "user", "content": "6*7?"},)


def test_messages_may_be_a_json_text(rows):
    ((row,), _) = rows([{**ROLL, "messages": json.dumps(ROLL["messages"])}])
    assert row.messages[0]["content"] == "6*7?"


def test_a_row_in_verls_columns(rows):
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"index": 12, "split": "train"},
    }
    ((row,), _) = rows([record])
    assert (row.row_id, row.tag, row.ground_truth) == ("12", "openai/gsm8k", "72") and len(row.messages) == 2


def test_gsm8k_as_published_gives_question_and_gold_answer(rows):
    record = {"question": "How many?", "answer": "She sold 1,000 + 80.\n#### 1,080"}
    ((row,), _) = rows([record], columns=Columns(prompt="question", ground_truth="answer"))
    assert row.messages == ({"role": "user", "content": "How many?"},) and row.ground_truth == "1080"


def test_rows_without_an_id_are_named_by_their_place(rows):
    found, _ = rows([{**ROLL, "id": i} if i else {k: v for k, v in ROLL.items() if k != "id"} for i in range(2)])
    assert found[0].row_id.endswith("data.jsonl:1") and found[1].row_id == "1"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({k: v for k, v in ROLL.items() if k != "ground_truth"}, "column 'ground_truth' is missing"),
        ({k: v for k, v in ROLL.items() if k != "messages"}, "column 'messages' is missing"),
        ({**ROLL, "messages": []}, "non-empty list of {role"),
        ({**ROLL, "messages": [{"role": "user"}]}, "non-empty list of {role"),
        ({**ROLL, "messages": "not json"}, "Expecting value"),
        ([1, 2], "a row must be an object"),
        ("{broken", "not JSON"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line_and_the_rest_is_read(rows, record, problem):
    found, problems = rows([ROLL, "", record, {**ROLL, "id": "8"}])
    assert [r.row_id for r in found] == ["7", "8"]
    assert len(problems) == 1 and "data.jsonl:3: " in problems[0] and problem in problems[0]


def test_too_many_malformed_rows_end_the_loading(rows):
    with pytest.raises(ValueError, match=r"more than 2 malformed rows; first: .*:1: .*; last: .*:3: "):
        rows([{}] * 5, limit=2)


def test_a_json_file_is_a_list_of_rows(rows):
    found, _ = rows([ROLL, {**ROLL, "id": "8"}], name="data.json")
    assert [r.row_id for r in found] == ["7", "8"]
    with pytest.raises(ValueError, match="expected a list of rows"):
        rows("{}", name="data.json")
    with pytest.raises(ValueError, match="data.json:2: not JSON"):
        rows("[\n{]", name="data.json")


def test_a_parquet_file_is_read_in_batches(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**ROLL, "id": str(i)} for i in range(5)]), path)
    assert [r.row_id for r in read_rows([str(path)], Columns(), BadRows())] == list("01234")


def test_several_files_are_read_in_order(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**ROLL, "id": name}) + "\n")
    files = [str(tmp_path / f"{name}.jsonl") for name in "ba"]
    assert [r.row_id for r in read_rows(files, Columns(), BadRows())] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl does not exist; check data_args.file_name"),
        ("gsm8k/train.jsonl", "grade-school-math"),
        ("demo_assets/train.jsonl", "make demo-assets"),
    ],
)
def test_a_missing_file_is_named_with_where_to_get_it(name, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows([name], Columns(), BadRows()))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"suffix '.csv'; expected .json, .jsonl or .parquet"):
        list(read_rows([str(tmp_path / "data.csv")], Columns(), BadRows()))
