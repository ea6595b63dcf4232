"""Conversations with the templates of model families: a turn continues the tokens before it, a mark is said once."""

import json
from array import array

import pytest

pytest.importorskip("transformers")

from roll_async.agents.rendering import TemplateRenderer
from roll_async.prompts.tokenizer import load_tokenizer
from tests.family_talks import AFTER_USER, FIRST, LAST, talk, tool, user
from tests.family_tokenizers import FAMILIES, end_ids_of, make_family, save_family

PLAIN = [name for name in AFTER_USER if name != "deepseek-r1"]
"""Their templates say again what was sampled."""


@pytest.mark.parametrize("name", PLAIN)
def test_second_and_third_turns_are_what_the_template_says_of_the_whole_chat(name):
    mark, head = AFTER_USER[name], FIRST.get(name, "")
    said = [f"{head}a{number}{LAST.get(name, '')}" for number in (1, 2, 3)]
    asked, replies, session = talk(name, [(text, mark) for text in said], [user("q2"), user("q3")])
    assert not session.tree.branches and [reply.text for reply in replies] == said, "no client gets a mark"
    chat = []
    for number in (1, 2):
        chat += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    chat.append({"role": "user", "content": "q3"})
    tokenizer = make_family(name)
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert asked[-1] == tokenizer.decode(tokenizer.encode(whole, add_special_tokens=False))
    for before, after, text in zip(asked, asked[1:], said, strict=False):
        assert after.startswith(before + text + mark) and not after.startswith(before + text + mark * 2)


@pytest.mark.parametrize("name", ["glm-4", "glm-4.5"])
@pytest.mark.parametrize(
    ("mark", "between"),
    [
        ("<|observation|>", ""),  # the head of the result is the mark: said already
        ("<|user|>", "<|observation|>"),  # the token stays, and the result is still a result
        ("<|endoftext|>", "<|observation|>"),
    ],
)
def test_after_a_call_a_glm_reads_the_result_behind_one_observation(name, mark, between):
    said = "\n<think>why</think>\nlook" if name == "glm-4.5" else "\nlook"
    asked, replies, session = talk(name, [(said, mark), ("\ndone", "<|user|>")], [tool("42")])
    assert not session.tree.branches
    result = "\n<tool_response>\n42\n</tool_response>" if name == "glm-4.5" else "\n42"
    assert asked[1] == asked[0] + said + mark + between + result + "<|assistant|>"
    assert [reply.text for reply in replies] == [said, "\ndone"]


@pytest.mark.parametrize(
    ("name", "mark", "close"),
    [("qwen-3", "<|endoftext|>", "<|im_end|>"), ("llama-3.1", "<|eom_id|>", "<|eot_id|>")],
)
def test_another_mark_stands_for_the_close_of_a_turn(name, mark, close, tmp_path):
    save_family(name, tmp_path)
    asked, replies, session = talk(name, [("a1", mark), ("a2", close)], [user("q2")], load_tokenizer(str(tmp_path)))
    assert not session.tree.branches and [reply.content for reply in replies] == ["a1", "a2"]
    assert asked[1].startswith(asked[0] + "a1" + mark)
    assert not asked[1].removeprefix(asked[0] + "a1" + mark).startswith(close), "the end is said once"


@pytest.mark.parametrize("name", PLAIN)
def test_a_turn_that_was_cut_is_closed_by_the_template_behind_its_last_token(name):
    said = FIRST.get(name, "") + "a1 "
    asked, _, session = talk(name, [(said, ""), ("a2", AFTER_USER[name])], [user("q2")])
    close = LAST.get(name, "") + AFTER_USER[name]
    assert not session.tree.branches and asked[1].startswith(asked[0] + said + close)


def test_a_family_whose_template_takes_the_thought_away_begins_a_branch_and_says_its_mark_once():
    end = AFTER_USER["deepseek-r1"]
    asked, replies, session = talk("deepseek-r1", [("hm</think>a1", end), ("hm</think>a2", end)], [user("q2")])
    assert dict(session.tree.branches) == {"template": 1}
    assert asked[1] == f"<｜begin▁of▁sentence｜><｜User｜>q1<｜Assistant｜>a1{end}<｜User｜>q2<｜Assistant｜><think>\n"
    assert replies[0].text == "hm</think>a1"


