"""Files to tokenised prompts, with a real tokenizer built in the test."""

import json
import logging

import pytest

from roll_async.prompts.load import DataOptions, domain_of, judged, load_prompts
from roll_async.prompts.rows import Columns, Row
from roll_async.prompts.teachers import teacher_of
from roll_async.prompts.tokenizer import TEMPLATES, ChatEncoder, load_tokenizer

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


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
    target = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(target)
    return str(target)


def data(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number, text="hello", tag=""):
    return {"id": number, "tag": tag, "messages": [{"role": "user", "content": text}], "ground_truth": "1"}


def options(folder, *files, **fields):
    defaults = {"columns": Columns(), "template": "base", "prompt_length": 100, "domains": {"math": ()}}
    return DataOptions(files=files, tokenizer_folder=folder, **{**defaults, **fields})


def test_prompts_carry_tokens_text_answer_and_extras(folder, tmp_path):
    (prompt,) = load_prompts(options(folder, data(tmp_path, {**row(3, "2+2="), "level": 5})))["math"]
    assert load_tokenizer(folder).decode(prompt.token_ids) == "2+2="
    assert (prompt.row_id, prompt.text, prompt.ground_truth, prompt.extra) == ("3", "2+2=", "1", {"level": "5"})


def test_supervised_rows_carry_their_answer_as_tokens_and_too_long_ones_are_skipped(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "roll_async")
    file = data(tmp_path, {**row(0), "ground_truth": "yes"}, {**row(1), "ground_truth": "surely"})
    loaded = load_prompts(options(folder, file, supervised=frozenset({"math"}), response_length=4))
    (prompt,) = loaded["math"]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(prompt.answer_ids) == "yes<|im_end|>" and len(prompt.answer_ids) == 4
    assert "1 whose answer is longer than response_length 4" in caplog.text
    assert load_prompts(options(folder, file))["math"][0].answer_ids is None


SOLUTION = "48+24 = <<48+24=72>>72.\n#### 1,072"


def test_the_number_of_a_gsm8k_solution_is_for_maths_rules_and_a_supervised_row_trains_all_of_it(folder, tmp_path):
    file = data(tmp_path, {**row(0, tag="m"), "ground_truth": SOLUTION}, {**row(1, tag="t"), "ground_truth": SOLUTION})
    loaded = load_prompts(
        options(
            folder, file, domains={"math": ("m",), "text": ("t",)}, maths=frozenset({"math"}),
            supervised=frozenset({"text"}), response_length=99,
        )
    )  # fmt: skip
    (number,), (text,) = loaded["math"], loaded["text"]
    assert (number.ground_truth, text.ground_truth) == ("1072", SOLUTION)
    assert load_tokenizer(folder).decode(text.answer_ids).startswith(SOLUTION)


