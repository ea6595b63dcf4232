"""Chats with answers, pairs and dumped samples to rows with masks."""

import json
import math
import shutil

import pytest

from roll_async.prompts.given import GivenOptions, digest_of, load_given
from roll_async.prompts.tokenizer import load_tokenizer

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen3: the thoughts of former questions are left out."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer: one id per byte."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.chat_template = THINKING
    target = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(target)
    return str(target)


def chat(*texts):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@pytest.fixture
def load(folder, tmp_path):
    def rows(*records, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        defaults = {"key": "actor_train.data_args.file_name", "template": "chatml", "sequence_length": 500}
        return load_given(GivenOptions(**{**defaults, "files": (str(path),), "tokenizer_folder": folder, **fields}))

    return rows


def said(folder, row):
    """(all of it, what is trained on, piece by piece)."""
    decode = load_tokenizer(folder).decode
    trained, before = [[]], False
    for token, is_trained in zip(row.tokens, row.mask, strict=True):
        if is_trained and not before:
            trained.append([])
        if is_trained:
            trained[-1].append(token)
        before = is_trained
    return decode(list(row.tokens)), [decode(piece) for piece in trained[1:]]


def test_all_answers_are_trained_on_with_their_end_marks_and_nothing_else(load, folder):
    (row,) = load(chat("1+1?", "2", "2+2?", "4"))
    whole, trained = said(folder, row)
    assert trained == ["2<|im_end|>", "4<|im_end|>"]
    assert whole.startswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user")


def test_of_the_last_turn_alone_the_other_answers_are_context(load, folder):
    (row,) = load(chat("1+1?", "2", "2+2?", "4"), last_turn=True)
    assert said(folder, row)[1] == ["4<|im_end|>"] and "2<|im_end|>" in said(folder, row)[0]


def test_a_template_without_end_marks_gets_the_tokenizers_after_the_last_answer(load, folder):
    (row,) = load(chat("1+1=", "2"), template="base")
    assert said(folder, row) == ("1+1=2<|im_end|>", ["2<|im_end|>"])


def test_an_answer_that_is_said_otherwise_later_has_a_row_of_its_own(load, folder):
    rows = load(chat("1+1?", "2", "2+2?", "4"), template="native")
    assert [said(folder, row)[1] for row in rows] == [
        ["<think>\n\n</think>\n\n2<|im_end|>"],
        ["<think>\n\n</think>\n\n4<|im_end|>"],
    ]
    assert "2<|im_end|>\n<|im_start|>user\n2+2?" in said(folder, rows[1])[0], "the turns before are its context"


def test_a_prompt_and_its_completion_are_a_chat(load, folder):
    for answer in ({"completion": "2"}, {"completion": None, "response": "2"}):
        (row,) = load({"prompt": "1+1?", **answer})
        assert said(folder, row)[1] == ["2<|im_end|>"]


def test_a_pair_is_two_rows_of_one_prompt(load, folder):
    chosen, rejected = load({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, pairs=True)
    assert [said(folder, row)[1] for row in (chosen, rejected)] == [["2<|im_end|>"], ["3<|im_end|>"]]


def test_dumped_samples_are_trained_on_token_by_token_from_a_score_on(load):
    good = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9], "loss_mask": [1, 0, 1], "score": 1.0}
    (row,) = load(good, {**good, "score": 0.0}, min_score=0.5)
    assert (list(row.tokens), list(row.mask)) == ([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])


def test_ids_of_a_dump_may_be_those_of_rows_that_only_pad_the_model(load, folder, tmp_path):
    """Its matrix may have more rows than the tokenizer has tokens, and a run may sample them."""
    padded = shutil.copytree(folder, tmp_path / "padded")
    (padded / "config.json").write_text('{"vocab_size": 320}')
    (row,) = load({"response_token_ids": [319]}, tokenizer_folder=str(padded))
    assert list(row.tokens) == [319]


