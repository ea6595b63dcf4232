"""Files of questions: forms and what is refused."""

import json

import pytest

from roll_async.envs.worlds.question_rows import Question, read_questions


def test_one_file_serves_rlvr_runs_and_worlds(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7="}],
             "reward_model": {"ground_truth": 42, "style": "rule"},
             "extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": {"digits": 2}}}}}]  # fmt: skip
    wanted = Question("6*7=", "42", {"instructions": "Be brief."},
                      {"tool_arguments": {"calculator": {"create_kwargs": {"digits": 2}}}})  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.jsonl", "rows.parquet"):
        assert read_questions(str(tmp_path / name)) == [wanted], name


def test_separators_of_unicode_inside_a_text_end_no_line_of_a_file(tmp_path):
    said = "a\u2028b\u2029c\x85d"
    (tmp_path / "rows.jsonl").write_text(f'{{"question": "{said}", "answer": "1"}}\r\n', encoding="utf-8")
    assert read_questions(str(tmp_path / "rows.jsonl")) == [Question(said, "1")]


def test_a_developer_instructs_as_the_system_does_and_parts_are_one_text(tmp_path):
    question = {"role": "user", "content": [{"type": "text", "text": "6*"}, {"type": "text", "text": "7="}]}
    row = {"messages": [{"role": "developer", "content": "Be brief."}, question], "ground_truth": "42"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    wanted = Question("6*7=", "42", {"instructions": "Be brief."})
    assert read_questions(str(tmp_path / "rows.jsonl")) == [wanted]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "1+1="}, "it needs question and answer"),
        ({"answer": "2"}, "it needs question and answer"),
        ({"prompt": [{"role": "assistant", "content": "2"}], "ground_truth": "2"}, "no turn of the user"),
        ({"question": "1+1=", "answer": "2", "interaction_kwargs": {"file": "x"}}, "interaction_kwargs may hold grade"),
        ({"question": "1+1=", "answer": "2", "interaction_kwargs": "x"}, "Expecting value"),
        ([1], "a row must be an object"),
        (
            {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant", "user")], "ground_truth": "2"},
            "a world asks one question, and the chat has turns of user, assistant, user; join them in one",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "ground_truth": "2"},
            "is no text; write a str",
        ),
        (
            {"prompt": "<image>1+1=", "images": ["a.png"], "ground_truth": "2"},
            "images: a world shows none; take the row",
        ),
        ({"messages": [{"role": "user", "content": None}], "ground_truth": "2"}, "None is no text; write a string"),
    ],
)
def test_a_row_that_is_no_question_is_refused_with_its_line(tmp_path, row, says):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1+1=", "answer": 2}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{says}"):
        read_questions(str(file))


def test_a_file_without_a_question_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no question"):
        read_questions(str(tmp_path / "rows.jsonl"))
