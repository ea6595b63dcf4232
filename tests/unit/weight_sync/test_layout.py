"""Who receives what: every engine rank exactly what it keeps, from whoever holds it, and every byte once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_async.weight_sync.layout import Cut, EngineLayout, fragments
from roll_async.weight_sync.transfer import TensorPart, plan_blocks

HEAD = 4
DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


def model(num_heads, num_kv_heads, vocabulary):
    """{name: (shape, dimension that the trainer splits or None)}."""
    hidden, inner = 8, 16 * num_heads
    rows = {"q_proj": num_heads * HEAD, "k_proj": num_kv_heads * HEAD, "v_proj": num_kv_heads * HEAD}
    names = {f"model.layers.0.self_attn.{p}.weight": ((n, hidden), 0) for p, n in rows.items()}
    names |= {f"model.layers.0.self_attn.{p}.bias": ((n,), 0) for p, n in rows.items()}
    names["model.layers.0.self_attn.o_proj.weight"] = ((hidden, num_heads * HEAD), 1)
    names["model.layers.0.mlp.experts.3.gate_proj.weight"] = ((inner, hidden), 0)
    names["model.layers.0.mlp.experts.3.down_proj.weight"] = ((hidden, inner), 1)
    names["model.layers.0.input_layernorm.weight"] = ((hidden,), None)
    names["model.embed_tokens.weight"] = ((vocabulary, hidden), 0)
    names["model.layers.0.something_new.weight"] = ((inner, hidden), 0)
    return names


def held_by(shape, dim, rank, size):
    """The trainer's cut of a tensor; None where it is not split."""
    if dim is None or size == 1 or shape[dim] % size:
        return None
    step = shape[dim] // size
    return Cut(dim=dim, start=rank * step, stop=(rank + 1) * step)


@settings(max_examples=60, deadline=None)
@given(
    trainer=st.sampled_from([1, 2, 4]),
    engine=st.sampled_from([1, 2, 4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocabulary=st.sampled_from([128, 100, 63]),
    block_bytes=st.sampled_from([64, 500, 1 << 20]),
    expert_parallel=st.booleans(),
)
def test_each_engine_rank_gets_what_it_keeps_once_whatever_the_two_layouts(
    trainer, engine, num_kv_heads, vocabulary, block_bytes, expert_parallel
):
    layout = EngineLayout(tensor=engine, num_kv_heads=num_kv_heads, expert_parallel=expert_parallel)
    for name, (shape, dim) in model(8, num_kv_heads, vocabulary).items():
        truth = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        arrived = [torch.zeros(shape, dtype=torch.int64) for _ in range(engine)]
        split = held_by(shape, dim, 0, trainer) is not None
        for source in range(trainer if split else 1):
            cut = held_by(shape, dim, source, trainer)
            tensor = truth if cut is None else truth.narrow(cut.dim, cut.start, cut.stop - cut.start)
            part = TensorPart(name=name, shape=shape, cut=cut, tensor=tensor)
            for planned in plan_blocks([part], layout, block_bytes):
                for slot, values in planned:
                    place = slot.cut or Cut(dim=0, start=0, stop=shape[0])
                    expected = truth.narrow(place.dim, place.start, place.stop - place.start)
                    assert torch.equal(values, expected), "a slot says which part it holds"
                    for rank in slot.ranks:
                        arrived[rank].narrow(place.dim, place.start, place.stop - place.start).add_(1)
        for rank, counts in enumerate(arrived):
            kept = layout.kept(name, shape, rank)
            wanted = torch.ones(shape, dtype=torch.int64)
            if kept is not None and (dim is None or not split or kept.dim == dim):
                wanted.zero_().narrow(kept.dim, kept.start, kept.stop - kept.start).fill_(1)
            assert torch.equal(counts, wanted), (name, rank, kept)


def test_an_engine_with_fewer_key_value_heads_than_ranks_gives_neighbours_the_same_head():
    layout = EngineLayout(tensor=4, num_kv_heads=2)
    cuts = [layout.kept("model.layers.0.self_attn.k_proj.weight", (8, 16), rank) for rank in range(4)]
    assert [(c.start, c.stop) for c in cuts] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_the_vocabulary_is_split_after_padding_to_sixty_four_and_nobody_receives_padding():
    layout = EngineLayout(tensor=2)
    cuts = [layout.kept("lm_head.weight", (100, 4), rank) for rank in range(2)]
    assert [(c.start, c.stop) for c in cuts] == [(0, 64), (64, 100)]


def test_a_tensor_cut_along_another_dimension_goes_to_all_ranks_as_it_is():
    held = Cut(dim=1, start=0, stop=4)
    found = fragments(EngineLayout(tensor=2), "model.layers.0.mlp.up_proj.weight", (8, 8), held)
    assert [(f.cut, f.ranks) for f in found] == [(held, (0, 1))]


def test_bytes_to_an_engine_of_two_ranks_are_little_more_than_one_copy_of_the_model():
    layout, total, received = EngineLayout(tensor=2, num_kv_heads=8), 0, 0
    for name, (shape, _) in model(8, 8, 128).items():
        if "something_new" in name:
            continue
        total += torch.Size(shape).numel()
        for fragment in fragments(layout, name, shape, None):
            part = shape if fragment.cut is None else fragment.cut.of(shape)
            received += len(fragment.ranks) * torch.Size(part).numel()
    assert total <= received < 1.01 * total
