"""The bytes and seconds of a weight push for models and clusters that are not here, from bandwidths given.

    python tools/bench/weight_traffic.py [--network-gb-s 50] [--bucket-mib 1024]

Arithmetic of `roll_async/weight_sync/traffic.py` over the shapes of the models; nothing is sent. Half of the devices
train, half generate. `gathered` is a push in which one rank sends the whole model to every replica in turn. Published
for comparison: 671B on 256 devices 2.4 to 2.8 s, a model of 1T 7.2 s (their authors' systems and networks).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from roll_async.weight_sync.layout import EngineLayout  # noqa: E402
from roll_async.weight_sync.traffic import HfTensor, Links, traffic  # noqa: E402


def decoder(*, hidden, layers, heads, kv, head, inner, vocab, experts=0, dense_layers=0, latent=False, shared=0):
    """Tensors of a decoder: grouped-query or latent attention, dense or sparse MLPs (`inner` is an expert's then).
    `dense_layers` begin with an MLP of the width of 9 experts.
    """
    yield HfTensor(name="model.embed_tokens.weight", shape=(vocab, hidden))
    yield HfTensor(name="lm_head.weight", shape=(vocab, hidden))
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield from _attention(layer, hidden, heads, kv, head, latent=latent)
        sparse = experts and i >= dense_layers
        width = inner if sparse or not experts else 9 * inner
        names = [f"{layer}.mlp.experts.{e}" for e in range(experts)] if sparse else [f"{layer}.mlp"]
        names += [f"{layer}.mlp.shared_experts"] if sparse and shared else []
        for name in names:
            yield HfTensor(name=f"{name}.gate_proj.weight", shape=(width, hidden))
            yield HfTensor(name=f"{name}.up_proj.weight", shape=(width, hidden))
            yield HfTensor(name=f"{name}.down_proj.weight", shape=(hidden, width))


def _attention(layer, hidden, heads, kv, head, *, latent) -> Iterator[HfTensor]:
    place = f"{layer}.self_attn"
    if latent:  # DeepSeek-V3's sizes
        yield HfTensor(name=f"{place}.q_a_proj.weight", shape=(1536, hidden))
        yield HfTensor(name=f"{place}.q_b_proj.weight", shape=(heads * 192, 1536))
        yield HfTensor(name=f"{place}.kv_a_proj_with_mqa.weight", shape=(576, hidden))
        yield HfTensor(name=f"{place}.kv_b_proj.weight", shape=(heads * 256, 512))
    else:
        yield HfTensor(name=f"{place}.q_proj.weight", shape=(heads * head, hidden))
        yield HfTensor(name=f"{place}.k_proj.weight", shape=(kv * head, hidden))
        yield HfTensor(name=f"{place}.v_proj.weight", shape=(kv * head, hidden))
    yield HfTensor(name=f"{place}.o_proj.weight", shape=(hidden, heads * head))


MODELS = {
    "7B": dict(hidden=3584, layers=28, heads=28, kv=4, head=128, inner=18944, vocab=152064),
    "32B": dict(hidden=5120, layers=64, heads=40, kv=8, head=128, inner=27648, vocab=152064),
    "235B-A22B": dict(hidden=4096, layers=94, heads=64, kv=4, head=128, inner=1536, vocab=151936, experts=128),
    "671B": dict(hidden=7168, layers=61, heads=128, kv=128, head=128, inner=2048, vocab=129280, experts=256,
                 dense_layers=3, latent=True, shared=1),
    "1T": dict(hidden=7168, layers=61, heads=64, kv=64, head=128, inner=2048, vocab=163840, experts=384,
               dense_layers=1, latent=True, shared=1),
}  # fmt: skip
"""Published sizes of Qwen2.5-7B and -32B, Qwen3-235B-A22B, DeepSeek-V3 and Kimi-K2."""
CASES = [
    ("7B", 16, 1, 1), ("7B", 128, 1, 1), ("32B", 16, 4, 1), ("32B", 256, 4, 1), ("235B-A22B", 64, 8, 4),
    ("235B-A22B", 512, 8, 4), ("671B", 256, 16, 8), ("1T", 256, 32, 8),
]  # fmt: skip
"""Model, devices, tensor-parallel ranks of an engine, pipeline stages of the trainer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network-gb-s", type=float, default=50.0)
    parser.add_argument("--bucket-mib", type=int, default=1024)
    args = parser.parse_args()
    from roll_async.config.processor import machine_line

    print(machine_line(args), flush=True)
    links = Links(network=args.network_gb_s * 1e9)
    for model, devices, tensor, pipeline in CASES:
        sizes = MODELS[model]
        ranks = devices // 2
        push = traffic(
            decoder(**sizes),
            EngineLayout(tensor=tensor, num_kv_heads=sizes["kv"]),
            trainer_ranks=ranks,
            pipeline=pipeline,
            replicas=max(1, ranks // tensor),
            bucket_bytes=(args.bucket_mib << 20) * ranks,
        )
        line = {
            "name": f"weight_traffic {model} on {devices} devices, engines of {tensor}",
            "value": round(push.seconds(links), 2), "unit": "s", "model_gb": round(push.model_bytes / 1e9),
            "replicas": push.replicas, "sent_most_gb": round(push.sent_most / 1e9, 2),
            "received_most_gb": round(push.received_most / 1e9, 2), "gathered_gb": round(push.gathered_bytes / 1e9),
            "gathered_s": round(push.gathered_bytes / links.network, 1), "network_gb_s": args.network_gb_s,
        }  # fmt: skip
        print(json.dumps(line))


if __name__ == "__main__":
    main()
