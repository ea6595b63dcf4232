"""Rows with images on Megatron ranks: the certificate's log-probs, gradients, step and resume in more layouts, a rank
that sees no image, a frozen tower, and what is refused.
"""

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

import megatron_cases as cases
import tiny_families

from roll_async.checkpoint.conversion import ConversionOptions, megatron_to_hf
from roll_async.commands.certify import rank_side

VOCABULARY = 96
PACKED = {"micro_batching": "packed", "max_tokens_per_microbatch": 60}
FULL = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
OVERLAPPED = {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    (2, {"parallel": {"tensor": 2}}),
    (2, {"parallel": {"context": 2}}),
    (2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    (2, {"optimizer": OVERLAPPED}),
    (1, FULL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_families.save_tiny("qwen2.5-vl", folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_rank(rank_pool, folder, tmp_path_factory):
    """What one rank measures, and the checkpoint that it leaves."""
    checkpoint = str(tmp_path_factory.mktemp("checkpoint") / "saved")
    return measured(rank_pool, folder, 1, {}, checkpoint), checkpoint


def measured(rank_pool, folder, world_size, layout, checkpoint):
    settings = cases.settings_of(folder, mini_batch_rows=rank_side.ROWS, **PACKED, **layout)
    return rank_pool.run(
        rank_side.measure, world_size, settings=settings, vocabulary=VOCABULARY, checkpoint=checkpoint
    )[0]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_rows_with_images_take_the_same_step_in_every_layout(rank_pool, folder, one_rank, world_size, layout, tmp_path):
    expected, checkpoint = one_rank
    # One rank would write its own.
    found = measured(rank_pool, folder, world_size, layout, checkpoint if world_size > 1 else str(tmp_path / "own"))
    assert not found.unequal
    moved = float((expected.after - expected.before).abs().max())
    cases.assert_near(found.before, expected.before, cases.BOUNDS.forward)
    cases.assert_near(found.grad_norm, expected.grad_norm, cases.BOUNDS.step)
    cases.assert_near(found.after, expected.after, cases.BOUNDS.moved, of=moved)
    cases.assert_near(found.resumed, expected.resumed, cases.BOUNDS.moved, of=moved)


def test_a_rank_whose_rows_have_no_image_takes_the_same_step_and_does_not_wait(rank_pool, folder):
    found = [
        rank_pool.run(cases.steps_with_one_image, world_size, settings=cases.settings_of(folder, **PACKED, **layout))[0]
        for world_size, layout in ((1, {}), (2, {"optimizer": OVERLAPPED}))
    ]
    (one, trained), (two, of_two) = found
    cases.assert_near(two[0]["trainer/grad_norm"], one[0]["trainer/grad_norm"], cases.BOUNDS.step)
    cases.assert_near(two[1]["trainer/grad_norm"], one[1]["trainer/grad_norm"], cases.BOUNDS.moved)
    assert trained == of_two and any(name.startswith("visual.") for name in trained)


def test_a_frozen_tower_stays_and_the_language_model_learns(rank_pool, folder):
    settings = cases.settings_of(folder, frozen=("visual",), **PACKED, optimizer={"overlap_grad_reduce": True})
    _, trained = rank_pool.run(cases.steps_with_one_image, 1, settings=settings)[0]
    assert trained and not any(name.startswith("visual.") for name in trained)


def test_padded_rows_with_images_are_refused(rank_pool, folder):
    with pytest.raises(RuntimeError, match="micro_batching=fixed .* set micro_batching: packed"):
        rank_pool.run(cases.steps_with_one_image, 1, settings=cases.settings_of(folder))


def test_a_critic_of_such_a_model_is_saved_converted_and_read_back(rank_pool, folder, tmp_path):
    settings = cases.settings_of(folder, with_value_head=True, parallel={"pipeline": 2}, **PACKED)
    places = {"folder": str(tmp_path / "step"), "export": str(tmp_path / "export")}
    values = rank_pool.run(cases.critic_export, 2, settings=settings, **places)[0]
    assert values.abs().max() > 1e-3, "an untrained head says zero"
    megatron_to_hf(tmp_path / "step", tmp_path / "converted", ConversionOptions())
    for name in ("export", "converted"):
        settings = cases.settings_of(str(tmp_path / name), with_value_head=True, **PACKED)
        cases.assert_near(
            rank_pool.run(cases.critic_values, 1, settings=settings)[0], values, cases.BOUNDS.forward, of=1.0
        )
