"""The arithmetic of a push agrees with what a push would send."""

import math

import pytest

from roll_async.weight_sync.layout import EngineLayout, fragments
from roll_async.weight_sync.traffic import HfTensor, Links, traffic

TENSORS = [
    HfTensor(name="model.embed_tokens.weight", shape=(640, 16)),
    *(
        HfTensor(name=f"model.layers.{i}.{part}.weight", shape=shape)
        for i in range(4)
        for part, shape in [("self_attn.k_proj", (8, 16)), ("mlp.up_proj", (64, 16)), ("mlp.down_proj", (16, 64))]
    ),
    HfTensor(name="model.norm.weight", shape=(16,)),
    HfTensor(name="lm_head.weight", shape=(640, 16)),
]


@pytest.mark.parametrize(("tensor", "num_kv_heads"), [(1, 2), (2, 2), (4, 2)])
def test_what_an_engine_rank_receives_is_what_the_fragments_bring_it(tensor, num_kv_heads):
    layout = EngineLayout(tensor=tensor, num_kv_heads=num_kv_heads)
    push = traffic(TENSORS, layout, trainer_ranks=1, replicas=3, bucket_bytes=1 << 30)
    received = [0] * tensor
    for t in TENSORS:
        for fragment in fragments(layout, t.name, t.shape, None):
            shape = t.shape if fragment.cut is None else fragment.cut.of(t.shape)
            for rank in fragment.ranks:
                received[rank] += math.prod(shape) * t.element_bytes
    assert push.received_most == max(received)
    assert push.sent_most == sum(received), "one trainer rank sends the first replica all that it keeps"


def test_ranks_share_the_sending_and_stages_send_their_own_layers():
    one = traffic(TENSORS, EngineLayout(), trainer_ranks=1, replicas=1, bucket_bytes=1 << 30)
    four = traffic(TENSORS, EngineLayout(), trainer_ranks=4, replicas=1, bucket_bytes=1 << 30)
    staged = traffic(TENSORS, EngineLayout(), trainer_ranks=4, pipeline=2, replicas=1, bucket_bytes=1 << 30)
    assert four.sent_most == math.ceil(one.sent_most / 4)
    assert four.sent_most <= staged.sent_most < 1.2 * four.sent_most, (
        "the stage of embedding or head sends a little more"
    )


def test_a_chain_of_replicas_costs_a_chunk_each_and_not_a_copy_each():
    links = Links(network=1e6, round_s=0.0, chunk_bytes=1000)
    seconds = [
        traffic(TENSORS, EngineLayout(), trainer_ranks=2, replicas=n, bucket_bytes=1 << 30).seconds(links)
        for n in (1, 8)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(7 * 1000 / 1e6)
