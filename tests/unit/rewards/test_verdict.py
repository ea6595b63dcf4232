"""What a user's reward may return, and what becomes of it."""

from decimal import Decimal

import numpy as np
import pytest
import torch

from roll_async.rewards.verdict import Verdict, verdict_of


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (True, Verdict(score=1.0, acc=1.0)),
        (-0.5, Verdict(score=-0.5, acc=0.0)),
        (np.float32(0.5), Verdict(score=0.5, acc=1.0)),
        (np.isclose(1.0, 2.0), Verdict(score=0.0, acc=0.0)),
        (torch.tensor(0.25), Verdict(score=0.25, acc=1.0)),
        ({"score": 0.5, "acc": np.False_}, Verdict(score=0.5, acc=0.0)),
        ({"score": np.array(0.5), "acc": torch.tensor(0.0)}, Verdict(score=0.5, acc=0.0)),
        ({"score": 1, "f1": np.array(0.75), "who": "me"}, Verdict(score=1.0, acc=1.0, metrics={"f1": 0.75})),
        ({"score": 1, "format": False, "reason": "why"}, Verdict(score=1.0, acc=1.0, format=0.0, reason="why")),
        (Verdict(score=np.float64(2), acc=np.True_), Verdict(score=2.0, acc=1.0)),
    ],
    ids=repr,
)
def test_numbers_of_any_library_are_numbers(said, verdict):
    assert verdict_of(said) == verdict
    assert all(type(x) is float for x in (verdict_of(said).score, verdict_of(said).acc, verdict_of(said).format))


@pytest.mark.parametrize("large", [1e20, -1e40, 10**400, float("inf"), float("nan")], ids=repr)
def test_what_is_no_number_of_float32s_squares_becomes_no_score(large):
    for said in (large, {"score": large}, {"score": 1, "f1": large}, Verdict(score=1, acc=large)):
        with pytest.raises(ValueError, match="must be a finite number, at most 1e\\+15 in size"):
            verdict_of(said)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("1", "not str"),
        (Decimal("0.5"), "not decimal.Decimal"),
        (torch.zeros(2), "not torch.Tensor"),
        ({"acc": 1}, "needs 'score'; it has acc"),
        ({"score": 1, "acc": "0"}, "acc must be a finite number"),
        ({"score": 1, "format": None}, "format must be a finite number"),
        ({"score": np.array([1.0])}, "score must be a finite number"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_by_name(said, error):
    with pytest.raises((TypeError, ValueError), match=error):
        verdict_of(said)
