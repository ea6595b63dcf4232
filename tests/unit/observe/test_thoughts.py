"""Where the thought of a response ends: it follows from the rendered prompt and the response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_async.observe.thoughts import (
    _FAMILIES,
    THINK,
    continuing,
    marks_of,
    opening_at_end,
    thought_of,
    with_thought_closed,
)
from tests.patience import patient

QWEN = "<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
OPENED = QWEN + "<think>\n"
ALL = (*THINK, *_FAMILIES)
GPT_OSS, MUSE = (marks for marks in ALL if not marks.closes_alone)
TAGGED = [marks for marks in ALL if marks.closes_alone]
BY_OPENING = {"ids": lambda marks: marks.opening}


@pytest.mark.parametrize("marks", TAGGED, **BY_OPENING)
def test_a_thought_that_the_template_opened_ends_at_its_closing_mark(marks):
    opened, closed = marks.opening, marks.closing
    assert opening_at_end(f"user\nhi\nassistant\n{opened}\n", [marks]) == opened
    assert thought_of(f"assistant\n{opened}\n", f"it is 7. No.{closed}18", [marks]) == ("it is 7. No.", "18", False)
    assert thought_of(f"assistant\n{opened}\n", "it is 7. No", [marks]) == ("it is 7. No", "", True)
    assert thought_of("assistant\n", f"{opened}it is 7. No.{closed}18", [marks]) == ("it is 7. No.", "18", False)
    assert thought_of("assistant\n", f"\n{opened}\nit is 7", [marks]) == ("\n\nit is 7", "", True)
    assert thought_of("assistant\n", "it is 7", [marks]) == ("", "it is 7", False)


@pytest.mark.parametrize("marks", ALL, **BY_OPENING)
def test_a_template_that_closes_an_empty_thought_opens_none(marks):
    tail = f"assistant\n{marks.opening}\n\n{marks.closing}\n\n"
    assert not opening_at_end(tail, [marks])
    assert thought_of(tail, "18", [marks]) == ("", "18", False)


def test_a_mark_in_a_message_of_the_chat_opens_nothing():
    assert not opening_at_end("<|im_start|>user\nwhat is <think><|im_end|>\n<|im_start|>assistant\n")
    assert not opening_at_end("user\n<think>\nassistant\n")


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>\n9+9 <think> again </think> 18", " 18"),  # the model repeats the mark of the template
        ("a </think> 7 <think> no </think> 18", " 18"),
        ("a </think> 7 </think> 18", " 18"),
    ],
)
def test_marks_do_not_nest_and_the_last_closing_one_counts(text, rest):
    assert thought_of(OPENED, text).rest == rest
    assert thought_of(QWEN, text).rest == rest
    assert not thought_of(QWEN, text).unfinished


@pytest.mark.parametrize("text", ["7 <think> or", "a </think> 7 <think> or", "<think>a</think>7\n<think>"])
def test_a_thought_opened_again_and_cut_is_unfinished(text):
    assert thought_of(QWEN, text)[1:] == ("", True)


@pytest.mark.parametrize("cut", ["<", "</", "</thi", "</think"])
def test_a_closing_mark_cut_in_the_middle_closes_nothing(cut):
    assert thought_of(OPENED, rf"\boxed{{18}}{cut}")[1:] == ("", True)


def test_an_opening_mark_cut_in_the_middle_is_no_answer_and_one_character_may_be_one():
    assert thought_of(QWEN, "<thi")[1:] == ("", True)
    assert thought_of(QWEN, "\n<think")[1:] == ("", True)
    assert thought_of(QWEN, "<")[1:] == ("<", False)
    assert thought_of(QWEN, "<think less of it")[1:] == ("<think less of it", False)


@pytest.mark.parametrize(
    ("text", "rest", "unfinished"),
    [
        ("<|channel|>analysis<|message|>7? no<|end|><|start|>assistant<|channel|>final<|message|>18", "18", False),
        ("<|channel|>final<|message|>18", "18", False),
        ("<|channel|>analysis<|message|>7? no", "", True),
        ("<|channel|>analysis<|message|>7? no<|end|><|start|>assis", "", False),  # closed, and says nothing
        ("<|channel|>analysis<|message|>7? no<|end|><|start|>assistant<|channel|>fin", "", False),
        (
            "<|channel|>analysis<|message|>f?<|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
            False,
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", "<|channel|>commentary<|message|>I look.<|end|>", False),
    ],
)
def test_channels_of_gpt_oss(text, rest, unfinished):
    assert thought_of("<|start|>assistant", text, [GPT_OSS])[1:] == (rest, unfinished)


@pytest.mark.parametrize(
    ("text", "rest", "unfinished"),
    [
        (" to=self<|message|>7? no<|eom|><|start|>assistant<|message|>18", "18", False),
        ("<|message|>18", "18", False),
        (" to=self<|message|>7? no", "", True),
        (" to=self<|message|>7? no<|eom|><|start|>assis", "", False),
    ],
)
def test_messages_of_a_muse_to_itself(text, rest, unfinished):
    assert thought_of("<|start|>assistant", text, [MUSE])[1:] == (rest, unfinished)


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", "[THINK]", "[/THINK]", "18 ", "\n", "<"])
).map("".join)


def slowly(inside, text):
    """Character by character."""
    marks = {m.opening: (m, True) for m in ALL[:2]} | {m.closing: (m, False) for m in ALL[:2]}
    kept, begins, i = THINK[0] if inside else None, 0, 0
    while i < len(text):
        mark = next((mark for mark in marks if text.startswith(mark, i)), "")
        if mark and marks[mark][1]:
            kept = kept or marks[mark][0]
        elif mark and kept in (None, marks[mark][0]):
            kept, begins = None, i + len(mark)
        i += len(mark) or 1
    return kept is not None, begins


@given(st.booleans(), PIECES)
def test_the_splitter_agrees_with_a_walk_by_character(inside, text):
    open_at_end, begins = slowly(inside, text)
    found = thought_of(OPENED if inside else QWEN, text, ALL[:2])
    if open_at_end:
        assert found.unfinished and found.rest == ""
    elif not found.unfinished:  # else all of it is the beginning of an opening mark
        assert found.rest == text[begins:]
    assert found.unfinished >= open_at_end


@given(PIECES, st.integers(min_value=0, max_value=8))
def test_a_cut_inside_a_thought_is_unfinished_wherever_it_falls(thought, cut):
    whole = thought.replace("</think>", "").replace("[", "") + "</think>"
    if whole.count("</think>") == 1:  # pieces may have formed another one
        assert thought_of(OPENED, whole[: len(whole) - 1 - cut % 8])[1:] == ("", True)
        assert not thought_of(OPENED, whole).unfinished


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<", "</thin", " ", "<|start|>", "<|end|>"])
def test_time_is_linear_in_the_text(piece):
    text = piece * (2_000_000 // len(piece))
    began = time.process_time()
    thought_of("assistant", text, ALL)
    assert time.process_time() - began < patient(5.0)


def test_marks_are_those_of_the_template_and_of_the_vocabulary():
    pytest.importorskip("transformers")
    from tests.family_tokenizers import make_family

    assert marks_of(make_family("llama-3")) == THINK
    gemma4 = "{{ '<|channel>thought\n' + messages[0].reasoning + '\n<channel|>' }}"
    assert [m.closing for m in marks_of(make_family("llama-3", gemma4))] == ["</think>", "<channel|>"]
    strips = "{{ messages[0].content.split('<channel|>')[-1] }}"
    assert [m.closing for m in marks_of(make_family("llama-3", strips))] == ["</think>", "<channel|>"]
    phi = "{{ messages[0].content + '<|end|>' }}"  # ends every turn of Phi, and a thought of gpt-oss
    assert marks_of(make_family("llama-3", phi)) == THINK
    mistral = make_family("llama-3")
    mistral.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    assert [m.closing for m in marks_of(mistral)] == ["</think>", "[/THINK]"]


@pytest.mark.parametrize(
    ("rendered", "closed"),
    [
        (OPENED, QWEN + "<think>\n\n</think>\n\n"),  # as Qwen's templates write it where nothing is to be thought
        (QWEN + "<think>", QWEN + "<think></think>"),  # as GLM's and Nemotron's
        (QWEN, QWEN),
        (QWEN + "<think>\n\n</think>\n\n", QWEN + "<think>\n\n</think>\n\n"),
    ],
)
def test_a_thought_that_the_template_opened_is_closed_as_templates_close_one(rendered, closed):
    assert with_thought_closed(rendered) == closed
    assert not opening_at_end(closed)


def test_an_answer_that_brings_a_thought_does_not_open_it_twice():
    assert continuing("<think>", "<think>\n9+9</think>18") == "9+9</think>18"
    assert continuing("<think>", "9+9</think>18") == "9+9</think>18"
    assert continuing("", "<think>\n9+9</think>18") == "<think>\n9+9</think>18"
