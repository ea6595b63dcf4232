"""Where the answer of a response stands, and that finding it never takes long."""

import time

import pytest

from roll_async.rewards.answers import after_thinking, final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {7}", "7"),
        ("**Answer:** $12$", "$12$"),
        ("The final answer is: 1/2", "1/2"),
        ("the answer = 9", "9"),
        ("Answer:\n5", None),
        ("<answer> Paris </answer>", "Paris"),
        ("My answer: 3 is a guess", None),
        ("Answer: 1\nAnswer: 2\n", "2"),
        ("<think>Answer: 1", None),
        ("a</think>b</think>Answer: 4", "4"),
        ("Answer: 5 \\boxed{6", "5 \\boxed{6"),
    ],
)
def test_the_last_statement_counts(text, answer):
    assert final_answer(text) == answer


def test_thinking_that_never_ends_leaves_no_answer():
    assert after_thinking(" <think> hm \\boxed{1}") == ""
    assert after_thinking("<think>x</think> y") == " y" and after_thinking("plain") == "plain"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30_000,
        "{" * 200_000 + "\\boxed{1",
        "\\boxed" + " " * 200_000,
        "\n" * 200_000,
        "* " * 100_000,
        "answer " * 40_000,
        "Answer:" + "*" * 200_000,
        "<answer>" * 30_000,
        "</think>" * 30_000,
    ],
)
def test_finding_the_answer_is_linear_in_whatever_the_model_wrote(text):
    started = time.process_time()
    final_answer(text)
    last_boxed(text)
    assert time.process_time() - started < 1.0
