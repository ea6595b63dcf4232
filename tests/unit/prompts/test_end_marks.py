"""What ends a turn of a model, and what begins a text: of the folder's files, the tokenizer and the chat template."""

import json

import pytest

pytest.importorskip("transformers")

from roll_async.prompts.end_marks import EndMarks, leading_marks
from roll_async.prompts.load import DataOptions, load_prompts
from roll_async.prompts.rows import Columns
from roll_async.prompts.tokenizer import batch_decoder, load_tokenizer, without_stop
from tests.family_tokenizers import FAMILIES, end_ids_of, make_family, save_family

CLOSES = {
    "llama-3": "<|eot_id|>",
    "llama-3.1": "<|eot_id|>",
    "qwen-3": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "cohere-2": "<|END_OF_TURN_TOKEN|>",  # behind <|END_RESPONSE|>, which ends a part of the turn
    "phi-3": "<|end|>",
    "llama-2": "</s>",
}


def texts_of(tokenizer, ids):
    return {tokenizer.decode([i]) for i in ids}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_marks_of_a_folder_are_those_its_engine_stops_at_and_its_template_says(name, tmp_path):
    save_family(name, tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    found = EndMarks.of(tokenizer)
    assert set(found.ids) == set(end_ids_of(name, tokenizer)) and not found.difference
    # With a GLM template the head of the next turn is the mark.
    assert found.closes == (name in CLOSES) and tokenizer.decode([found.own]) == CLOSES.get(name, "<|user|>")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_says_its_own_mark_where_no_file_does(name):
    tokenizer = make_family(name)
    heads = {"<|user|>", "<|observation|>"} if name.startswith("glm") else {CLOSES[name]}
    assert texts_of(tokenizer, EndMarks.of(tokenizer).ids) == heads | {FAMILIES[name].eos}


def test_sources_that_disagree_are_united_and_named(tmp_path):
    """As a base model that is trained with the chats of its family."""
    save_family("qwen-3", tmp_path, generation={"eos_token_id": 256}, config={"eos_token_id": [256]})
    tokenizer = load_tokenizer(str(tmp_path))
    found = EndMarks.of(tokenizer)
    assert texts_of(tokenizer, found.ids) == {"<|endoftext|>", "<|im_end|>"}
    assert found.difference == "'<|im_end|>' (258; by the tokenizer, the chat template)"
    assert tokenizer.decode([found.own]) == "<|im_end|>"
    # Another template has another end: this one has none.
    assert EndMarks.of(tokenizer, "base").own == tokenizer.eos_token_id


def test_config_json_counts_too_and_that_of_a_model_with_eyes_has_it_inside(tmp_path):
    save_family("gemma", tmp_path, config={"eos_token_id": None, "text_config": {"eos_token_id": 260}})
    (tmp_path / "generation_config.json").unlink()
    tokenizer = load_tokenizer(str(tmp_path))
    assert texts_of(tokenizer, EndMarks.of(tokenizer).ids) == {"<eos>", "<end_of_turn>"}


def test_without_an_engine_to_differ_from_nothing_is_said_and_a_negative_id_is_none(tmp_path):
    assert not EndMarks.of(make_family("glm-4")).difference
    save_family("gemma", tmp_path, generation={"eos_token_id": [-1, 258]}, config={"eos_token_id": None})
    found = EndMarks.of(load_tokenizer(str(tmp_path)))
    assert found.ids == (257, 258, 260)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id: expected a token id or a list of them, got '</s>'"),
        ('{"eos_token_id": [1, 2.5]}', "got 2.5"),
        ('{"eos_token_id": [true]}', "got True"),
        ("[1]", "is no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_names_no_tokens_is_refused_by_its_name(text, said, tmp_path):
    save_family("gemma", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json") as error:
        EndMarks.of(load_tokenizer(str(tmp_path)))
    assert said in str(error.value)


def test_of_marks_with_one_beginning_the_longest_counts():
    assert leading_marks("\n<|a|><|a|>b<|b|>", {"<|a|>", "<|a|>b", "<|b|>"}) == ["<|a|>", "<|a|>b", "<|b|>"]
    assert leading_marks("x<|a|>", {"<|a|>"}) == leading_marks("", {"<|a|>"}) == leading_marks("x", set()) == []


def test_what_a_reward_reads_ends_before_the_mark_also_where_that_is_no_special_token():
    tokenizer = make_family("qwen-3")
    end = tokenizer.convert_tokens_to_ids("</tool_call>")  # an added token that is not special
    answers = [[*tokenizer.encode("a"), end], [*tokenizer.encode("</tool_call>b"), tokenizer.eos_token_id], []]
    assert list(batch_decoder(tokenizer, (end, tokenizer.eos_token_id))(answers)) == ["a", "</tool_call>b", ""]


def test_a_stop_string_that_ended_an_answer_is_cut_off_and_one_of_an_earlier_turn_is_not():
    tokenizer = make_family("qwen-3")
    answers = [tokenizer.encode(text) for text in ("so 4</a>", "<a>1</a> is 4", "", "4 STOP.")]
    assert list(batch_decoder(tokenizer, (), ("</a>", "STOP."))(answers)) == ["so 4", "<a>1</a> is 4", "", "4 "]
    assert [without_stop("4\n\n", "\n\n", stops) for stops in (("\n", "\n\n"), ("4\n",))] == ["4", ""]


def load(folder, template, *, content="2+2?", **more):
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"id": "1", "messages": [{"role": "user", "content": content}], "ground_truth": "4"}))
    options = DataOptions(
        files=(str(rows),),
        columns=Columns(),
        template=template,
        prompt_length=999,
        domains={"d": ()},
        tokenizer_folder=str(folder),
        **more,
    )
    return load_prompts(options)["d"][0]


