"""Log-probs at a large vocabulary, as the trainer makes them (model/output_head.py): memory and time with products.

    python tools/bench/logprobs_memory.py [--tokens 4096] [--vocabulary 151936] [--hidden 896] [--device cpu]
    python tools/bench/logprobs_memory.py --device cuda --tokens 65536 --seconds 0.15    # the head alone

Forward and backward, from hidden states and the output layer's weight. Budgets: memory beyond the gradients within one
piece of logits and 3 (8 with top-k/top-p) chunks of float32, time at most 1.3 times that of
`log_softmax(linear(hidden, weight).float()).gather()`; with --seconds at most so long, and nothing else is measured.
Each case runs in its own process, so that its peak is its own: on the CPU the high water mark of the resident memory,
on a GPU the allocator's. The default needs 9 GB, because the plain form does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TIME_BUDGET = 1.3
TRUNCATION = {"top_k": 1000, "top_p": 0.95}


def resident_peak() -> int:
    """Bytes of resident memory at its highest since the process began."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would carry the parent's peak through exec
        return next(int(x.split()[1]) << 10 for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Alone:
    """A tensor group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def head_logprobs(hidden: Tensor, weight: Tensor, words: Tensor, **sampling: float) -> Tensor:
    """[1,N] log-probs of `words` [1,N] for `hidden` [1,N,H]; the output layer is `weight` [V,H], whole on this rank."""
    from roll_async.trainer.megatron import worker  # noqa: F401  # first: it lets Megatron run without CUDA

    # isort: split
    from roll_async.trainer.megatron.model.output_head import logprobs_of_hidden
    from roll_async.trainer.megatron.settings import MegatronSettings

    head = SimpleNamespace(multiplied_with=weight, tp_group=_Alone())
    asked = torch.arange(words.numel(), device=words.device)
    settings = MegatronSettings(model_folder="", **sampling)
    return logprobs_of_hidden(hidden, head, words, asked, settings, with_entropy=False).logprobs


def case(args: argparse.Namespace) -> None:
    """One process: memory of the first call, then times; prints a dict."""
    on_gpu = args.device.startswith("cuda")
    generator = torch.Generator(args.device).manual_seed(0)
    made = {"dtype": getattr(torch, args.dtype), "device": args.device}
    hidden = torch.empty(1, args.tokens, args.hidden, **made).normal_(std=1.0, generator=generator)
    weight = torch.empty(args.vocabulary, args.hidden, **made).normal_(std=0.05, generator=generator)
    words = torch.randint(0, args.vocabulary, (1, args.tokens), generator=generator, device=args.device)
    settings = TRUNCATION if args.case == "truncated" else {}

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if on_gpu else resident_peak()

    def head(*leaves: Tensor) -> Tensor:
        return head_logprobs(*leaves, words[:, : leaves[0].shape[1]], **settings).sum()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight).float()
        return torch.log_softmax(logits, -1).gather(-1, words[..., None]).sum()

    def seconds(form: Callable[..., Tensor]) -> float:
        times = []
        for _ in range(args.repeats):
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            started = time.perf_counter()
            form(*leaves).backward()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    # Libraries, threads and compiled passes are loaded before the mark is read.
    for tokens in (2, 3):
        head(hidden[:, :tokens].detach().requires_grad_(), weight.detach().requires_grad_()).backward()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else resident_peak()
    loss = head(hidden.detach().requires_grad_(), weight.detach().requires_grad_())
    in_forward = peak() - before  # no gradient exists yet
    loss.backward()
    # The first call left the gradient's pages of the weight to the allocator of the CPU.
    gradients = hidden.nbytes + weight.nbytes if on_gpu else hidden.nbytes
    result = {"forward_bytes": in_forward, "backward_bytes": peak() - before - gradients}
    if args.case != "truncated":
        result["head_s"] = seconds(head)
    if args.case == "plain":
        result |= {"plain_s": seconds(plain), "plain_extra_bytes": peak() - before - gradients}
    print(json.dumps(result))


def report(name: str, value: float, unit: str, ratio: float, budget: float, **more: float | int | str) -> None:
    line = {"name": name, "value": value, "unit": unit, "ratio": round(ratio, 4), "budget": budget, "upper": True}
    print(json.dumps({**line, "ok": ratio <= budget, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--truncated-tokens", type=int, default=1024, help="sorting the vocabulary is slow on a CPU")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="budget of the head alone")
    parser.add_argument("--case", choices=("head", "plain", "truncated"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case(args)
        return
    from roll_async.trainer.megatron.memory_estimate import CHUNK_BYTES, LOGITS_BYTES
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    shape = {"vocabulary": args.vocabulary, "hidden": args.hidden, "dtype": args.dtype, "device": args.device}
    device = args.device.partition(":")[0]
    cases = (("plain", 3, args.tokens), ("truncated", 8, args.truncated_tokens))
    for name, chunks, tokens in (("head", 3, args.tokens),) if args.seconds else cases:
        script = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
        command = [*script, "--case", name, "--tokens", str(tokens)]
        done = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        bound = LOGITS_BYTES[device] + chunks * CHUNK_BYTES[device]
        worst = max(done["forward_bytes"], done["backward_bytes"])
        extra = {k: v for k, v in done.items() if k.endswith("_bytes")}
        title = "logprobs_memory_truncated" if name == "truncated" else "logprobs_memory"
        report(title, worst, "B", worst / bound, 1.0, bound=bound, tokens=tokens, **extra, **shape)
        if name == "plain":
            ratio = done["head_s"] / done["plain_s"]
            seconds = {"plain_s": round(done["plain_s"], 3), "tokens": tokens}
            report("logprobs_time", round(done["head_s"], 3), "s", ratio, TIME_BUDGET, **seconds, **shape)
        elif name == "head":
            ratio = done["head_s"] / args.seconds
            report("logprobs_time", round(done["head_s"], 4), "s", ratio, 1.0, tokens=tokens, **shape)


if __name__ == "__main__":
    main()
