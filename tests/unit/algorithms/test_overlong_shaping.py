"""The penalty of one response is the batch's penalty, row by row."""

import pytest

from roll_async.algorithms.overlong import OverlongShaping


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (150, -2.0)])
def test_the_penalty_grows_over_the_buffer_and_stays_there(length, penalty):
    shaping = OverlongShaping(max_length=100, buffer_length=20, factor=2.0)
    assert shaping.penalty(length) == pytest.approx(penalty)


def test_it_agrees_with_the_batch():
    torch = pytest.importorskip("torch")
    from roll_async.algorithms.rewards import overlong_penalty

    lengths = torch.arange(0, 70)
    batch = overlong_penalty(lengths_B=lengths, max_length=50, buffer_length=7, factor=0.5)
    one = OverlongShaping(max_length=50, buffer_length=7, factor=0.5)
    assert batch.tolist() == pytest.approx([one.penalty(n) for n in lengths.tolist()])