def test_a_row_with_a_turn_that_the_template_drops_is_refused_by_its_line(folder, tmp_path, caplog):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [*row(1)["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, *row(1)["messages"]]
    file = data(tmp_path, row(0), {**row(1), "messages": chat})
    assert [p.row_id for p in load_prompts(options(folder, file, template="chatml"))["math"]] == ["0"]
    assert f"{file}:2: the chat template leaves out messages.1.tool_calls.0.function.name" in caplog.text


def test_files_that_cannot_be_read_at_once_are_read_again(folder, tmp_path, caplog):
    failures = [OSError(116, "Stale file handle")]

    def away(truth, extra):
        if failures:
            raise failures.pop()

    loaded = load_prompts(options(folder, data(tmp_path, row(1), row(2)), checks={"math": away}))
    assert [p.row_id for p in loaded["math"]] == ["1", "2"] and "Stale file handle; reading again" in caplog.text


def test_a_validation_leaves_out_domains_without_a_score(build):
    both = {"math": [build.prompt()], "demos": [build.prompt(domain="demos")]}
    assert judged(both, {"demos": "cross_entropy"}) == {"math": both["math"]}
    with pytest.raises(ValueError, match="all prompts are of domains without a score: demos"):
        judged({"demos": both["demos"]}, {"demos": "cross_entropy"})


def test_prompts_longer_than_the_limit_are_skipped_and_counted(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "roll_async")
    file = data(tmp_path, row(0, "x" * 10), row(1, "x" * 11), row(2, "x" * 9))
    loaded = load_prompts(options(folder, file, prompt_length=10))
    assert [p.row_id for p in loaded["math"]] == ["0", "2"]
    assert "2 prompts" in caplog.text and "1 longer than prompt_length 10" in caplog.text


def test_several_domains_take_rows_by_tag_and_name_the_tags_nobody_takes(folder, tmp_path):
    file = data(tmp_path, row(0, tag="algebra"), row(1, tag="leetcode"), row(2, tag="poems"), row(3, tag="algebra"))
    domains = {"math": ("algebra", "geometry"), "code": ("leetcode",)}
    loaded = load_prompts(options(folder, file, domains=domains))
    assert {name: [p.row_id for p in part] for name, part in loaded.items()} == {"math": ["0", "3"], "code": ["1"]}
    with pytest.raises(ValueError, match=r"no prompt for domain code .*3 whose tag belongs to no domain .'algebra' 2"):
        load_prompts(options(folder, file, domains={"math": ("leetcode",), "code": ("cobol",)}))
    part = load_prompts(options(folder, file, domains={**domains, "poetry": ("sonnet",)}), every_domain=False)
    assert part == loaded, "validation may leave a domain out"
    with pytest.raises(ValueError, match="no prompt for domain poetry"):
        load_prompts(options(folder, file, domains={"poetry": ("sonnet",), "x": ("y",)}), every_domain=False)


def test_a_single_domain_takes_every_tag():
    anything = Row(where="", row_id="", tag="poems", messages=(), ground_truth="")
    assert domain_of(anything, {"math": ("algebra",)}) == "math"
    assert domain_of(anything, {"math": ("algebra",), "code": ("leetcode",)}) is None


def test_rows_go_to_the_domain_of_their_style(folder, tmp_path):
    def styled(number, style, tag="math"):
        return {**row(number, tag=tag), "ground_truth": None, "reward_model": {"ground_truth": "1", "style": style}}

    file = data(tmp_path, styled(0, "rule"), styled(1, "model"), styled(2, "model", "essay"), styled(3, "other"))
    domains, styles = {"rule": ("math",), "judge": ()}, {"rule": ("rule",), "judge": ("model",)}
    loaded = load_prompts(options(folder, file, domains=domains, styles=styles))
    assert {name: [p.row_id for p in part] for name, part in loaded.items()} == {"rule": ["0"], "judge": ["1", "2"]}


PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
CODE_ROWS = [
    {"prompt": "HumanEval", "test": CHECK, "entry_point": "add", "task_id": "x/0"},
    {"prompt": "LiveCodeBench", "public_test_cases": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
     "metadata": '{"func_name": "add"}'},
    {"prompt": "PRIME", "data_source": "taco",
     "reward_model": {"style": "rule", "ground_truth": '{"inputs": ["1\\n2"], "outputs": ["3"], "fn_name": "add"}'}},
]  # fmt: skip
BAD_CODE_ROWS = [
    {"prompt": "HumanEval", "test": CHECK},
    {"prompt": "LiveCodeBench", "public_test_cases": '[{"input": "1", "output": "3", "testtype": "functional"}]'},
    {"prompt": "PRIME", "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": []}'}},
    {"prompt": "none", "solution": "def add(a, b): ..."},
]


def test_rows_of_code_data_sets_go_from_their_file_to_a_score_and_malformed_ones_are_named(folder, tmp_path, caplog):
    from roll_async.rewards.code_sandbox import CodeSandbox
    from roll_async.rewards.row_checks import REFERENCE_COLUMNS, row_check

    caplog.set_level(logging.WARNING, "roll_async")
    file = data(tmp_path, *CODE_ROWS, *BAD_CODE_ROWS)
    checks = {"code": row_check("code_sandbox")}
    columns = Columns(references=REFERENCE_COLUMNS)
    prompts = load_prompts(options(folder, file, columns=columns, domains={"code": ()}, checks=checks))["code"]
    assert [p.text for p in prompts] == ["HumanEval", "LiveCodeBench", "PRIME"]
    for number, problem in ((4, "needs entry_point"), (5, "metadata.func_name"), (6, "1 inputs and 0 outputs")):
        assert any(f"{file}:{number}: " in m and problem in m for m in caplog.messages), (number, caplog.messages)
    assert f"{file}:7: column 'ground_truth' is missing" in caplog.text
    reward = CodeSandbox(isolation="best_effort")
    for prompt in prompts:
        assert reward(PROGRAM, prompt.ground_truth, prompt.extra).score == 1, prompt.text
        assert reward(PROGRAM.replace("+", "-"), prompt.ground_truth, prompt.extra).score == 0, prompt.text
    reward._runner.close()


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_template_is_told_the_date_of_the_first_start_and_the_variables_of_the_config(folder, tmp_path, num_workers):
    """As Llama 3.2's does; a resumed run would have other prompts tomorrow."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ sign | default('.') }} {{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "dated")
    told = {"template_time": "2020-02-03T04:05:06", "template_kwargs": {"sign": ":"}}
    dated = {"template": "native", **told, "num_workers": num_workers}
    (prompt,) = load_prompts(options(str(tmp_path / "dated"), data(tmp_path, row(0, "2+2")), **dated))["math"]
    assert load_tokenizer(folder).decode(prompt.token_ids) == "03 Feb 2020: 2+2"


def test_what_a_row_says_is_the_same_in_another_folder_and_by_another_template(folder, tmp_path):
    def content(place, template="base", **changes):
        (tmp_path / place).mkdir(exist_ok=True)
        file = data(tmp_path / place, {**row(0, "2+2"), "id": None, "level": 5, **changes})
        (prompt,) = load_prompts(options(folder, file, template=template))["math"]
        return prompt.content

    assert content("here") == content("there", "chatml")
    other = {"ground_truth": "2", "level": 6, "messages": row(0, "3")["messages"]}
    told = [content("here", **{key: value}) for key, value in other.items()]
    assert len({content("here"), *told}) == 4


def test_empty_prompts_and_rows_a_template_refuses_are_malformed_not_fatal(folder, tmp_path, caplog):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{{ raise_exception('only users') if messages[0].role != 'user' else messages[0].content }}"
    )
    tokenizer.save_pretrained(tmp_path / "strict")
    strange = {**row(1), "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    file = data(tmp_path, row(0), strange, row(2, ""))
    caplog.set_level(logging.WARNING, "roll_async")
    loaded = load_prompts(options(str(tmp_path / "strict"), file, template="native"))
    assert [p.row_id for p in loaded["math"]] == ["0"]
    assert f"{file}:2: the chat template refuses it: only users" in caplog.text
    assert f"{file}:3: the prompt is empty" in caplog.text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("base", "hi"),
        ("chatml", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen2_5",
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_templates_give_the_exact_text_and_special_tokens_are_single_ids(folder, template, text):
    tokenizer = load_tokenizer(folder)
    ((ids, _),) = ChatEncoder(tokenizer, template).render([[{"role": "user", "content": "hi"}]])
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == text.count("<|im_start|>")


def test_the_native_template_is_the_tokenizers_own(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "own|{{ messages[0].content }}"
    ((ids, _),) = ChatEncoder(tokenizer, "native").render([[{"role": "user", "content": "q"}]])
    assert tokenizer.decode(ids) == "own|q"


def test_a_system_turn_of_the_row_replaces_the_default_one(folder):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    tokenizer = load_tokenizer(folder)
    ((ids, _),) = ChatEncoder(tokenizer, "qwen2_5").render([chat])
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nS<|im_end|>") and "Qwen" not in text


def test_the_templates_are_the_ones_the_config_offers():
    from typing import get_args, get_type_hints

    from roll_async.config.schema import DataArguments

    assert set(TEMPLATES) == set(get_args(get_type_hints(DataArguments)["template"]))


def test_what_a_user_can_fix_is_one_readable_line(folder, tmp_path):
    file = data(tmp_path, row(0))
    with pytest.raises(ValueError, match="template 'llama' is not one of native | qwen2_5"):
        load_prompts(options(folder, file, template="llama"))
    with pytest.raises(ValueError, match="this tokenizer has no chat template; choose chatml or base"):
        load_prompts(options(folder, file, template="native"))
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="model holds no tokenizer .tokenizer_config.json is missing."):
        load_prompts(options(str(tmp_path / "model"), file))


@pytest.mark.slow
def test_worker_processes_change_nothing_but_the_time(folder, tmp_path):
    file = data(tmp_path, *[row(i, "x" * (i % 120 + 1)) for i in range(2000)])
    assert load_prompts(options(folder, file)) == load_prompts(options(folder, file, num_workers=2))


@pytest.mark.parametrize(
    ("domain", "column", "teachers", "chosen"),
    [
        ("math", {"teacher": "code"}, ("math", "code"), "code"),
        ("math", {}, ("math", "code"), "math"),
        ("chat", {}, ("big",), "big"),
        ("chat", {"teacher": "big"}, ("big",), "big"),
        ("chat", {"teacher": "whoever wrote the book"}, ("teacher",), "teacher"),
    ],
)
def test_a_row_is_scored_by_the_teacher_of_its_column_else_of_its_domain_else_by_the_only_one(
    domain, column, teachers, chosen
):
    assert teacher_of(domain, column, teachers) == chosen


def test_a_row_that_chooses_no_teacher_is_skipped_with_its_file_and_line(folder, tmp_path, caplog):
    rows = [
        {**row(0), "teacher": "math"},
        {**row(1), "teacher": "maths"},
        row(2),
        {**row(3, tag="s"), "ground_truth": "y"},
    ]
    file, teachers = data(tmp_path, *({**r, "tag": r["tag"] or "m"} for r in rows)), ("math", "code")
    asked = options(
        folder, file, teachers=teachers, domains={"chat": ("m",), "demos": ("s",)}, untaught=frozenset({"demos"})
    )
    assert [[p.row_id for p in prompts] for prompts in load_prompts(asked).values()] == [["0"], ["3"]]
    first, second = (r.message for r in caplog.records if r.message.startswith("skipped "))
    assert f"{file}:2: teacher 'maths' is none of teachers (math, code); name one of them" in first
    assert f"{file}:3: it has no column teacher, and no teacher is called as its domain chat; add the column" in second
