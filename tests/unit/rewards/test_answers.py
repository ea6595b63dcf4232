"""Where the answer of a response stands, and that finding it never takes long."""

import time
from typing import get_args

import pytest

from roll_async.config.schema_rollout import RewardConfig
from roll_async.observe.thoughts import thought_of
from roll_async.rewards.answers import ANSWER_FORMATS, after_thinking, final_answer, split_parts
from roll_async.rewards.serving.first_answers import NUM_FIRST, FirstAnswers
from roll_async.schema import Reward, RewardStatus
from tests.patience import patient


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7", "7"),
        ("**Answer:**\n\n- 5", "5"),
        ("Answer:\n> 5 m", "5 m"),
        ("Answer:\n-5", "-5"),
        ("Answer: - 5", "- 5"),
        (r"so $\boxed 7$.", "7"),
        (r"\boxed 7/2 it is", "7/2"),
        (r"\boxed{5} \boxed{}", "5"),
        ("x\n\n__Answer__: 5", "5"),
        ("The answer should be 8.", "8"),
        ("The answer is 8, not 7.", "8"),
        (r"<answer>So the answer is \frac{1}{2}.</answer>", r"\frac{1}{2}"),
        ("<answer> 5</answer> No, the answer is 6.", "6"),
        ("**Answer:** $12$", "$12$"),
        ("The final answer is: 1/2", "1/2"),
        ("the answer = 9", "9"),
        ("Answer:\n5", "5"),
        ("**Answer:**\n\n$12$", "$12$"),
        ("Answer:\n\\[\n12\n\\]\nbye", "12"),
        ("## Final Answer\n\n18", "18"),
        ("1. First\n2. **Answer:** 18", "18"),
        ("3) Answer: 18", "18"),
        ("We add them. Answer: 18", "18"),
        ("It is 9 + 9. So the final answer: 18", "18"),
        ("no question and answer: here", None),
        ("we divide.\n#### 18", "18"),
        ("#### 1,080\nI hope this helps.", "1,080"),
        ("#### Step 1\nadd\n#### Step 2\nAnswer: 7", "7"),
        ("#### Conclusion\nThere is none.", None),
        ("So the answer is 18.", "18"),
        ("The answer is $12.50 because it is half.", "$12.50"),
        ("the answer to the question is \\(x=3\\). Done.", "\\(x=3\\)"),
        ("the correct answer is **Paris**, which is large", "Paris"),
        ("Answer: 3\nThe answer is a prime.", "3"),
        ("Answer: 3\nNo, the answer is 4.", "4"),
        ("so 3 + 4 = 7", None),
        ("\\boxed{1}, \\boxed{2}", "1, 2"),
        ("$\\boxed{1}$ or $\\boxed{1}$", "1"),
        ("first \\boxed{1} and then x = \\boxed{2}", "2"),
        ("<answer>x < 5</answer>", "x < 5"),
        ("<answer></answer>", None),
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


ONE_OF_EACH = "the answer is 6\n<answer>3</answer>\nAnswer: 4\n#### 5\n\\boxed{1} 7"


@pytest.mark.parametrize(
    ("answer_format", "answer"),
    [
        ("auto", "1"),
        ("boxed", "1"),
        ("answer_line", "4"),
        ("hashes", "5"),
        ("tag", "3"),
        ("the_answer_is", "6"),
        ("last_number", "7"),
    ],
)
def test_a_format_that_was_chosen_is_the_only_one_read(answer_format, answer):
    assert final_answer(ONE_OF_EACH, answer_format) == answer
    assert final_answer("nothing", answer_format) is None
    assert final_answer(f"<think>{ONE_OF_EACH}", answer_format) is None


def test_the_formats_are_those_of_the_config():
    assert get_args(RewardConfig.__annotations__["answer_format"]) == ANSWER_FORMATS
    with pytest.raises(ValueError, match="answer_format 'box' is not one of auto | boxed"):
        final_answer("", "box")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 * 3 = 21.", "21"),
        ("it costs $1,234.50", "1,234.50"),
        ("from 5 to -3", "-3"),
        ("10-3", "3"),
        ("half is 1/2!", "1/2"),
        ("x5", None),
        ("in 1,2,3", "3"),
        ("so \u22127", "-7"),
    ],
)
def test_the_last_number_is_read_whole(text, number):
    assert final_answer(text, "last_number") == number


def test_a_chosen_format_may_hold_a_box():
    assert final_answer("<answer>so \\boxed{5}</answer>", "tag") == "5"
    assert final_answer("#### $\\boxed{5}$", "hashes") == "5"


