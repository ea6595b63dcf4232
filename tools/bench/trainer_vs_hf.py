"""Tokens/s of the Megatron trainer against plain Transformers + AdamW: same model, same rows, one core, in turn.

    python tools/bench/trainer_vs_hf.py [--sizes 1M 10M 100M] [--modes fixed dynamic packed packed_even lora]
        [--rounds 9]

One optimizer step each: forward, backward, clip, Adam. `fixed`: rows of one length, the budget's case. `dynamic` and
`packed`: rows of different lengths; plain Transformers pads all of them to the longest, in micro-batches of the same
number of rows. `packed_even`: packed rows of one length, to be compared with `fixed`. `lora`: as `fixed`, ours with
adapters of rank 8 on all linear layers, plain Transformers still with all parameters. Only real tokens count. The
median round of each side counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One model and the rows it trains on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    rows: int
    positions: int
    """Length of the longest row."""
    micro_batch_rows: int
    budget: float


SIZES = {
    "1M": Size(layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocabulary=1024, rows=16, positions=128,
               micro_batch_rows=8, budget=0.75),
    "10M": Size(layers=6, hidden=320, heads=5, kv_heads=5, ffn=1024, vocabulary=4096, rows=8, positions=256,
                micro_batch_rows=4, budget=0.9),
    "100M": Size(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048, vocabulary=32768, rows=4, positions=256,
                 micro_batch_rows=2, budget=0.95),
}  # fmt: skip
MODES = ("fixed", "dynamic", "packed", "packed_even", "lora")


def compare(name: str, mode: str, rounds: int) -> dict:
    """One line of the report."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = SIZES[name]
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        tie_word_embeddings=True,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    lengths = torch.full((size.rows,), size.positions)
    if mode in ("dynamic", "packed"):
        # As the answers to one batch of prompts come: a few long, most of them much shorter.
        lengths = (size.positions * torch.linspace(0.15, 1.0, size.rows) ** 2).long().clamp(min=8)
        lengths[-1] = size.positions
        lengths = lengths[torch.randperm(size.rows)]
    tokens = torch.randint(1, size.vocabulary, (size.rows, size.positions))
    inside = torch.arange(size.positions)[None] < lengths[:, None]
    tokens = torch.where(inside, tokens, 0)
    ours = _ours(model, size, mode, tokens, lengths, inside)
    plain = _plain(model, size, tokens, inside)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    losses: dict[str, float] = {}
    for _ in range(rounds + 2):
        for label, step in (("plain", plain), ("ours", ours)):
            started = time.perf_counter()
            losses.setdefault(label, step())
            times[label].append(time.perf_counter() - started)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    speed = {label: int(lengths.sum()) / statistics.median(seconds[2:]) for label, seconds in times.items()}
    ratio = speed["ours"] / speed["plain"]
    return {
        "name": f"trainer_vs_hf/{name}/{mode}",
        "value": round(speed["ours"]),
        "unit": "tokens/s",
        "plain_transformers": round(speed["plain"]),
        "ratio": round(ratio, 3),
        "budget": size.budget,
        "ok": ratio >= size.budget,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss_difference": abs(losses["plain"] - losses["ours"]),
        "rounds": rounds,
    }


def _ours(model, size: Size, mode: str, tokens, lengths, inside) -> Callable[[], float]:
    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    mask = inside.clone()
    mask[:, 0] = False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        worker = MegatronWorker(
            RankSpec.alone(),
            MegatronSettings(
                model_folder=folder,
                dtype="fp32",
                optimizer=OptimizerSettings(learning_rate=1e-4),
                micro_batch_rows=size.micro_batch_rows,
                micro_batching="fixed" if mode == "lora" else mode.removesuffix("_even"),
                lora_rank=8 if mode == "lora" else 0,
                lora_alpha=16.0,
                max_tokens_per_microbatch=size.micro_batch_rows * size.positions,
            ),
        )
        worker.start()
    return lambda: worker.supervised_update(tokens, lengths, mask)


def _plain(model, size: Size, tokens, inside) -> Callable[[], float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    model.train()
    labels = torch.where(inside, tokens, -100)
    count = int((labels[:, 1:] != -100).sum())

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, size.rows, size.micro_batch_rows):
            part = slice(start, start + size.micro_batch_rows)
            logits = model(tokens[part], attention_mask=inside[part].long(), use_cache=False).logits[:, :-1]
            target = labels[part, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / count
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    for name in args.sizes:
        for mode in args.modes:
            print(json.dumps(compare(name, mode, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
