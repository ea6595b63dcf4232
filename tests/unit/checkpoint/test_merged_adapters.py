"""A small adapter added to bfloat16 weights."""

import pytest

torch = pytest.importorskip("torch")

from roll_async.checkpoint.lora import merged


def test_rounding_by_chance_keeps_sums_and_what_bfloat16_holds_exactly():
    torch.manual_seed(0)
    weight = torch.randn(256, 256).bfloat16()
    delta = 1e-4 * torch.randn(256, 256).abs()
    found = merged(weight, delta, "layer.weight")
    assert found.dtype == torch.bfloat16
    kept = float((found.float() - weight.float()).sum() / delta.sum())
    nearest = float(((weight.float() + delta).bfloat16().float() - weight.float()).sum() / delta.sum())
    assert kept == pytest.approx(1, abs=0.1) and nearest < 0.5
    rows = ((found.float() - weight.float()).sum(1), delta.sum(1))
    assert float(torch.corrcoef(torch.stack(rows))[0, 1]) > 0.1
    assert (merged(weight, torch.zeros(256, 256), "layer.weight") == weight).all()


def test_the_draw_belongs_to_the_name():
    weight, delta = torch.ones(4, 64).bfloat16(), torch.full((4, 64), 1e-3)
    first, again, other = (merged(weight, delta, name) for name in ("a.weight", "a.weight", "b.weight"))
    assert (first == again).all() and not (first == other).all()
    assert set(first.float().unique().tolist()) == {1.0, 1.0078125}


def test_float32_weights_get_the_plain_sum():
    weight, delta = torch.randn(3, 5), torch.randn(3, 5)
    assert (merged(weight, delta, "a.weight") == weight + delta).all()


def test_parts_of_a_tensor_draw_as_the_whole_does():
    weight, delta = torch.ones(6, 8).bfloat16(), torch.full((6, 8), 1e-3)
    whole = merged(weight, delta, "a.weight")
    places = torch.arange(48, dtype=torch.int32).view(6, 8)
    parts = [merged(weight[rows], delta[rows], "a.weight", places[rows]) for rows in (slice(0, 2), slice(2, 6))]
    assert (torch.cat(parts) == whole).all()
