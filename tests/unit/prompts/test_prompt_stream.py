"""The stream: the same for the same seed, every row once per epoch, domains in their shares, chats as tokens."""

import json
from collections import Counter

import pytest

from roll_async.prompts.addition import ALPHABET, Problem, problems
from roll_async.prompts.load import DataOptions, domain_of, load_prompts
from roll_async.prompts.rows import Columns, Row
from roll_async.prompts.stream import ShuffledPrompts
from roll_async.prompts.tokenizer import TEMPLATES, Renderer


@pytest.fixture
def stream(build):
    def make(seed=1, probabilities=None, num_epochs=None, **sizes):
        prompts = {d: [build.prompt(f"{d}{i}", domain=d) for i in range(n)] for d, n in sizes.items()}
        return ShuffledPrompts(prompts, seed=seed, probabilities=probabilities, num_epochs=num_epochs)

    return make


def ids(stream, indexes):
    return [None if (p := stream.at(i)) is None else p.row_id for i in indexes]


def test_every_row_comes_once_per_epoch_in_another_order(stream):
    rows = ids(stream(a=50), range(150))
    epochs = [rows[i : i + 50] for i in (0, 50, 100)]
    assert all(len(set(epoch)) == 50 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def test_a_position_means_the_same_row_whatever_was_asked_before(stream):
    one, two = stream(a=30, b=20), stream(a=30, b=20)
    wanted = ids(one, range(200))
    jumps = [199, 3, 77, 3, 120, 0, 199]
    assert ids(two, jumps) == [wanted[i] for i in jumps]
    assert ids(stream(seed=2, a=30, b=20), range(200)) != wanted


def test_the_stream_ends_after_the_last_epoch(stream):
    short = stream(num_epochs=2, a=7)
    assert ids(short, range(13, 17))[1:] == [None] * 3 and short.at(13) is not None


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 0.9, "b": 0.06, "c": 0.04}])
def test_every_prefix_holds_the_domains_in_their_shares(stream, shares):
    mixed, counts = stream(probabilities=shares, a=100, b=100, c=100), Counter()
    for index in range(900):
        counts[mixed.at(index).domain] += 1
        for name, share in shares.items():
            assert abs(counts[name] - share * (index + 1)) <= 1 + 3 * 2, (index, counts)
    assert counts["a"] == pytest.approx(900 * shares["a"], abs=3)


def test_without_shares_domains_come_by_their_size_and_one_epoch_is_all_rows(stream):
    rows = ids(stream(a=30, b=10), range(40))
    assert len(set(rows)) == 40


def test_a_small_domain_with_a_large_share_repeats_its_rows_evenly(stream):
    counts = Counter(ids(stream(probabilities={"a": 0.5, "b": 0.5}, a=4, b=96), range(200)))
    assert {counts[f"a{i}"] for i in range(4)} == {25}


def row(tag):
    return Row(where="", row_id="1", tag=tag, messages=(), ground_truth="")


def test_a_row_belongs_to_the_domain_of_its_tag_and_a_single_domain_takes_all():
    domains = {"math": ("gsm8k", "math"), "code": ("kodcode",)}
    assert [domain_of(row(t), domains) for t in ("math", "kodcode", "poems")] == ["math", "code", None]
    assert domain_of(row("poems"), {"math": ("gsm8k",)}) == "math"


class FakeTokenizer:
    """One token per character; knows a template only when given one."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, chat_template, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return f"{chat_template or self.chat_template}|" + "".join(m["content"] for m in messages)

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def test_the_native_template_is_the_tokenizers_own_and_its_absence_is_named():
    pytest.importorskip("jinja2")
    (ids,) = Renderer(FakeTokenizer("own"), "native").render([[{"role": "user", "content": "q"}]])
    assert "".join(map(chr, ids)) == "own|q"
    with pytest.raises(ValueError, match="native: this tokenizer has no chat template; choose chatml or base"):
        Renderer(FakeTokenizer(), "native")
    with pytest.raises(ValueError, match="'chatlm' is not one of"):
        Renderer(FakeTokenizer(), "chatlm")


def test_a_chat_that_the_template_refuses_says_so_and_leaves_the_others_in_place():
    jinja2 = pytest.importorskip("jinja2")

    class Strict(FakeTokenizer):
        def apply_chat_template(self, messages, **options):
            if messages[0]["role"] == "system":
                raise jinja2.TemplateError("no system role")
            return messages[0]["content"]

    chats = [[{"role": role, "content": content}] for role, content in [("user", "a"), ("system", "b"), ("user", "c")]]
    first, refused, last = Renderer(Strict("own"), "native").render(chats)
    assert (first, last) == ([ord("a")], [ord("c")]) and "no system role" in refused


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("base", "hi"),
    ],
)
def test_the_templates_read_as_their_models_were_trained(template, text):
    jinja2 = pytest.importorskip("jinja2")
    rendered = jinja2.Template(TEMPLATES[template]).render(
        messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert rendered == text


@pytest.fixture
def tokenizer_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *ALPHABET])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    folder = tmp_path / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    return folder


def options(folder, file, **changes):
    values = {"files": (str(file),), "columns": Columns(), "template": "base", "prompt_length": 8}
    return DataOptions(**{**values, "domains": {"add": ("add",)}, "tokenizer_folder": str(folder), **changes})


def record(text, **fields):
    return {"id": text, "tag": "add", "messages": [{"role": "user", "content": text}], "ground_truth": "1", **fields}


def test_prompts_are_loaded_as_tokens_and_what_is_skipped_is_counted(tmp_path, tokenizer_folder, caplog):
    file = tmp_path / "data.jsonl"
    records = [record("1+2="), record("12345+12345="), {"id": "bad"}, record("3+4=", tag="poem")]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    with caplog.at_level("INFO", logger="roll_async"):
        loaded = load_prompts(options(tokenizer_folder, file, domains={"add": ("add",), "sub": ("poem",)}))
    (prompt,) = loaded["add"]
    assert prompt.token_ids.tolist() == [2 + ALPHABET.index(c) for c in "1+2="]
    assert (prompt.row_id, prompt.domain, prompt.text) == ("1+2=", "add", "1+2=") and len(loaded["sub"]) == 1
    assert "1 malformed, 1 longer than prompt_length 8" in caplog.text


def test_a_domain_without_prompts_is_refused_with_what_was_skipped(tmp_path, tokenizer_folder):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record("1+2=")) + "\n")
    with pytest.raises(ValueError, match="no prompt for domain sub in .*data.jsonl: 1 kept"):
        load_prompts(options(tokenizer_folder, file, domains={"add": ("add",), "sub": ("sub",)}))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_prompts(options(tmp_path, tmp_path / "data.jsonl"))


def test_the_worked_example_of_the_demo_task():
    problem = Problem(58, 367)
    assert problem.prompt == "58+367=" and problem.answer == "425"
    assert problem.solution() == "8+7+0=15;5+6+1=12;0+3+1=4;=425"


def test_demo_problems_are_distinct_reproducible_and_solved_right_in_the_alphabet():
    many = problems(500, seed=3)
    assert len(set(many)) == 500 and many == problems(500, seed=3) != problems(500, seed=4)
    for problem in many:
        solution = problem.solution()
        assert int(solution.rpartition("=")[2]) == problem.left + problem.right
        assert set(problem.prompt + solution) <= set(ALPHABET)
