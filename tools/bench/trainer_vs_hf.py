"""Tokens/s of the Megatron trainer against plain Transformers + AdamW: same shapes, same data, one core, in turn.

    python tools/bench/trainer_vs_hf.py [--sizes 1M 10M] [--rounds 5]

One optimizer step each: forward, backward, clip, Adam. The median round of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# layers, hidden, heads, kv heads, ffn, vocabulary, rows, positions, budget
SIZES = {
    "1M": (4, 128, 4, 2, 384, 1024, 8, 128, 0.75),
    "10M": (6, 320, 5, 5, 1024, 4096, 4, 256, 0.9),
    "100M": (12, 768, 12, 4, 2048, 32768, 2, 256, 0.95),
}


def compare(name: str, rounds: int) -> dict:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    torch.set_num_threads(1)
    layers, hidden, heads, kv, ffn, vocabulary, rows, positions, budget = SIZES[name]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        tie_word_embeddings=True,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    tokens = torch.randint(1, vocabulary, (rows, positions))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        worker = MegatronWorker(
            RankSpec(rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, device="cpu"),
            MegatronSettings(
                model_folder=folder,
                dtype="fp32",
                optimizer=OptimizerSettings(learning_rate=1e-4),
                micro_batch_rows=rows,
            ),
        )
        worker.start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    model.train()

    def plain() -> float:
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    lengths = torch.full((rows,), positions)

    def ours() -> float:
        return worker.supervised_update(tokens, lengths, mask)

    times: dict[str, list[float]] = {"plain": [], "ours": []}
    losses = {}
    for _ in range(rounds + 2):
        for label, step in (("plain", plain), ("ours", ours)):
            started = time.perf_counter()
            losses.setdefault(label, step())
            times[label].append(time.perf_counter() - started)
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    speed = {label: rows * positions / statistics.median(seconds[2:]) for label, seconds in times.items()}
    ratio = speed["ours"] / speed["plain"]
    return {
        "name": f"trainer_vs_hf/{name}",
        "value": round(speed["ours"]),
        "unit": "tokens/s",
        "plain_transformers": round(speed["plain"]),
        "ratio": round(ratio, 3),
        "budget": budget,
        "ok": ratio >= budget,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss_difference": abs(losses["plain"] - losses["ours"]),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M"])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for name in args.sizes:
        print(json.dumps(compare(name, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
