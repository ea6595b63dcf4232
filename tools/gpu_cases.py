"""Small cases of tools/gpu_suite.py that run through code no CPU reaches: each prints one JSON object.

    python tools/gpu_cases.py moe|resume|packing|attention|engine|tensor2|context2|offload|... [--device cuda|cpu]

moe: steps of a tiny mixture-of-experts model, bf16, whose loss must fall.
resume: with optimizer_cpu_offload, two steps, a checkpoint and two more; a second trainer loads it and must take the
same two.
packing, engine, tensor2, context2: log-probs of packed rows, of Transformer Engine's layers, of two tensor and of two
context ranks (each on a device of its own) against those of one rank of local layers and padded rows, bf16.
attention: packed rows in one call of the kernel that is chosen here, against rows one by one in float32, forward and
gradients, for equal and grouped heads, with and without a window.
offload: steps with all memory given back in between, bit by bit the same; what stays allocated meanwhile.
ipc, nccl, engine2, sglang_ipc, sglang_nccl, sleep, fp8, pushes, graphs, adapters, experts: transports and engines; see
gpu_engine_cases.py.
What a case needs and does not find (two devices, Transformer Engine) makes it skipped, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_trainer import make_rows, train_mask

VOCABULARY, LONGEST, TOKENS = 512, 64, 512
LOGPROB_BUDGET = 0.02
"""Mean absolute difference of log-probs in bf16: another order of sums moves each by some 0.01."""
ATTENTION_BUDGET = 0.02
"""Of gradients in bf16, relative to the largest: sums over up to 700 products of numbers with 8 bits."""
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
        RankSpec.alone(device),
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


def packing(device: str, scratch: str) -> dict:
    return compared(device, scratch, {"micro_batching": "packed", "max_tokens_per_microbatch": TOKENS // 2})


def attention(device: str, scratch: str) -> dict:
    """Errors are relative to the largest number; those of rows one by one in bf16 stand beside them."""
    from roll_async.trainer.megatron import worker  # noqa: F401  # first: it lets Megatron run without CUDA

    # isort: split
    from roll_async.trainer.megatron.model.attention import PackedRows, choose_packed_attention, row_by_row

    lengths = (1, 700, 512, 512, 33, 8, 1, 281)
    bounds = [0, *itertools.accumulate(lengths)]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    starts = torch.tensor(bounds, dtype=torch.int32, device=device)
    rows = PackedRows.of(bounds, starts, positions, ranks=1, on_device=False)
    chosen = choose_packed_attention(torch.bfloat16, 64, torch.device(device))
    worst = {"one_call": 0.0, "row_by_row": 0.0}
    for (heads, groups), window in itertools.product(((14, 2), (4, 4)), (None, 64)):
        generator = torch.Generator(device).manual_seed(heads)
        made = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        inputs = [torch.randn(bounds[-1], count, 64, **made) for count in (heads, groups, groups)]
        slope = torch.randn(bounds[-1], heads, 64, **made)

        def results(attend, dtype, inputs=inputs, slope=slope, window=window) -> list[torch.Tensor]:
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
            out = attend(*leaves, rows, None, window)
            return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(dtype))]

        exact = results(row_by_row, torch.float32)
        for name, attend in (("one_call", chosen), ("row_by_row", row_by_row)):
            for found, wanted in zip(results(attend, torch.bfloat16), exact, strict=True):
                error = float((found.float() - wanted).abs().max() / wanted.abs().max())
                worst[name] = max(worst[name], error)
    return {
        "ok": worst["one_call"] <= ATTENTION_BUDGET,
        "value": worst["one_call"],
        "unit": "of the largest",
        "budget": ATTENTION_BUDGET,
        "row_by_row": worst["row_by_row"],
        "kernel": chosen.__qualname__.partition(".")[0],
    }


def engine(device: str, scratch: str) -> dict:
    from roll_async.trainer.megatron.state import engine_import

    if (missing := engine_import.problem()) is not None:
        return {"ok": True, "skipped": missing}
    return compared(device, scratch, {"transformer_impl": "transformer_engine"})


def tensor2(device: str, scratch: str) -> dict:
    return compared(device, scratch, {"parallel": {"tensor": 2, "sequence_parallel": True}}, ranks=2)


def context2(device: str, scratch: str) -> dict:
    return compared(device, scratch, {"parallel": {"context": 2}}, ranks=2)


def compared(device: str, scratch: str, fields: dict, ranks: int = 1) -> dict:
    """Mean and largest difference of log-probs from those of one rank, local layers, padded rows."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        return {"ok": True, "skipped": f"needs {ranks} devices, there are {torch.cuda.device_count()}"}
    write_tiny(scratch, experts=False)
    expected = scored(device, scratch, {"transformer_impl": "local"}, 1)
    found = scored(device, scratch, fields, ranks)
    difference = (found - expected).abs()[expected != 0]
    mean = float(difference.mean())
    return {
        "ok": math.isfinite(mean) and mean <= LOGPROB_BUDGET,
        "value": mean,
        "largest": float(difference.max()),
        "unit": "nat",
        "budget": LOGPROB_BUDGET,
        "tokens": len(difference),
    }


