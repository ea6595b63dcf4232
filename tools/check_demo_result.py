"""Whether training helped: accuracy of a checkpoint before and after, sampled and greedy, on fresh addition problems in
plain Transformers.

    python tools/check_demo_result.py output/addition_demo/hf [--before output/demo_assets/model] [--rise 0.25]

Exit 0 when the greedy accuracy rose by at least `--rise` and the sampled one did not fall; 1 otherwise. The model it
started from fails by definition: it did not rise.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.rewards.exact_match import ExactMatch


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of right answers of one folder, and the standard error of the sampled one."""

    greedy: float
    sampled: float
    sampled_error: float


def accuracy(folder: str, data: str, temperature: float, seed: int = 0, *, max_new_tokens: int = 96) -> float:
    """Share of right answers. Temperature 0 = greedy."""
    verdicts = judged(folder, data, temperature, seed, max_new_tokens=max_new_tokens)
    return sum(verdicts) / len(verdicts)


def judged(folder: str, data: str, temperature: float, seed: int = 0, *, max_new_tokens: int = 96) -> list[float]:
    """1 or 0 for each row."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    prompts = [row["messages"][0]["content"] for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    judge = ExactMatch()
    return [judge(text, row["ground_truth"], {}).acc for text, row in zip(texts, rows, strict=True)]


def measure(folder: str, data: str, samples: int) -> Accuracy:
    """Greedy once, sampled at temperature 1 `samples` times per row."""
    draws = [judged(folder, data, 1.0, seed) for seed in range(samples)]
    means = [sum(of_row) / samples for of_row in zip(*draws, strict=True)]
    center = sum(means) / len(means)
    spread = sum((m - center) ** 2 for m in means) / (len(means) - 1) / len(means)
    return Accuracy(accuracy(folder, data, 0.0), center, spread**0.5)


def verdict(before: Accuracy, after: Accuracy, rise: float) -> str:
    """Why the training did not help; empty when it did."""
    if after.greedy - before.greedy < rise:
        return f"greedy accuracy rose by {after.greedy - before.greedy:+.3f}, less than {rise:g}"
    error = (before.sampled_error**2 + after.sampled_error**2) ** 0.5
    if after.sampled < before.sampled - 2 * error:
        return f"sampled accuracy fell by {before.sampled - after.sampled:.3f}, more than two standard errors"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the trained model")
    parser.add_argument("--before", default="output/demo_assets/model", help="the model it started from")
    parser.add_argument("--data", default="output/demo_assets/test.jsonl", help="held-out problems")
    parser.add_argument("--rise", type=float, default=0.25, help="least gain of greedy accuracy")
    parser.add_argument("--samples", type=int, default=4, help="sampled answers per problem, temperature 1")
    args = parser.parse_args()
    found = {name: measure(folder, args.data, args.samples) for name, folder in
             (("before", args.before), ("after", args.folder))}  # fmt: skip
    print(f"{'':8}{'greedy':>8}{'sampled':>9}  ({args.data}, plain Transformers)")
    for name, result in found.items():
        print(f"{name:8}{result.greedy:8.3f}{result.sampled:9.3f} +- {result.sampled_error:.3f}")
    problem = verdict(found["before"], found["after"], args.rise)
    if problem:
        print(f"{args.folder}: {problem}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
