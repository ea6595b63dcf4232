"""Log-probs at a large vocabulary: peak memory beyond logits and their gradient, time against plain log-softmax.

    python tools/bench/logprobs_memory.py [--tokens 4096] [--vocabulary 151936] [--chunk 1024] [--device cpu]

Forward and backward. Budgets: memory within 3 (8 with top-k/top-p) chunks of float32, time at most 1.3 times
`log_softmax(logits.float()).gather()`. Each case runs in its own process, so that its peak is its own: on the CPU the
high water mark of the resident memory, on a GPU the allocator's. The default needs 9 GB, because the plain form does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_BUDGET = 1.3
TRUNCATION = {"top_k": 1000, "top_p": 0.95}


def resident_peak() -> int:
    """Bytes of resident memory at its highest since the process began."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would carry the parent's peak through exec
        return next(int(x.split()[1]) << 10 for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def case(args: argparse.Namespace) -> None:
    """One process: memory of the first call, then times; prints a dict."""
    import torch

    sys.path.insert(0, str(ROOT))
    from roll_async.algorithms.logprobs import token_logprobs

    on_gpu = args.device.startswith("cuda")
    generator = torch.Generator(args.device).manual_seed(0)
    logits = torch.empty(1, args.tokens, args.vocabulary, dtype=getattr(torch, args.dtype), device=args.device)
    logits.normal_(std=2.0, generator=generator)
    tokens = torch.randint(0, args.vocabulary, (1, args.tokens), generator=generator, device=args.device)
    settings = TRUNCATION if args.case == "truncated" else {}

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if on_gpu else resident_peak()

    def forward(leaf: torch.Tensor, chunk: int) -> torch.Tensor:
        given = tokens[:, : leaf.shape[1]]
        return token_logprobs(logits_BTV=leaf, tokens_BT=given, chunk_tokens=chunk, **settings).logprobs.sum()

    def chunked(leaf: torch.Tensor) -> None:
        forward(leaf, args.chunk).backward()

    def plain(leaf: torch.Tensor) -> None:
        torch.log_softmax(leaf.float(), -1).gather(-1, tokens[..., None]).sum().backward()

    def timed(form: Callable[[torch.Tensor], None]) -> float:
        times = []
        for _ in range(args.repeats):
            leaf = logits.detach().requires_grad_()
            started = time.perf_counter()
            form(leaf)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    forward(
        logits[:, :2].detach().requires_grad_(), 1
    ).backward()  # libraries and threads are loaded before the mark is read
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else resident_peak()
    loss = forward(logits.detach().requires_grad_(), args.chunk)
    in_forward = peak() - before  # no gradient exists yet
    loss.backward()
    in_backward = peak() - before - logits.nbytes
    result = {"forward_bytes": in_forward, "backward_bytes": in_backward, "logits_bytes": logits.nbytes}
    if args.case == "plain":
        result |= {"chunked_s": timed(chunked), "plain_s": timed(plain)}
        result["plain_extra_bytes"] = peak() - before - logits.nbytes
    print(json.dumps(result))


def report(name: str, value: float, unit: str, ratio: float, budget: float, **more: float | int | str) -> None:
    line = {"name": name, "value": value, "unit": unit, "ratio": round(ratio, 4), "budget": budget, "upper": True}
    print(json.dumps({**line, "ok": ratio <= budget, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--truncated-tokens", type=int, default=1024, help="sorting the vocabulary is slow on a CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--case", choices=("plain", "truncated"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case(args)
        return
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    shape = {"vocabulary": args.vocabulary, "chunk": args.chunk, "dtype": args.dtype, "device": args.device}
    for name, chunks, tokens in (("plain", 3, args.tokens), ("truncated", 8, args.truncated_tokens)):
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            *sys.argv[1:],
            "--case",
            name,
            "--tokens",
            str(tokens),
        ]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        bound = chunks * args.chunk * args.vocabulary * 4
        title = "logprobs_memory" if name == "plain" else "logprobs_memory_truncated"
        worst = max(done["forward_bytes"], done["backward_bytes"])
        extra = {k: v for k, v in done.items() if k.endswith("_bytes")}
        report(
            title,
            worst,
            "B",
            worst / bound,
            1.0,
            bound=bound,
            tokens=tokens,
            **extra,
            **shape,
        )
        if name == "plain":
            ratio = done["chunked_s"] / done["plain_s"]
            seconds = {"plain_s": round(done["plain_s"], 3), "tokens": tokens}
            report("logprobs_time", round(done["chunked_s"], 3), "s", ratio, TIME_BUDGET, **seconds, **shape)


if __name__ == "__main__":
    main()