def test_a_tag_that_its_stop_string_closed_is_read_to_the_end_of_its_line():
    for form in ("auto", "tag"):
        assert final_answer("The answer is 3.\nNo: <answer>4", form) == "4"
        assert final_answer("<answer>4</answer>, in <answer> tags", form) == "4"
        assert final_answer("<answer>\nso \\boxed{4}\n", form) == "4"
        assert final_answer("Answer: <answer>4", form) == "4" and final_answer("<answer>", "tag") is None


@pytest.mark.parametrize("answer", ["So the answer is 4.", "1 + 3 = 4.\n#### 4", "Answer: 4"])
@pytest.mark.parametrize(
    "mention", ["I put it in <answer> tags.", "(The `<answer>` tag is not needed.)", "(No <answer>.)"]
)
def test_a_tag_that_is_only_mentioned_states_nothing(answer, mention):
    assert final_answer(f"{answer}\n{mention}") == final_answer(f"{mention}\n{answer}") == "4"


@pytest.mark.parametrize(("num_parts", "answer"), [(1, "4"), (2, "3, 4"), (3, "2, 3, 4"), (9, "1, 2, 3, 4")])
def test_as_many_boxes_are_joined_as_the_reference_has_parts(num_parts, answer):
    text = "a = \\boxed{1}; b = \\boxed{2}; c = \\boxed{3}; d = \\boxed{4}"
    assert final_answer(text, "auto", num_parts) == final_answer(text, "boxed", num_parts) == answer
    whole = text + " so \\boxed{(1, 2), 3 \\text{ and } \\{4, 5\\}, 6, 7, 8, 9, 10, 11}"
    assert final_answer(whole, "auto", num_parts).startswith("(1, 2), 3"), "it has as many parts"


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("(1, 2)", ["(1, 2)"]),
        ("1, 2", ["1", "2"]),
        ("\\{1, 2\\}", ["1", "2"]),
        ("(1,2), [3,4]", ["(1,2)", "[3,4]"]),
        ("1 \\text{ and } 2", ["1", "2"]),
        ("x=1 or x=2", ["x=1", "x=2"]),
        ("\\frac{1}{2}", ["\\frac{1}{2}"]),
        ("", []),
    ],
)
def test_parts_of_a_reference(answer, parts):
    assert split_parts(answer) == parts


def watched(texts, watch, **metrics):
    reward = Reward(score=0.0, metrics=metrics)
    return [notice for text in texts if (notice := watch.look(thought_of("", text), reward))]


def test_the_user_is_told_once_when_no_first_response_holds_a_readable_answer():
    watch = FirstAnswers("math", "boxed")
    notices = watched(["we get #### 18"] * (3 * NUM_FIRST), watch, format=0.0)
    assert len(notices) == 1
    assert "rewards.math: the first 16 scored responses" in notices[0] and "'we get #### 18'" in notices[0]
    assert "rewards.math.answer_format: auto would read 16 of them" in notices[0]


def test_one_readable_answer_or_a_failed_judgement_is_no_reason_to_speak():
    watch = FirstAnswers("math", "boxed")
    assert not watched(["x"] * (NUM_FIRST - 1), watch, format=0.0)
    assert watch.look(thought_of("", "y"), Reward(score=0.0, status=RewardStatus.TIMEOUT)) == ""
    assert not watched(["x"], watch, format=1.0) and not watched(["x"] * NUM_FIRST, watch, format=0.0)


def test_the_notice_of_a_reward_without_formats_names_no_key():
    notices = watched(["no code"] * NUM_FIRST, FirstAnswers("code", "auto", reads_answers=False), format=0.0)
    assert len(notices) == 1 and "answer_format" not in notices[0] and "'no code'" in notices[0]


def test_the_notice_of_first_responses_cut_inside_their_thoughts_says_so_and_counts_no_answer_of_a_thought():
    texts = ["<think>It is \\boxed{17}"] * NUM_FIRST
    (notice,) = watched(texts, FirstAnswers("math", "boxed"), format=0.0)
    assert "16 end inside a thought" in notice and "response_length" in notice and "would read" not in notice


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
        "#" * 200_000,
        "####\n" * 40_000,
        "answer is . " * 16_000,
        "the answer is\n" * 14_000,
        "\nAnswer:" * 25_000,
        "1" + ",234" * 50_000 + "5",
        "1" * 200_000,
        "\\boxed{1}" * 20_000,
        "<answer>x" * 20_000 + "</answer>",
    ],
)
def test_finding_the_answer_is_linear_in_whatever_the_model_wrote(text):
    started = time.process_time()
    for answer_format in ANSWER_FORMATS:
        final_answer(text, answer_format, 3)
    assert time.process_time() - started < patient(2.0)
