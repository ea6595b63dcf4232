"""Where tokens of images stand, against Transformers' own count."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_async.prompts.images import laid_out
from roll_async.schema import Image

TOKEN = 9
GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 4))
PARTS = st.lists(st.tuples(st.integers(1, 3), GRIDS), max_size=4)


def row(parts, last):
    """Text of some tokens before each image, `last` of them at the end."""
    tokens = [[1] * text + [TOKEN] * (grid[0] * grid[1]) for text, grid in parts]
    return torch.tensor(sum(tokens, []) + [1] * last), [Image(data=b"", grid=grid) for _, grid in parts]


@pytest.mark.slow
@settings(deadline=None)  # the first example imports Transformers
@given(PARTS, st.integers(1, 4))
def test_positions_are_those_of_transformers(parts, last):
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    tokens, images = row(parts, last)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    )
    model.get_vision_position_ids = modeling.Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    grid = torch.tensor([(1, 2 * image.grid[0], 2 * image.grid[1]) for image in images]).view(-1, 3)
    of_images = (tokens == TOKEN).int()[None]
    theirs, _ = modeling.Qwen2_5_VLModel.get_rope_index(model, tokens[None], of_images, image_grid_thw=grid)
    axes, _ = laid_out(tokens, images, TOKEN)
    assert axes.tolist() == theirs[:, 0].tolist()


@given(PARTS, st.integers(1, 4), st.integers(0, 3))
def test_each_output_of_the_tower_has_one_place_and_image_tokens_beyond_are_text(parts, last, sampled):
    tokens, images = row(parts, last)
    tokens = torch.cat([tokens, torch.full((sampled,), TOKEN)])
    axes, slots = laid_out(tokens, images, TOKEN)
    wanted = sum(image.num_tokens for image in images)
    assert slots[slots >= 0].tolist() == list(range(wanted))
    assert (tokens[slots >= 0] == TOKEN).all()
    # Text moves on by one in all three.
    end = axes[:, len(tokens) - last - sampled :]
    assert (end == end[:1]).all() and (end.diff() == 1).all()


def test_the_worked_example_of_the_docstring():
    tokens, images = row([(1, (2, 2))], 1)
    axes, slots = laid_out(tokens, images, TOKEN)
    assert axes.tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    assert slots.tolist() == [-1, 0, 1, 2, 3, -1]
    with pytest.raises(ValueError, match="4 image tokens for images of 5"):
        laid_out(tokens, [*images, Image(data=b"", grid=(1, 1))], TOKEN)
