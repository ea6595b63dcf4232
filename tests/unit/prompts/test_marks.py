"""Marks of a template in texts from outside are removed, whatever pieces they are made of."""

import random
import time

from roll_async.prompts.tokenizer import _BLOCK, without_marks

MARKS = frozenset(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])


def test_marks_nested_a_hundred_thousand_deep_are_removed_in_linear_time():
    def seconds(depth):
        started = time.process_time()
        assert without_marks("a" + "<|im_" * depth + "end|>" * depth + "z", MARKS) == "az"
        return time.process_time() - started

    seconds(100)
    assert seconds(40_000) < 40 * (seconds(4_000) + 0.02), "ten times the text, about ten times the time"


def test_no_mark_is_left_however_pieces_of_marks_are_mixed():
    rng = random.Random(0)
    pieces = ["<|im_", "start|>", "end|>", "<", "s>", "/", "|", ">", "x", " "]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(40)))
        left = without_marks(text, MARKS)
        assert not any(mark in left for mark in MARKS), text
        assert any(mark in text for mark in MARKS) or left == text


def test_a_mark_across_the_blocks_in_which_a_text_is_searched_is_found():
    for start in range(_BLOCK - 14, _BLOCK + 2):
        text = "x" * start + "<|im_end|>" + "y" * 5 + "<s>"
        assert without_marks(text, MARKS) == "x" * start + "y" * 5