def test_a_folder_of_samples_is_read_in_the_order_of_its_files(folder, tmp_path):
    for step in (2, 1):
        row = {"prompt_token_ids": [step], "response_token_ids": [9], "score": 1.0}
        (tmp_path / f"step_{step:08d}.jsonl").write_text(json.dumps(row) + "\n")
    options = GivenOptions(key="k", files=(f"{tmp_path}/",), tokenizer_folder=folder, sequence_length=5)
    assert [list(row.tokens) for row in load_given(options)] == [[1, 9], [2, 9]]


def test_long_rows_are_refused_cut_or_left_out(load):
    short, long = chat("a", "b"), chat("a" * 200, "b" * 100)
    (whole,) = load(short)
    with pytest.raises(ValueError, match=r"rows.jsonl:2: \d+ tokens, more than sequence_length 270; .* long_rows: cut"):
        load(short, long, sequence_length=270)
    assert [len(row.tokens) for row in load(short, long, sequence_length=270, long_rows="cut")][1] == 270
    assert load(short, long, sequence_length=270, long_rows="skip") == [whole]
    assert load(short, long, sequence_length=100, long_rows="cut") == [whole], "nothing of its answer is left"


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (chat("a"), {}, "rows.jsonl:1: messages: no turn of the assistant"),
        ({"text": "a"}, {}, "rows.jsonl:1: messages: missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, {"pairs": True}, "rejected: the same as chosen"),
        ({"prompt": "a", "chosen": "b"}, {"pairs": True}, "rejected: missing"),
        (chat("a", "b"), {"min_score": 1.0}, "score: None is no number"),
        ({"response_token_ids": [1, 2], "loss_mask": [0, 0]}, {}, "loss_mask: 0 of 2"),
        ({"response_token_ids": [1], "score": 0.0}, {"min_score": 1.0}, "no row to train on .*; left out: 1 below min"),
        ({"response_token_ids": [1], "score": math.nan}, {"min_score": 1.0}, "left out: 1 below min_score 1"),
        (chat("a", "\ud83d"), {}, "rows.jsonl:1: messages.1: 'utf-8' codec can't encode"),
        ({"prompt_token_ids": None, "response_token_ids": [1]}, {}, "rows.jsonl:1: prompt_token_ids: None; expected"),
        ({"response_token_ids": None}, {}, "rows.jsonl:1: response_token_ids: None; expected a list"),
        ({"response_token_ids": ["a"]}, {}, "rows.jsonl:1: response_token_ids: 'a'; expected"),
        ({"response_token_ids": [1.0]}, {}, "rows.jsonl:1: response_token_ids: 1.0; expected"),
        ({"response_token_ids": [1, -5]}, {}, "rows.jsonl:1: response_token_ids: -5; expected"),
        ({"response_token_ids": [258]}, {}, "response_token_ids: 258; expected .* ids, 0 to 257"),
        ({"response_token_ids": [2**40]}, {}, "rows.jsonl:1: response_token_ids: 1099511627776; expected"),
        ({"response_token_ids": [1], "loss_mask": None}, {}, "rows.jsonl:1: loss_mask: None is no list"),
        (
            {"chosen": chat("a", "b")["messages"], "rejected": chat("a", "c")["messages"]}, {"pairs": True},
            r"prompt: missing; a pair is \{prompt, chosen, rejected\}; .* leave it out of chosen and rejected",
        ),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on_ends_the_start_with_its_place(load, record, fields, message):
    with pytest.raises(ValueError, match=rf"^actor_train.data_args.file_name: .*{message}"):
        load(record, **fields)


def test_a_template_that_the_tokenizer_does_not_have_is_told_with_its_key(load, folder, tmp_path):
    plain = load_tokenizer(folder)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"^actor_train.data_args.template: template native: .* choose chatml or base"):
        load(chat("a", "b"), tokenizer_folder=str(tmp_path / "plain"), template="native")


def test_an_empty_file_is_refused(load):
    with pytest.raises(ValueError, match="no row to train on"):
        load()


def test_the_digest_is_of_tokens_and_masks(load):
    two = chat("1+1?", "2", "2+2?", "4")
    assert digest_of(load(two)) == digest_of(load(two)) != digest_of(load(two, last_turn=True))
