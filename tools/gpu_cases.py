"""Small cases of tools/gpu_suite.py that run through code no CPU reaches: each prints one JSON object.

    python tools/gpu_cases.py moe|resume [--device cuda|cpu]

moe: steps of a tiny mixture-of-experts model, bf16, whose loss must fall.
resume: with optimizer_cpu_offload, two steps, a checkpoint and two more; a second trainer loads it and must take the
same two.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_trainer import free_port, make_rows, train_mask

VOCABULARY, LONGEST, TOKENS = 512, 64, 512
RESUME_BUDGET = 1e-3
"""Of the loss: sums of one GPU may differ in order from run to run."""


def write_tiny(folder: str, *, experts: bool) -> None:
    """A random checkpoint of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
        "dtype": "bfloat16",
    }  # fmt: skip
    if experts:
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **more, norm_topk_prob=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    model.bfloat16().save_pretrained(folder)


def start(folder: str, device: str, *, cpu_offload: bool = False):
    """A trainer on rows that are packed."""
    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    worker = MegatronWorker(
        RankSpec(rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), device=device),
        MegatronSettings(
            model_folder=folder,
            optimizer=OptimizerSettings(learning_rate=1e-3, cpu_offload=cpu_offload),
            micro_batching="packed",
            max_tokens_per_microbatch=TOKENS // 2,
            mini_batch_rows=TOKENS,
        ),
    )
    worker.start()
    return worker


def moe(device: str, scratch: str) -> dict:
    write_tiny(scratch, experts=True)
    tokens, lengths = make_rows(LONGEST, TOKENS, VOCABULARY)
    worker = start(scratch, device)
    losses = [worker.supervised_update(tokens, lengths, train_mask(tokens, lengths)) for _ in range(4)]
    worker.stop()
    return {"ok": all(map(math.isfinite, losses)) and losses[-1] < losses[0], "unit": "nat", "losses": losses}


def resume(device: str, scratch: str) -> dict:
    write_tiny(f"{scratch}/model", experts=False)
    tokens, lengths = make_rows(LONGEST, TOKENS, VOCABULARY)
    mask = train_mask(tokens, lengths)
    worker = start(f"{scratch}/model", device, cpu_offload=True)
    losses = [worker.supervised_update(tokens, lengths, mask) for _ in range(2)]
    worker.save(f"{scratch}/checkpoint", 2, b"")
    losses += [worker.supervised_update(tokens, lengths, mask) for _ in range(2)]
    worker.stop()
    worker = start(f"{scratch}/model", device, cpu_offload=True)
    worker.load(f"{scratch}/checkpoint")
    again = [worker.supervised_update(tokens, lengths, mask) for _ in range(2)]
    worker.stop()
    difference = max(abs(a - b) for a, b in zip(losses[2:], again, strict=True))
    return {
        "ok": difference <= RESUME_BUDGET and losses[-1] < losses[0],
        "value": difference,
        "unit": "nat",
        "budget": RESUME_BUDGET,
        "losses": losses,
        "resumed": again,
    }


CASES = {"moe": moe, "resume": resume}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        from roll_async.trainer.megatron.cpu_shim import hide_cuda

        hide_cuda()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        result = CASES[args.case](args.device, scratch)
    print(json.dumps({**result, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
