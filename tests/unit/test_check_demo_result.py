"""When the check of the demo says that training helped."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from check_demo_result import Accuracy, verdict


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (Accuracy(0.50, 0.30, 0.02), Accuracy(0.80, 0.70, 0.02), ""),
        (Accuracy(0.945, 0.35, 0.02), Accuracy(0.945, 0.35, 0.02), "rose by +0.000, less than 0.25"),
        (Accuracy(0.945, 0.35, 0.02), Accuracy(1.0, 0.95, 0.01), "rose by +0.055"),
        (Accuracy(0.50, 0.40, 0.02), Accuracy(0.80, 0.30, 0.02), "sampled accuracy fell by 0.100"),
        (Accuracy(0.50, 0.40, 0.05), Accuracy(0.80, 0.39, 0.05), ""),
    ],
)
def test_training_helped_when_the_greedy_accuracy_rose_and_the_sampled_one_did_not_fall(before, after, problem):
    found = verdict(before, after, 0.25)
    assert (problem in found) if problem else not found
