"""The ablation of DAPO: what each variant leaves out, and its figures at equal steps and equal time."""

import argparse
import sys
from pathlib import Path

import pytest

from roll_async.config.api import load

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))
import dapo_ablation as bench

ARGS = argparse.Namespace(
    steps=30, seeds=3, prompts=16, response=30, rate=3e-4, assets="output/demo_assets", output="output/x"
)


def test_each_variant_differs_from_the_whole_in_its_own_part_alone():
    whole, *others = (
        load(str(ROOT / "configs" / "dapo_cpu.yaml"), bench.overrides_of(variant, 0, ARGS), "rlvr").algorithm
        for variant in bench.VARIANTS
    )
    assert (whole.pg_options.clip_low, whole.pg_options.clip_high) == (0.2, 0.28)
    assert whole.filter_groups.enable and whole.loss_agg_mode == "token-mean" and whole.overlong_buffer.enable
    clip, sampling, mean, shaping = others
    assert clip.pg_options.clip_high == 0.2 and clip.filter_groups == whole.filter_groups
    assert not sampling.filter_groups.enable and sampling.pg_options == whole.pg_options
    assert mean.loss_agg_mode == "seq-mean-token-mean" and mean.pg_options == whole.pg_options
    assert not shaping.overlong_buffer.enable and shaping.loss_agg_mode == "token-mean"


def test_several_optimizer_steps_are_taken_of_a_batch():
    config = load(str(ROOT / "configs" / "dapo_cpu.yaml"), bench.overrides_of("full", 0, ARGS), "rlvr")
    assert config.mini_batches_per_batch == 4


@pytest.mark.parametrize(("seconds", "wanted"), [(5.0, 0.2), (10.0, 0.2), (15.0, 0.4), (20.0, 0.6), (99.0, 0.6)])
def test_the_accuracy_at_a_time_lies_between_two_validations(seconds, wanted):
    assert bench.accuracy_at([[5, 10.0, 0.2], [10, 20.0, 0.6]], seconds) == pytest.approx(wanted)


def test_equal_time_is_that_of_the_fastest_variant_of_the_same_seed_without_validations():
    def run(step_s, validation_s, accuracies):
        keys = {"trainer/optimizer_steps": 4.0, "groups/filtered": 3.0, "groups/admitted": 12.0, "policy/entropy": 0.5}
        return bench.row_of(
            [
                {"step": n, "time/step_s": step_s + validation_s, "time/validation_s": validation_s,
                 "validation/accuracy": a, **keys}
                for n, a in enumerate(accuracies, 1)
            ]
        )  # fmt: skip

    rows = [
        {"variant": "full", "seed": 0, **run(2.0, 50.0, [0.0, 0.4, 0.8])},
        {"variant": "without dynamic sampling", "seed": 0, **run(1.0, 0.0, [0.2, 0.3, 0.5])},
        {"variant": "full", "seed": 1, **run(1.0, 0.0, [0.1, 0.2, 0.6])},
    ]
    assert rows[0]["seconds"] == 6.0 and rows[0]["filtered_share"] == 0.25
    assert bench.equal_time(rows, rows[0]) == pytest.approx(0.2), "three seconds are half way to its second validation"
    assert bench.equal_time(rows, rows[2]) == pytest.approx(0.6)
    full, _, sampling, *_ = bench.table(rows).splitlines()[2:]
    assert "| 2 | 0.700 +- 0.141 | 0.400 +- 0.283 |" in full and "0.5000 +- 0.0000" in full
    assert "| 1 | 0.500 +- nan |" in sampling
