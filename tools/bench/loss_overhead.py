"""What a policy loss costs beside its log-probs: loss, correction, KL, aggregation, metrics, forward and backward.

    python tools/bench/loss_overhead.py [--rows 64] [--length 2048] [--vocabulary 151936] [--measured-tokens 1024]

One line per loss, at the slowest of its ratio levels. The log-probs are measured, forward and backward, on
--measured-tokens tokens, products with the output layer included (model/output_head.py), and scaled to rows x length:
they are computed piece by piece, so their cost is proportional. Budget: 5 % of the log-probs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.algorithms.aggregation import aggregate, count_denominators, reduce_metrics
from roll_async.algorithms.correction import CorrectionOptions, correct, correction_metrics
from roll_async.algorithms.kl import kl_estimate
from roll_async.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from roll_async.config.options.policy_loss_options import POLICY_LOSS_OPTIONS, ProductRatioLevel, RatioLevel
from tools.bench.logprobs_memory import head_logprobs

BUDGET = 0.05
TRUST_LEVELS, WEIGHT_LEVELS = get_args(RatioLevel), get_args(ProductRatioLevel)
LEVELS = {
    "ppo": TRUST_LEVELS,
    "decoupled_ppo": TRUST_LEVELS,
    "tis": WEIGHT_LEVELS,
    "cispo": WEIGHT_LEVELS,
    "topr": WEIGHT_LEVELS,
}


def seconds(work: Callable[[], None], repeats: int, device: str) -> float:
    """The shortest of `repeats` runs, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def logprobs_seconds(args: argparse.Namespace) -> float:
    made = {"dtype": torch.bfloat16, "device": args.device}
    hidden = torch.empty(1, args.measured_tokens, args.hidden, **made).normal_()
    weight = torch.empty(args.vocabulary, args.hidden, **made).normal_(std=0.05)
    tokens = torch.randint(0, args.vocabulary, (1, args.measured_tokens), device=args.device)

    def work() -> None:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        head_logprobs(*leaves, tokens).sum().backward()

    return seconds(work, args.repeats, args.device) * args.rows * args.length / args.measured_tokens


def batch(args: argparse.Namespace) -> PolicyLossInputs:
    g = torch.Generator().manual_seed(0)
    shape = (args.rows, args.length)

    def near(x: Tensor) -> Tensor:
        return x + 0.05 * torch.randn(shape, generator=g)

    current = -torch.rand(shape, generator=g)
    tensors = {
        "logprobs": current,
        "proximal_logprobs": near(current),
        "behaviour_logprobs": near(current),
        "ref_logprobs": near(current),
        "advantages": torch.randn(shape, generator=g),
        "mask": torch.rand(shape, generator=g) < 0.8,
        "scores": torch.randint(0, 2, (args.rows,), generator=g).float(),
        "segment_ids": torch.arange(args.length).expand(shape) // 100,
        "selection": torch.rand(shape, generator=g) < 0.5,
    }
    return PolicyLossInputs(**{name: x.to(args.device) for name, x in tensors.items()})


def step(name: str, options: object, inputs: PolicyLossInputs, leaf: Tensor) -> None:
    """One micro-batch from log-probs to their gradient and the published metrics."""
    denominators = count_denominators(mask_BT=inputs.mask, normalizer_length=2048)
    correction = correct(
        train_logprobs_BT=inputs.proximal_logprobs,
        rollout_logprobs_BT=inputs.behaviour_logprobs,
        mask_BT=inputs.mask,
        options=CorrectionOptions(),
    )
    loss, metrics = POLICY_LOSSES[name](inputs, options=options)
    shared = {"mask_BT": inputs.mask, "denominators": denominators, "mode": "seq-mean-token-mean"}
    total = aggregate(loss_BT=loss, weights_BT=correction.weights, **shared)
    assert inputs.ref_logprobs is not None
    kl = kl_estimate(logprobs_BT=leaf, ref_logprobs_BT=inputs.ref_logprobs, mask_BT=inputs.mask, estimator="k3+")
    (total + 0.01 * aggregate(loss_BT=kl, **shared)).backward()
    reduce_metrics(parts=[metrics], denominators=denominators)
    correction_metrics(sums=correction.sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--measured-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    whole = logprobs_seconds(args)
    inputs = batch(args)
    leaf = inputs.logprobs.requires_grad_()
    for name, options_type in POLICY_LOSS_OPTIONS.items():
        levels = LEVELS.get(name)
        variants = [options_type(ratio_level=level) for level in levels] if levels else [options_type()]
        slowest = max(
            seconds(lambda o=o, n=name: step(n, o, inputs, leaf), args.repeats, args.device) for o in variants
        )
        ratio = slowest / whole
        line = {
            "name": f"loss_overhead_{name}",
            "value": round(slowest, 5),
            "unit": "s",
            "ratio": float(f"{ratio:.3g}"),
        }
        line |= {"budget": BUDGET, "upper": True, "ok": ratio <= BUDGET, "logprobs_s": round(whole, 3)}
        line |= {"tokens": args.rows * args.length, "measured_tokens": args.measured_tokens, "device": args.device}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