OWN_SAYS_NONE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
OWN_SAYS_IT_LATE = "{% if true %}\n\n{% endif %}{{ bos_token }}" + OWN_SAYS_NONE


OPENINGS = [
    (name, template, 1)
    for name in ("llama-3", "gemma", "qwen-3", "glm-4")
    for template in ("native", "base", "chatml", "qwen2_5", OWN_SAYS_NONE, OWN_SAYS_IT_LATE)
]
# Rendered in processes, which take seconds to start.
OPENINGS += [pytest.param(name, "native", 2, marks=pytest.mark.slow) for name in ("llama-3", "gemma")]


@pytest.mark.parametrize(("name", "template", "num_workers"), OPENINGS)
def test_a_prompt_has_the_opening_of_its_tokenizer_exactly_once(name, template, num_workers, tmp_path):
    is_own = template.startswith("{%")
    tokenizer = save_family(name, tmp_path, template=template if is_own else None)
    ids = list(load(tmp_path, "native" if is_own else template, num_workers=num_workers).token_ids)
    family = FAMILIES[name]
    if family.bos is None:  # its template may write marks; its tokenizer adds none
        first = "[gMASK]" if template == "native" and name == "glm-4" else None
        assert ids.count(256) == 0 and (first is None or tokenizer.decode(ids[:1]) == first)
        return
    bos = tokenizer.convert_tokens_to_ids(family.bos)
    late = template == OWN_SAYS_IT_LATE
    assert ids.count(bos) == 1 and (ids.index(bos) > 0 if late else ids[0] == bos)
    if template == "base":
        assert ids == tokenizer("2+2?")["input_ids"], "as the tokenizer itself"


def test_a_row_that_begins_with_the_opening_gets_no_second_one(tmp_path):
    tokenizer = save_family("llama-3", tmp_path)
    prompt = load(tmp_path, "base", content="<|begin_of_text|>2+2?")
    assert list(prompt.token_ids) == tokenizer("2+2?")["input_ids"]


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("llama-3", "native", "<|eot_id|>"),
        ("gemma", "native", "<end_of_turn>"),
        ("glm-4.5", "native", "<|user|>"),
        ("qwen-3", "chatml", "<|im_end|>"),
        ("gemma", "base", "<eos>"),
    ],
)
def test_a_supervised_row_ends_as_the_template_ends_an_answer(name, template, end, tmp_path):
    tokenizer = save_family(name, tmp_path)
    prompt = load(tmp_path, template, supervised=frozenset({"d"}), response_length=9)
    assert tokenizer.decode(list(prompt.answer_ids)) == f"4{end}"


@pytest.mark.parametrize(("template", "own"), [("native", True), ("base", False)])
def test_an_opening_of_two_tokens_is_one_opening(template, own, tmp_path):
    """As GLM's tokenizers have it."""
    from tokenizers import processors

    tokenizer = make_family("glm-4")
    first, second = (tokenizer.convert_tokens_to_ids(mark) for mark in ("[gMASK]", "<sop>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", first), ("<sop>", second)]
    )
    tokenizer.save_pretrained(tmp_path)
    ids = list(load(tmp_path, template).token_ids)
    said = "<|user|>\n2+2?<|assistant|>" if own else "2+2?"
    assert tokenizer.decode(ids) == "[gMASK]<sop>" + said
