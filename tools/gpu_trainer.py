"""One side of the trainer comparison of tools/gpu_suite.py, in a process of its own: tokens/s, FLOPs, peak memory.

    python tools/gpu_trainer.py --side write --shape 0.5B --folder DIR
    python tools/gpu_trainer.py --side megatron|transformers --shape 0.5B --folder DIR --longest 2048 --tokens 65536

write makes the random weights, on the device.
Rows have random lengths between half of --longest and --longest, --tokens in all, the same for both sides; one step is
forward, backward, clip and Adam over all of them, in bf16 with float32 main weights. megatron: packed micro-batches,
gradient sums in float32. transformers: FlashAttention 2 on packed rows where the package is installed, else SDPA on
padded rows; gradient sums in bf16. Each side says what it did. Tokens are counted without padding.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

# name -> layers, hidden, heads, key-value heads, ffn, vocabulary, tied, recompute
SHAPES = {
    "tiny": (2, 64, 4, 2, 128, 512, True, False),
    "0.5B": (24, 896, 14, 2, 4864, 151936, True, False),
    "1.5B": (28, 1536, 12, 2, 8960, 151936, True, False),
    "7B": (28, 3584, 28, 4, 18944, 152064, False, True),
}


def write_model(shape: str, folder: Path, device: str) -> None:
    """A random-weight Qwen2.5 checkpoint of that shape, bf16."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    layers, hidden, heads, kv, ffn, vocabulary, tied, _ = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied, pad_token_id=None,
        max_position_embeddings=32768, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def train_mask(tokens: Tensor, lengths: Tensor) -> Tensor:
    """[B,T] bool: every token but the first of a row, which nothing predicts."""
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).clone()
    mask[:, 0] = False
    return mask


