"""Published data sets to prompt files: what is kept, what is dropped and why, and in which order."""

import json
import random
import re

import pytest

from tools.prepare_rows import Preparation, Question, prepare, question_key, read_source


def read(record):
    return Question(question=record["q"], answer=record["a"]) if "q" in record else "no question"


def prepared(records, **options):
    return prepare(records, read, Preparation(data_source="mine", **options))


def problems(count):
    return [{"q": f"What is {n} + {n}?", "a": str(2 * n)} for n in range(count)]


def test_a_row_has_the_columns_of_the_documents_sample():
    (row,) = prepared([{"q": "1+1?", "a": "2"}], system_prompt="Think.").rows["train"]
    assert row == {
        "data_source": "mine",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"answer": "2", "index": 0, "question": "1+1?", "split": "train"},
    }


def test_split_and_order_depend_on_the_seed_and_not_on_the_order_of_the_source():
    records = problems(200)
    shuffled = random.Random(3).sample(records, len(records))
    first, again = prepared(records, test_size=20, seed=1), prepared(shuffled, test_size=20, seed=1)
    assert first.rows == again.rows and [len(first.rows[s]) for s in ("test", "train")] == [20, 180]
    assert [r["extra_info"]["index"] for r in first.rows["train"]] == list(range(180))
    other = prepared(records, test_size=20, seed=2)
    assert other.rows != first.rows
    questions = [r["extra_info"]["question"] for rows in first.rows.values() for r in rows]
    assert sorted(questions) == sorted(r["q"] for r in records)
    assert questions != [r["q"] for r in records]  # it is shuffled at all


def test_repeated_questions_stay_repeated_on_request_and_on_one_side_of_the_split():
    records = [record for record in problems(6) for _ in range(4)] + [{"q": "What is 0 + 0?", "a": "7"}]
    result = prepared(records, test_size=2, keep_repeats=True)
    counts = {split: [r["extra_info"]["question"] for r in rows] for split, rows in result.rows.items()}
    assert {split: (len(set(found)), len(found)) for split, found in counts.items()} == {
        "test": (2, 8),
        "train": (3, 12),
    }
    assert not set(counts["test"]) & set(counts["train"])
    assert result.dropped == {"same question, different answers": 5}


def test_every_dropped_row_is_counted_with_its_reason():
    records = [
        {"q": "One?", "a": "1"},
        {"q": " one ", "a": "1"},
        {"q": "Two?", "a": "2"},
        {"q": "two", "a": "3"},
        {"q": "TWO!", "a": "2"},
        {"q": "Three?", "a": "3"},
        {},
        None,
    ]
    result = prepared(records, exclude=frozenset([question_key("three")]))
    assert result.seen == 8 and [r["extra_info"]["question"] for r in result.rows["train"]] == ["One?"]
    assert result.dropped == {
        "duplicate question": 1,
        "same question, different answers": 3,
        "in the excluded set": 1,
        "no question": 1,
        "not an object": 1,
    }


def test_broken_lines_of_a_source_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text('{"q": "a", "a": "1"}\n{broken\n[1]\n{"q": "b", "a": "2"}\n{again')
    result = prepared(read_source(str(path), "train"))
    assert (result.seen, len(result.rows["train"]), dict(result.dropped)) == (5, 2, {"not an object": 3})


def test_a_local_source_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="missing.parquet does not exist; .* with --source"):
        list(read_source("missing.parquet", "train"))


def test_the_prompts_of_the_first_config_are_made_from_a_file_or_without_one(tmp_path, monkeypatch, capsys):
    from tools import make_math_rows

    def made(*arguments):
        output = tmp_path / "data" / "math_deepmath_deal.jsonl"
        monkeypatch.setattr("sys.argv", ["make_math_rows.py", "--output", str(output), *arguments])
        code = make_math_rows.main()
        return code, [json.loads(line) for line in output.read_text().splitlines()] if code == 0 else []

    source = tmp_path / "raw.jsonl"
    records = [{"question": f"{n}+{n}?", "final_answer": str(2 * n), "difficulty": n} for n in range(8)]
    source.write_text("\n".join(map(json.dumps, [*records, {"question": "who?"}])))
    code, rows = made("--source", str(source), "--max_difficulty", "5")
    assert code == 0 and {row["ground_truth"] for row in rows} == {"0", "2", "4", "6", "8", "10"}
    assert rows[0]["tag"] == "deepmath_103k" and len({row["id"] for row in rows}) == 6
    assert rows[0]["messages"][-1]["role"] == "user"
    said = capsys.readouterr().out
    assert "2 difficulty outside of -1 to 5" in said and "1 no answer" in said
    code, rows = made("--source", "bundled")
    assert code == 0 and len(rows) == 900 and rows[0]["tag"] == "word_problems"
    by_text = {row["messages"][-1]["content"]: row["ground_truth"] for row in rows}
    pencils = next(text for text in by_text if "pencils" in text)
    a, b, c = map(int, re.findall(r"\d+", pencils))
    assert by_text[pencils] == str(a * b - c)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert made("--source", str(tmp_path / "nothing.jsonl"))[0] == 2
    assert "without a network: --source bundled" in capsys.readouterr().err


def test_a_careless_pupil_solves_word_problems_and_validation_asks_none_that_was_trained(tmp_path):
    from tools.make_gsm8k_assets import write_problems

    write_problems(tmp_path)
    read = {name: list(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())) for name in (
        "train", "validation", "sft", "sft_validation")}  # fmt: skip
    sums = {
        name: [tuple(map(int, re.findall(r"\d+", row["question"]))) for row in read[name]]
        for name in read
        if "sft" not in name
    }
    assert not set(sums["train"]) & set(sums["validation"])
    for name, numbers in sums.items():
        for row, (left, right) in zip(read[name], numbers, strict=True):
            assert row["answer"].endswith(f"\n#### {left + right}"), row
            assert all(eval(f"{column.partition('=')[0]}") == int(column.partition("=")[2])
                       for column in row["answer"].splitlines()[:-1])  # fmt: skip
    said = [(row["question"], row["answer"]) for row in read["train"]]
    pupil = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in read["sft"]]
    assert [question for question, _ in said] == [question for question, _ in pupil]
    right = sum(one == other for one, other in zip(said, pupil, strict=True)) / len(said)
    assert 0.3 < right < 0.7


def test_a_picture_has_as_many_dots_as_its_row_says_and_a_careless_pupil_sees_no_more(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    from tools import make_image_assets as tool

    monkeypatch.setattr(tool, "NUM_TRAIN", 200)
    tool.write_rows(tmp_path)
    rows, chats = (list(map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())) for name in (
        "train", "sft"))  # fmt: skip
    right = 0
    for row, chat in zip(rows, chats, strict=True):
        picture = image.open(tmp_path / row["messages"][0]["content"][0]["image"])
        lit = [cell for cell in range(16) if picture.getpixel((cell % 4 * 4 + 1, cell // 4 * 4 + 2)) == 255]
        assert row["ground_truth"] == str(len(lit)) and picture.size == (16, 16)
        seen = int(chat["messages"][1]["content"].removeprefix("="))
        assert len([cell for cell in lit if cell % 4 < 3]) <= seen <= len(lit)
        right += seen == len(lit)
    assert len(rows) == 200 and 0.25 < right / 200 < 0.75
