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


def test_a_right_answer_at_the_limit_scores_0_and_a_wrong_one_the_least_in_every_dapo_config():
    from pathlib import Path

    from roll_async.config.api import load

    files = sorted((Path(__file__).resolve().parents[3] / "configs").glob("*dapo*.yaml"))
    shapings = {file.name: OverlongShaping.of(load(file)) for file in files}
    shapings = {name: shaping for name, shaping in shapings.items() if shaping is not None}
    assert {"dapo_cpu.yaml", "dapo_qwen2.5_32b.yaml", "async_dapo_7b.yaml"} <= shapings.keys()
    for name, shaping in shapings.items():
        assert shaping.shaped(1.0, shaping.max_length) == pytest.approx(0), name
        assert shaping.shaped(0.0, shaping.max_length) == shaping.shaped(0.0, 1) - shaping.factor, name