OPENS_A_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
WRITES_IT_AGAIN = OPENS_A_THOUGHT.replace(
    "{{ m.content }}", "{{ '<think>\n' if m.role == 'assistant' }}{{ m.content }}"
)


@pytest.mark.parametrize("template", [OPENS_A_THOUGHT, WRITES_IT_AGAIN], ids=["as a turn says", "opened again"])
def test_turns_continue_whose_thought_the_template_opened(template):
    tokenizer, end = make_family("qwen-3", template), "<|im_end|>"
    said = ["hm\n</think>\n\na1", "so</think>a2", "still thinking"]
    asked, replies, session = talk("qwen-3", [(each, end) for each in said], [user("q2"), user("q3")], tokenizer)
    assert not session.tree.branches and [reply.text for reply in replies] == said
    for before, turn, after in zip(asked, said, asked[1:]):
        assert after.startswith(f"{before}{turn}{end}\n<|im_start|>user\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rest_behind_a_mark_is_what_the_template_has_there(name):
    """Questions with tools have no chat: the result is appended to the tokens of the turn."""
    tokenizer = make_family(name)
    renderer = TemplateRenderer(tokenizer)
    for mark in (*FAMILIES[name].ends, "a"):
        last = tokenizer.convert_tokens_to_ids(mark)
        after = tokenizer.decode(list(renderer.between(last, ["42"])))
        assert after.count("42") == 1
        if mark in ("a", "<|endoftext|>") and name.startswith("glm"):
            assert after.startswith("<|observation|>")
        elif mark == "a":
            assert after.startswith(LAST.get(name, "") + AFTER_USER[name]), (
                "a turn that was cut gets the close of its template"
            )
        elif name.startswith("glm"):
            assert after.startswith("<|observation|>") == (mark != "<|observation|>")
        elif last in renderer.ends.ids:
            assert not after.startswith(AFTER_USER[name])


@pytest.mark.parametrize("name", ["llama-3", "gemma"])
def test_a_chat_of_a_template_without_opening_gets_it_once_and_later_turns_do_not(name):
    tokenizer = make_family(name, FAMILIES[name].template.replace("{{ bos_token }}", ""))
    mark = AFTER_USER[name]
    asked, _, session = talk(name, [("a1", mark), ("a2", mark)], [user("q2")], tokenizer)
    bos = FAMILIES[name].bos
    assert not session.tree.branches and all(text.startswith(bos) and text.count(bos) == 1 for text in asked)


def test_what_ended_a_call_is_no_part_of_the_call(tmp_path):
    """A reader of calls that gets the mark would find arguments that are no JSON."""
    save_family("glm-4", tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    renderer = TemplateRenderer(tokenizer)
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for end in end_ids_of("glm-4", tokenizer):
        assert renderer.said([*tokenizer.encode(text, add_special_tokens=False), end]) == text
    assert renderer.said(array("i")) == "" and renderer.said([97, 98]) == renderer.decode([97, 98])
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == list(renderer.ends.ids)


def test_a_mark_that_is_a_plain_word_is_not_merged_with_what_follows(tmp_path):
    """An engine may stop at any token; one that is not added to the vocabulary can be part of a longer one."""
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = make_family("qwen-3").backend_tokenizer
    inner.model = models.BPE({**letters, "b\u010a": 300}, [("b", "\u010a")])  # as byte-level BPE writes a line break
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = FAMILIES["qwen-3"].template
    tokenizer.save_pretrained(tmp_path)
    end = letters["b"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    renderer = TemplateRenderer(load_tokenizer(str(tmp_path)))
    assert end in renderer.ends.ids and 300 in renderer.encode("b\n")
    after = renderer.encode_after(end, "<|im_end|>\n<|im_start|>user\n")
    assert renderer.decode(after) == "\n<|im_start|>user\n" and renderer.said([letters["a"], end]) == "a"