def make_rows(longest: int, total: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(tokens [B,T] right-padded with 0, lengths [B]) with `total` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = []
    while sum(lengths) < total:
        length = int(torch.randint(longest // 2, longest + 1, (1,), generator=generator))
        lengths.append(min(length, total - sum(lengths)))
    tokens = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, vocabulary, (length,), generator=generator)
    return tokens, torch.tensor(lengths)


def flops_of_step(shape: str, lengths: Tensor) -> float:
    """Forward and backward without recomputation: 6 per weight of a matrix and token, and causal attention."""
    layers, hidden, heads, kv, ffn, vocabulary, _, _ = SHAPES[shape]
    size = hidden // heads
    matrices = (
        layers * (hidden * (heads + 2 * kv) * size + heads * size * hidden + 3 * hidden * ffn) + hidden * vocabulary
    )
    pairs = float((lengths.double() ** 2).sum()) / 2  # (query, key) pairs a causal mask leaves
    return 6.0 * matrices * float(lengths.sum()) + 3 * 4 * layers * heads * size * pairs


def packs(lengths: Tensor, budget: int) -> list[list[int]]:
    """Rows that fill `budget` tokens, longest first into the first pack with room."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -int(lengths[i])):
        for group in groups:
            if sum(int(lengths[i]) for i in group) + int(lengths[row]) <= budget:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def megatron_step(args: argparse.Namespace, tokens: Tensor, lengths: Tensor) -> tuple[Callable[[], float], dict]:
    """The step, and how it is done."""
    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    worker = MegatronWorker(
        RankSpec.alone(args.device),
        MegatronSettings(
            model_folder=args.folder,
            dtype="bf16",
            optimizer=OptimizerSettings(learning_rate=1e-5),
            micro_batching="packed",
            max_tokens_per_microbatch=args.budget,
            mini_batch_rows=len(lengths),
            recompute=recompute if SHAPES[args.shape][-1] else {},
        ),
    )
    worker.start()
    from megatron.core.optimizer import Adam

    from roll_async.trainer.megatron.model.layer_spec import choose_layers

    mask = train_mask(tokens, lengths)
    return lambda: worker.supervised_update(tokens, lengths, mask), {
        "layers": choose_layers("auto").value,
        "batches": "packed",
        "optimizer": f"Adam of {Adam.__module__.partition('.')[0]}",
        "precision": "bf16; float32 main weights, moments and gradient sums",
    }


class MainWeightAdam:
    """AdamW for plain Transformers that steps float32 copies of bf16 weights: the least that trains as ours does."""

    def __init__(self, model: torch.nn.Module, *, fused: bool) -> None:
        self._weights = list(model.parameters())
        self._main = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._adam = torch.optim.AdamW(self._main, lr=1e-5, weight_decay=0.0, fused=fused)

    def step(self) -> None:
        """Clip, step, and forget the gradients."""
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for main, weight in zip(self._main, self._weights, strict=True):
            assert weight.grad is not None
            main.grad, weight.grad = weight.grad.float(), None
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._main)


def transformers_step(args: argparse.Namespace, tokens: Tensor, lengths: Tensor) -> tuple[Callable[[], float], dict]:
    """The step, and how it is done."""
    from transformers import AutoModelForCausalLM

    flash = args.device == "cuda" and find_spec("flash_attn") is not None
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.bfloat16, attn_implementation="flash_attention_2" if flash else "sdpa"
    ).to(args.device)
    if SHAPES[args.shape][-1]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = MainWeightAdam(model, fused=args.device == "cuda")
    if flash:
        batches = [packed_batch(tokens, lengths, group) for group in packs(lengths, args.budget)]
    else:
        size = max(1, args.budget // tokens.shape[1])
        order = sorted(range(len(lengths)), key=lambda i: -int(lengths[i]))
        batches = [padded_batch(tokens, lengths, order[i : i + size]) for i in range(0, len(order), size)]
    batches = [{name: tensor.to(args.device) for name, tensor in batch.items()} for batch in batches]
    predicted = int((lengths - 1).sum())

    def step() -> float:
        total = 0.0
        for batch in batches:
            targets = batch["targets"]
            inputs = {name: value for name, value in batch.items() if name != "targets"}
            logits = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
            (loss / predicted).backward()
            total += float(loss.detach())
        optimizer.step()
        return total / predicted

    return step, {
        "layers": "transformers, flash_attention_2" if flash else "transformers, sdpa",
        "batches": "packed" if flash else "padded",
        "optimizer": "AdamW of torch",
        "precision": "bf16, gradient sums, too; float32 main weights and moments",
    }


def packed_batch(tokens: Tensor, lengths: Tensor, rows: list[int]) -> dict[str, Tensor]:
    """Rows one after another; positions that start anew tell FlashAttention where."""
    parts = [tokens[i, : lengths[i]] for i in rows]
    targets = [torch.cat([part[1:], part.new_full((1,), -100)]) for part in parts]
    positions = [torch.arange(len(part)) for part in parts]
    return {
        "input_ids": torch.cat(parts)[None],
        "position_ids": torch.cat(positions)[None],
        "targets": torch.cat(targets)[None],
    }


def padded_batch(tokens: Tensor, lengths: Tensor, rows: list[int]) -> dict[str, Tensor]:
    """Rows side by side, cut to the longest. Padding is on the right, so causal attention needs no mask."""
    width = int(lengths[rows].max())
    ids = tokens[rows, :width]
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    targets[torch.arange(width)[None] >= (lengths[rows] - 1)[:, None]] = -100
    return {"input_ids": ids, "targets": targets}


WITHOUT_KERNEL = re.compile(
    r"aten::(empty\w*|resize\w*|set_|view\w*|_?unsafe_view|_reshape_alias|reshape\w*|as_strided|t|transpose|permute|movedim"
    r"|expand\w*|dropout|embedding_backward|slice|select|narrow|split\w*|chunk|unbind|(un)?squeeze|(un)?flatten|detach\w*|alias|lift_fresh|diagonal"
    r"|resolve_\w+|result_type|is_\w+|item|_local_scalar_dense|to|contiguous|unsafe_\w+|new_empty\w*|numpy_T|broadcast_\w+)$"
)
"""Operators that look at memory in another way, or ask for some."""


def launches_of(step: Callable[[], float], *, on_gpu: bool, top: int) -> dict:
    """Kernels that a step starts, most frequent first. On a CPU, where nothing is started: the operators that start one
    on a device, and the loops of compiled code.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    if on_gpu:
        on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        found = Counter(event.name[:80] for event in on_device)
        busy = {"device_busy_s": round(sum(event.device_time for event in on_device) / 1e6, 4)}
    else:
        found, busy = Counter(), {}
        waiting = [event for event in events if event.cpu_parent is None]
        while waiting:
            event = waiting.pop()
            if is_kernel(event.name):
                found[event.name] += 1
            else:
                waiting.extend(event.cpu_children)
    return {"launches": found.total(), "most_launched": dict(found.most_common(top)), **busy}


def is_kernel(name: str) -> bool:
    """Whether an operator starts a kernel on a device."""
    return "fused" in name or (name.startswith(("aten::", "torch_attn::")) and not WITHOUT_KERNEL.match(name))


def measure(args: argparse.Namespace) -> dict:
    tokens, lengths = make_rows(args.longest, args.tokens, SHAPES[args.shape][5])
    make = megatron_step if args.side == "megatron" else transformers_step
    step, about = make(args, tokens, lengths)
    on_gpu = args.device == "cuda"
    losses, seconds = [step(), step()], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        started = time.perf_counter()
        losses.append(step())
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    took = statistics.median(seconds)
    about = {**about, **launches_of(step, on_gpu=on_gpu, top=args.top)} if args.launches else about
    return {
        "ok": True,
        "value": round(int(lengths.sum()) / took, 1),
        "tflops": round(flops_of_step(args.shape, lengths) / took / 1e12, 3),
        "peak_gb": round(peak / 1e9, 2),
        "step_s": round(took, 4),
        "steps": args.steps,
        **about,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["write", "megatron", "transformers"], required=True)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--folder", required=True, help="made by --side write")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest row")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--launches", action="store_true", help="count the kernels that one more step starts")
    parser.add_argument("--top", type=int, default=12, help="kinds of kernels to name, the most frequent first")
    args = parser.parse_args()
    if args.device == "cpu":
        from roll_async.trainer.megatron.cpu_shim import hide_cuda

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        hide_cuda()
    started = time.perf_counter()
    try:
        if args.side == "write":
            write_model(args.shape, Path(args.folder), args.device)
            result = {"ok": True}
        else:
            result = measure(args)
    except torch.cuda.OutOfMemoryError:
        result = {"ok": False, "out_of_memory": True}
    print(json.dumps({**result, "took_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