def scored(device: str, folder: str, fields: dict, ranks: int, rows: tuple | None = None) -> torch.Tensor:
    """[B,T] log-probs, from processes of their own: each sees its device only. `rows`: (tokens, lengths, mask)."""
    if rows is None:
        tokens, lengths = make_rows(LONGEST, TOKENS, VOCABULARY)
        rows = (tokens, lengths, train_mask(tokens, lengths))
    from roll_async.cluster.network import held_port

    lists = tuple(part.tolist() for part in rows)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with held_port("127.0.0.1") as port:
        parts = [
            context.Process(target=play_rank, args=(answers, device, folder, fields, i, ranks, port, lists))
            for i in range(ranks)
        ]
        for process in parts:
            process.start()
        try:
            return torch.tensor(answers.get(timeout=120))
        finally:
            for process in parts:
                process.join(30)
                process.kill()


def play_rank(answers, device: str, folder: str, fields: dict, rank: int, ranks: int, port: int, lists: tuple) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank) if device == "cuda" else ""
    from roll_async.trainer.megatron.settings import MegatronSettings, ParallelSizes
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec
    from roll_async.trainer.protocol import TokenRows

    parallel = ParallelSizes(**fields.get("parallel", {}))
    settings = MegatronSettings(model_folder=folder, **{**fields, "parallel": parallel})
    spec = RankSpec(rank=rank, world_size=ranks, master_addr="127.0.0.1", master_port=port, device=device)
    worker = MegatronWorker(spec, settings)
    worker.start()
    tokens, lengths, mask = (torch.tensor(part) for part in lists)
    (share,) = worker.splitter.scoring(TokenRows(tokens=tokens, lengths=lengths, mask=mask))
    found = worker.compute_logprobs(share)
    worker.stop()
    if found is not None:
        answers.put(found.tolist())


def offload(device: str, scratch: str) -> dict:
    write_tiny(scratch, experts=False)
    tokens, lengths = make_rows(LONGEST, TOKENS, VOCABULARY)
    mask = train_mask(tokens, lengths)
    losses, left, held = {}, None, None
    for moves in (False, True):
        worker = start(scratch, device)
        losses[moves] = []
        for _ in range(3):
            losses[moves].append(worker.supervised_update(tokens, lengths, mask))
            if moves:
                held = sum(worker.load_states().device_bytes.values())
                left = worker.offload_states()
                worker.load_states()
        worker.stop()
    assert left is not None
    same = losses[True] == losses[False]
    return {
        "ok": (same or device == "cuda") and sum(left.device_bytes.values()) == 0,
        "bitwise": same,
        "value": sum(left.host_bytes.values()),
        "unit": "bytes moved",
        "held": held,
        "allocated_meanwhile": left.allocated_bytes,
    }


CASES = {
    "moe": moe,
    "resume": resume,
    "packing": packing,
    "attention": attention,
    "engine": engine,
    "tensor2": tensor2,
    "context2": context2,
    "offload": offload,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    import gpu_engine_cases  # which imports this file

    cases = {**CASES, **gpu_engine_cases.CASES}
    parser.add_argument("case", choices=list(cases))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        from roll_async.trainer.megatron.cpu_shim import hide_cuda

        hide_cuda()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        result = cases[args.case](args.device, scratch)
    print(json.dumps({**result, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
